"""Sequences of different salts never share a block, those of equal salts do as before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import ModelConfig
from paceline.engine.base import Engine, EngineInfo, StepItem
from paceline.engine.blocks import BlockPool, WantedRows
from paceline.engine.loader import load_engine
from paceline.engine.prefix_cache import ROOT_DIGEST, chain_digest, root_digest
from paceline.engine.toy import ToyEngine
from paceline.errors import LocalProtocolError
from paceline.sampling.params import SamplingParams
from tests.unit.engine.conftest import VOCAB_SIZE

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple(random.Random(3).choices(range(VOCAB_SIZE), k=23))
U64 = 2**64 - 1


@pytest.fixture(params=["toy", "torch"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "toy":
        yield ToyEngine(EngineInfo("toy", VOCAB_SIZE, 256, BLOCK_SIZE, 64, "toy", ()))
        return
    folder: Path = request.getfixturevalue("llama_folder")
    fields = {"max_model_len": 256, "block_size": BLOCK_SIZE, "num_kv_blocks": 64, "device": "cpu"}
    yield load_engine(ModelConfig(source=str(folder), **fields), folder)


def run(
    engine: Engine, sequence_id: int, salt: int, text: tuple[int, ...] = PROMPT
) -> tuple[int, tuple[int, ...]]:
    """(prompt tokens found in the prefix cache, six greedy tokens)"""
    engine.add(sequence_id)
    item = StepItem(sequence_id, 0, text, 1, GREEDY, cache_salt=salt)
    [first] = engine.step([item])
    found, start, output = first.num_prefix_tokens, len(text), first.token_ids
    for index in range(1, 6):
        item = StepItem(sequence_id, start, output[-1:], 1, GREEDY, index, cache_salt=salt)
        [result] = engine.step([item])
        assert result.num_prefix_tokens == 0
        start, output = start + 1, output + result.token_ids
    engine.check_integrity()
    return found, output


def test_only_an_equal_salt_finds_the_prompt(engine: Engine) -> None:
    runs = [run(engine, number, salt) for number, salt in enumerate([0, 1, U64, 1, 0, U64, 2])]
    assert [found for found, _ in runs] == [0, 0, 0, 20, 20, 20, 0]
    assert len({output for _, output in runs}) == 1
    tables = engine._pool.tables  # type: ignore[attr-defined]
    shared = set(tables[0].blocks) & set(tables[1].blocks) | set(tables[2].blocks) & set(
        tables[6].blocks
    )
    assert shared == set()
    assert tables[1].blocks[:5] == tables[3].blocks[:5]


def test_idle_blocks_are_found_by_their_own_salt_alone(engine: Engine) -> None:
    run(engine, 1, 7)
    engine.free(1)
    assert run(engine, 2, 8)[0] == 0
    assert run(engine, 3, 7)[0] == 20


def test_a_chunked_prompt_keeps_its_salt(engine: Engine) -> None:
    """The blocks of later chunks hang on the first one's, whose root the salt chose."""
    engine.add(1)
    for begin in (0, 6, 12, 18):
        chunk = PROMPT[begin : begin + 6]
        engine.step([StepItem(1, begin, chunk, 0, GREEDY, cache_salt=9)])
    assert run(engine, 2, 0)[0] == 0
    assert run(engine, 3, 9)[0] == 20


def test_a_rewind_to_nothing_may_begin_under_another_salt(engine: Engine) -> None:
    run(engine, 1, 5)
    engine.step([StepItem(1, 0, PROMPT, 1, GREEDY, cache_salt=6)])
    engine.check_integrity()
    assert run(engine, 2, 6)[0] == 20


@pytest.mark.parametrize("salt", [0, 6])
def test_the_salt_of_a_text_does_not_change(engine: Engine, salt: int) -> None:
    engine.add(1)
    engine.step([StepItem(1, 0, PROMPT[:5], 0, GREEDY, cache_salt=5)])
    with pytest.raises(LocalProtocolError, match="the cache salt changed in the middle"):
        engine.step([StepItem(1, 5, PROMPT[5:], 1, GREEDY, cache_salt=salt)])
    assert engine.cached_len(1) == 5


@pytest.mark.parametrize("salt", [-1, 2**64])
def test_a_salt_is_a_u64(engine: Engine, salt: int) -> None:
    engine.add(1)
    with pytest.raises(LocalProtocolError, match=f"cache salt {salt} is no u64"):
        engine.step([StepItem(1, 0, PROMPT, 1, GREEDY, cache_salt=salt)])


def test_roots_differ_from_each_other_and_from_every_block() -> None:
    salts = (0, 1, 2, 255, 256, U64)
    roots = [root_digest(salt) for salt in salts]
    assert roots[0] == ROOT_DIGEST
    assert len(set(roots)) == len(salts)
    # the salt's bytes as token ids name a block, and that is not the root of the salt
    assert all(
        chain_digest(b"", (salt & 0xFFFFFFFF, salt >> 32)) != root_digest(salt) for salt in salts
    )


def test_one_pool_for_all_salts_finds_what_a_pool_for_each_would() -> None:
    rng = random.Random(20261129)
    common = BlockPool(4096, BLOCK_SIZE)
    own = {salt: BlockPool(4096, BLOCK_SIZE) for salt in (0, 1, U64)}
    num_hits = 0
    for sequence_id in range(600):
        salt = rng.choice(list(own))
        text = tuple(rng.choices((0, 1), k=rng.randint(1, 20)))
        for pool in (common, own[salt]):
            pool.add(sequence_id)
        wanted = WantedRows(sequence_id, 0, text, 1, cache_salt=salt)
        [got] = common.reserve([wanted])
        [expected] = own[salt].reserve([wanted])
        assert got.num_prefix_tokens == expected.num_prefix_tokens
        num_hits += got.num_prefix_tokens > 0
        common.commit(got)
        own[salt].commit(expected)
        if rng.random() < 0.7:
            common.free(sequence_id)
            own[salt].free(sequence_id)
        common.check_integrity()
    users: dict[int, set[int]] = {}
    for table in common.tables.values():
        for block in table.blocks:
            users.setdefault(block, set()).add(table.cache_salt)
    assert all(len(salts) == 1 for salts in users.values())
    assert num_hits > 200
