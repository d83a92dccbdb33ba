"""The closed sets of the wire: our enums on one side, protobuf's numbers on the other. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from paceline.errors import RemoteProtocolError
from paceline.protocol.messages import CloseReason, OpenStatus
from paceline.rpc.v1 import speculation_pb2 as pb
from paceline.sampling.params import VerificationMode

T = TypeVar("T")

# An entry for every member and none for _UNSPECIFIED: what is missing here is refused.
MODES: dict[int, VerificationMode] = {
    pb.VERIFICATION_MODE_GREEDY: VerificationMode.GREEDY,
    pb.VERIFICATION_MODE_COUPLED: VerificationMode.COUPLED,
    pb.VERIFICATION_MODE_REJECTION: VerificationMode.REJECTION,
    pb.VERIFICATION_MODE_BLOCK: VerificationMode.BLOCK,
}
OPEN_STATUSES: dict[int, OpenStatus] = {
    pb.OPEN_STATUS_OK: OpenStatus.OK,
    pb.OPEN_STATUS_BUSY: OpenStatus.BUSY,
    pb.OPEN_STATUS_UNSUPPORTED: OpenStatus.UNSUPPORTED,
}
CLOSE_REASONS: dict[int, CloseReason] = {
    pb.CLOSE_REASON_FINISHED: CloseReason.FINISHED,
    pb.CLOSE_REASON_ABORTED: CloseReason.ABORTED,
    pb.CLOSE_REASON_REPLACED: CloseReason.REPLACED,
    pb.CLOSE_REASON_UNKNOWN: CloseReason.UNKNOWN,
    pb.CLOSE_REASON_PROTOCOL: CloseReason.PROTOCOL,
}
MODE_NUMBERS = {
    VerificationMode.GREEDY: pb.VERIFICATION_MODE_GREEDY,
    VerificationMode.COUPLED: pb.VERIFICATION_MODE_COUPLED,
    VerificationMode.REJECTION: pb.VERIFICATION_MODE_REJECTION,
    VerificationMode.BLOCK: pb.VERIFICATION_MODE_BLOCK,
}
OPEN_STATUS_NUMBERS = {
    OpenStatus.OK: pb.OPEN_STATUS_OK,
    OpenStatus.BUSY: pb.OPEN_STATUS_BUSY,
    OpenStatus.UNSUPPORTED: pb.OPEN_STATUS_UNSUPPORTED,
}
CLOSE_REASON_NUMBERS = {
    CloseReason.FINISHED: pb.CLOSE_REASON_FINISHED,
    CloseReason.ABORTED: pb.CLOSE_REASON_ABORTED,
    CloseReason.REPLACED: pb.CLOSE_REASON_REPLACED,
    CloseReason.UNKNOWN: pb.CLOSE_REASON_UNKNOWN,
    CloseReason.PROTOCOL: pb.CLOSE_REASON_PROTOCOL,
}


def known(name: str, table: Mapping[int, T], number: int) -> T:
    """The member for a number from the wire; proto3 enums are open, so any number may arrive."""
    member = table.get(number)
    if member is None:
        raise RemoteProtocolError(f"{name} {number} is not known")
    return member
