"""`python -m tests.fuzz.guided -atheris_runs=1000000`: coverage-guided bytes against the codec.

Needs atheris (`pip install atheris`), which is no dependency of ours: this is for long runs by
hand. Its options are libFuzzer's; a crash leaves a file that brings it back when given as an
argument. What decodes must encode again and mean the same.
"""

from __future__ import annotations

import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["paceline.rpc", "paceline.sampling"]):
    from paceline.config import RpcConfig
    from paceline.errors import RemoteProtocolError
    from paceline.rpc.codec import decode_draft, decode_target, encode_draft, encode_target
    from paceline.rpc.limits import WireLimits
    from paceline.rpc.v1 import speculation_pb2 as pb
    from tests.fuzz.wire import DRAFT_TEMPLATES, TARGET_TEMPLATES

LIMITS = WireLimits.from_config(RpcConfig(), 1000)


def check(body: bytes) -> None:
    """Under a right checksum: an enemy can compute it, a fuzzer cannot guess it."""
    data = pb.SpeculateRequest(crc32=zlib.crc32(body), body=body).SerializeToString()
    for decode, encode in ((decode_draft, encode_draft), (decode_target, encode_target)):
        try:
            messages: list[Any] = decode(data, LIMITS)
        except RemoteProtocolError:
            continue
        again = [message for one in encode(messages, LIMITS) for message in decode(one, LIMITS)]
        assert again == messages


def main() -> None:
    arguments = list(sys.argv)
    if all(argument.startswith("-") for argument in arguments[1:]):
        corpus = Path(tempfile.mkdtemp(prefix="paceline-corpus-"))
        for number, body in enumerate((*DRAFT_TEMPLATES, *TARGET_TEMPLATES)):
            (corpus / str(number)).write_bytes(body)
        arguments.append(str(corpus))
    atheris.Setup(arguments, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
