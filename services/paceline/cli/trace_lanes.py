"""A request as lanes, one for each process: blocks that do not cover each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.cli.trace_model import LANES, Request, Round

MAX_LANE_ROWS = 4  # blocks that overlap more often are drawn over each other


@dataclass(frozen=True, slots=True)
class Block:
    """`kind`: a stage's name, or gateway. `round_index`: which of the rounds, None: not of one."""

    kind: str
    began_ns: int
    ended_ns: int
    round_index: int | None = None
    is_reconstructed: bool = False
    row: int = 0


@dataclass(frozen=True, slots=True)
class Lane:
    """`choice`: whose it is, None: the whole request's."""

    name: str
    choice: int | None
    blocks: tuple[Block, ...]

    @property
    def num_rows(self) -> int:
        return 1 + max((block.row for block in self.blocks), default=0)


def lanes_of(request: Request, rounds: Sequence[Round]) -> list[Lane]:
    """The gateway, then target, wire and draft of each choice; who did nothing has none."""
    lanes = []
    if request.span.is_server:
        lanes.append(Lane("gateway", None, (Block("gateway", request.began_ns, request.ended_ns),)))
    for choice in sorted({item.choice for item in rounds}):
        for name in ("target", "wire", "draft"):
            if blocks := _blocks(name, choice, rounds):
                lanes.append(Lane(name, choice, tuple(_packed(blocks))))
    return lanes


def _blocks(name: str, choice: int, rounds: Sequence[Round]) -> list[Block]:
    """Each part once, though two rounds may have it."""
    found: dict[int, Block] = {}
    for index, item in enumerate(rounds):
        for part in item.parts if item.choice == choice else ():
            if part.stage in LANES[name]:
                block = Block(
                    part.stage.span_name,
                    part.began_ns,
                    part.ended_ns,
                    index,
                    part.is_reconstructed,
                )
                found.setdefault(id(part), block)
    return sorted(found.values(), key=lambda block: (block.began_ns, block.ended_ns))


def _packed(blocks: Iterable[Block]) -> Iterable[Block]:
    """Each in the first row that is free by then."""
    reached: list[int] = []
    for block in blocks:
        row = next((r for r, at in enumerate(reached) if at <= block.began_ns), len(reached))
        row = min(row, MAX_LANE_ROWS - 1)
        if row == len(reached):
            reached.append(0)
        reached[row] = max(reached[row], block.ended_ns)
        yield replace(block, row=row)
