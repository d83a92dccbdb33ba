"""What target and draft log, at the lowest level, says nothing of what they read and write."""

from __future__ import annotations

import logging

import pytest

from tests.rpc import fleet

PROMPT = tuple(range(61, 40, -1))
OUR_LOGGERS = ("paceline", "ray.serve")
MAX_LINE_CHARS = 500


def traces(token_ids: tuple[int, ...]) -> set[str]:
    """How three of them in a row may look: as Python's list, as protobuf's text form."""
    threes = [token_ids[start : start + 3] for start in range(len(token_ids) - 2)]
    lists = {", ".join(map(str, three)) for three in threes}
    return lists | {"\n".join(f"tokens: {token}" for token in three) for three in threes}


async def test_no_tokens_in_any_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    settings = fleet.config()
    said: list[tuple[int, ...]] = [PROMPT]
    num_proposed = 0
    async with fleet.target(settings) as target:
        for number in range(2):  # two drafts, one after the other: they come and go
            async with fleet.draft(settings, target, error_rate=0.5, name=f"draft-{number}"):
                for seed in range(3):
                    name = f"{number}-{seed}"
                    wanted = fleet.request(name, temperature=0.8, seed=seed, prompt=PROMPT)
                    deltas = await fleet.collect(target, wanted)
                    said.append(fleet.tokens(deltas))
                    num_proposed += fleet.proposed(deltas)
                async for _ in fleet.rounds(target, fleet.request("left", prompt=PROMPT)):
                    break  # its client leaves
        await fleet.until_free(target)
    lines = [
        f"{record.getMessage()} {record.exc_text or ''}"
        for record in caplog.records
        if record.name.startswith(OUR_LOGGERS)
    ]
    assert num_proposed > 0
    assert any("draft-1" in line for line in lines)
    everything = "\n".join(lines)
    known = {trace for token_ids in said for trace in traces(token_ids)}
    assert len(known) > 100
    assert [trace for trace in known if trace in everything] == []
    assert max(map(len, lines)) <= MAX_LINE_CHARS
