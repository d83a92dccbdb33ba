"""Bytes that a broken or hostile peer might send: valid messages bent in every way. Pure.

Structure-aware: most mutants pass the checksum and parse, so that what is behind the codec is hit
and not only the codec. `Hints` are values of the live world (ids, epochs, positions, hashes);
they make lies plausible. All randomness comes from one `random.Random`.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

from paceline.rpc.limits import WireLimits
from paceline.rpc.v1 import speculation_pb2 as pb

Hints = dict[str, list[int]]

CORPUS_SIZE = 128
EDGES = (0, 1, 2, 3, 63, 64, 65, 127, 128, 255, 256, 16383, 65535, 65536, 2**24, 2**31 - 1)
WIDE_EDGES = (*EDGES, 2**31, 2**32 - 1, 2**32, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-6, 1e-310, 1e308, float("inf"), float("nan"))
TEXTS = ("", "a", "x" * 256, "x" * 257, "y" * 1025, "a\nb", "\x00", "\u202e", "€", "\U0010ffff")
# Tokens of one entry, entries of one batch: around what a message may hold.
MANY = (17, 64, 65, 300, 1024, 1025, 4000, 21_000, 65_000)
INT32, INT64, UINT32, UINT64, DOUBLE, FLOAT, BOOL, ENUM, STRING, MESSAGE = range(1, 11)
BYTES_TYPE = 12


def seal(body: bytes, crc32: int | None = None) -> bytes:
    """The outer message; the same bytes in both directions."""
    crc = zlib.crc32(body) if crc32 is None else crc32
    return pb.SpeculateRequest(crc32=crc, body=body).SerializeToString()


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class Mutator:
    """Mutants of what one side says. `corpus` holds bodies that honest peers sent lately."""

    def __init__(
        self,
        rng: random.Random,
        frame_type: type[Any],
        limits: WireLimits,
        templates: list[bytes],
        hints: Hints,
    ) -> None:
        self.hints = hints
        self.corpus: deque[bytes] = deque(maxlen=CORPUS_SIZE)
        self._rng = rng
        self._frame_type = frame_type
        self._limits = limits
        self._templates = templates
        self._ways: list[Callable[[], bytes]] = []
        for way, weight in (
            (self._bent_fields, 46),
            (self._bent_body, 14),
            (self._bent_wire, 8),
            (self._replayed, 8),
            (self._concatenated, 5),
            (self._truncated, 5),
            (self._nested, 4),
            (self._random, 4),
            (self._outer, 5),
            (self._huge, 1),
        ):
            self._ways += [way] * weight

    def learn(self, data: bytes) -> None:
        """An honest message, as sent."""
        self.corpus.append(pb.SpeculateRequest.FromString(data).body)

    def next(self) -> bytes:
        return self._rng.choice(self._ways)()

    # -- bases ------------------------------------------------------------------------------

    def _body(self) -> bytes:
        if self.corpus and self._rng.random() < 0.75:
            return self._rng.choice(self.corpus)
        return self._rng.choice(self._templates)

    def _frame(self) -> Any:
        return self._frame_type.FromString(self._body())

    # -- ways -------------------------------------------------------------------------------

    def _bent_fields(self) -> bytes:
        frame = self._frame()
        for _ in range(self._rng.choice((1, 1, 1, 2, 2, 3, 6))):
            self._bend_field(frame)
        return seal(frame.SerializeToString())

    def _bent_body(self) -> bytes:
        return seal(self._bend_bytes(self._body()))

    def _bent_wire(self) -> bytes:
        """The checksum is left as it was, so it nearly always catches this."""
        return self._bend_bytes(seal(self._body()))

    def _replayed(self) -> bytes:
        return seal(self._body())

    def _concatenated(self) -> bytes:
        """Two frames merge; two outer messages make the last body count."""
        first, second = self._body(), self._body()
        if self._rng.random() < 0.5:
            return seal(first + second)
        return seal(first) + seal(second)

    def _truncated(self) -> bytes:
        body = self._body()
        cut = body[: self._rng.randrange(len(body) + 1)]
        if self._rng.random() < 0.5:
            return seal(cut)
        sealed = seal(body)
        return sealed[: self._rng.randrange(len(sealed) + 1)]

    def _nested(self) -> bytes:
        """Unknown fields, groups, lengths that lie, and messages in messages."""
        rng = self._rng
        match rng.randrange(5):
            case 0:
                garbage = b"\x0b" * rng.choice((1, 50, 101, 5000))  # groups that never end
            case 1:
                garbage = varint(rng.randrange(1, 2**29) << 3 | rng.randrange(8)) + self._noise(40)
            case 2:
                garbage = varint(3 << 3 | 2) + varint(rng.choice(WIDE_EDGES)) + self._noise(9)
            case 3:
                garbage = b"\xff" * rng.randrange(1, 16)  # a varint without an end
            case _:
                garbage = b""
                for _ in range(rng.choice((2, 10, 99, 101, 150))):
                    garbage = varint(rng.randrange(1, 12) << 3 | 2) + varint(len(garbage)) + garbage
        body = self._body()
        at = rng.choice((0, len(body)))
        return seal(body[:at] + garbage + body[at:])

    def _random(self) -> bytes:
        noise = self._noise(200)
        return noise if self._rng.random() < 0.5 else seal(noise)

    def _outer(self) -> bytes:
        """The envelope itself: fields missing, twice, of another type, unknown, in any order."""
        rng, body = self._rng, self._body()
        crc = varint(1 << 3 | 5) + zlib.crc32(body).to_bytes(4, "little")
        content = varint(2 << 3 | 2) + varint(len(body)) + body
        parts = [crc, content, crc, content, varint(9 << 3) + varint(rng.choice(WIDE_EDGES))]
        parts.append(varint(1 << 3) + varint(rng.choice(WIDE_EDGES)))
        parts.append(varint(2 << 3 | 2) + varint(rng.choice(WIDE_EDGES)))
        rng.shuffle(parts)
        return b"".join(parts[: rng.randrange(len(parts) + 1)])

    def _huge(self) -> bytes:
        """As large as a message may be, and a little more."""
        rng = self._rng
        if rng.random() < 0.5:
            room = self._limits.max_message_bytes + rng.choice((-40, -20, -12, -8, 0, 1, 4096))
            body = self._body()
            pad = max(0, room - len(body) - 24)
            return seal(body + varint(100 << 3 | 2) + varint(pad) + b"\0" * pad)
        frame = self._frame()
        nodes = [node for node in _nodes(frame) if _repeated(node)]
        if not nodes:
            return seal(frame.SerializeToString())
        node = rng.choice(nodes)
        self._grow(node, rng.choice(_repeated(node)), rng.choice(MANY))
        return seal(frame.SerializeToString())

    # -- pieces -----------------------------------------------------------------------------

    def _noise(self, max_len: int) -> bytes:
        return self._rng.randbytes(self._rng.randrange(max_len))

    def _bend_bytes(self, data: bytes) -> bytes:
        rng, bent = self._rng, bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 4, 9))):
            at = rng.randrange(len(bent) + 1)
            match rng.randrange(6):
                case 0:
                    bent[at : at + 1] = bytes((rng.randrange(256),))
                case 1 if at < len(bent):
                    bent[at] ^= 1 << rng.randrange(8)
                case 2:
                    del bent[at : at + rng.randrange(1, 9)]
                case 3:
                    bent[at:at] = rng.randbytes(rng.randrange(1, 9))
                case 4:
                    bent[at:at] = bent[at : at + rng.randrange(1, 33)]
                case _:
                    bent[at : at + 1] = varint(rng.choice(WIDE_EDGES))
        return bytes(bent)

    def _bend_field(self, frame: Any) -> None:
        rng = self._rng
        node = rng.choice([node for node in _nodes(frame) if node.DESCRIPTOR.fields])
        field = rng.choice(node.DESCRIPTOR.fields)
        if field.is_repeated:
            self._bend_list(node, field)
        elif field.cpp_type == MESSAGE:
            child = getattr(node, field.name)
            if rng.random() < 0.4:
                node.ClearField(field.name)
            else:
                child.SetInParent()
                self._fill(child)
        elif rng.random() < 0.1:
            node.ClearField(field.name)
        else:
            setattr(node, field.name, self._value(field))

    def _bend_list(self, node: Any, field: Any) -> None:
        rng, items = self._rng, getattr(node, field.name)
        match rng.randrange(5):
            case 0 if items:
                del items[rng.randrange(len(items))]
            case 1 if items:
                del items[:]
            case 2 if items and field.cpp_type != MESSAGE:
                items[rng.randrange(len(items))] = self._value(field)
            case 3 if items and field.cpp_type == MESSAGE:
                twin = items.add()
                twin.CopyFrom(items[rng.randrange(len(items))])
                self._bend_field(twin)
            case _:
                self._grow(node, field, rng.choice((1, 1, 2, 5)))

    def _grow(self, node: Any, field: Any, count: int) -> None:
        items = getattr(node, field.name)
        if field.cpp_type != MESSAGE:
            known = self.hints.get(field.name)
            if known and self._rng.random() < 0.8:  # one bad entry would cost the whole list
                items.extend(self._rng.choices(known, k=count))
            else:
                items.extend(self._value(field) for _ in range(count))
            return
        for _ in range(min(count, 4000)):
            if len(items):
                items.add().CopyFrom(items[0])
            else:
                self._fill(items.add())

    def _fill(self, node: Any) -> None:
        """A value for every plain field of an empty message."""
        for field in node.DESCRIPTOR.fields:
            if field.cpp_type == MESSAGE or self._rng.random() < 0.2:
                continue
            if field.is_repeated:
                self._grow(node, field, 2)
            else:
                setattr(node, field.name, self._value(field))

    def _value(self, field: Any) -> Any:
        rng, kind = self._rng, field.cpp_type
        if kind == STRING:
            return (
                rng.randbytes(rng.choice((0, 1, 25, 26)))
                if field.type == BYTES_TYPE
                else (rng.choice(TEXTS))
            )
        if kind in (DOUBLE, FLOAT):
            return rng.choice(FLOATS)
        if kind == BOOL:
            return rng.random() < 0.5
        if kind == ENUM:
            return rng.choice((0, 1, 2, 3, 4, 5, 6, 99, -1, 2**31 - 1))
        bits = 64 if kind in (INT64, UINT64) else 32
        known = self.hints.get(field.name)
        if known and rng.random() < 0.7:
            return max(0, rng.choice(known) + rng.choice((0, 0, 0, 0, 1, -1, 2))) % 2**bits
        return rng.choice(WIDE_EDGES) % 2**bits


def _nodes(message: Any) -> list[Any]:
    """The message and everything inside it."""
    found = [message]
    for field, value in message.ListFields():
        if field.cpp_type == MESSAGE:
            for child in value if field.is_repeated else (value,):
                found += _nodes(child)
    return found


def _repeated(message: Any) -> list[Any]:
    return [field for field in message.DESCRIPTOR.fields if field.is_repeated]
