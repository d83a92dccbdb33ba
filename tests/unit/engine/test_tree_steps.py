"""Steps with trees, on every engine: the text of plain decoding, and a cache as if decoded."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from paceline.engine.base import Engine, EngineInfo, OutOfBlocks, Propose, StepItem, StepResult
from paceline.engine.pass_plan import SequenceRows
from paceline.engine.runner import Runner
from paceline.engine.scripted import Script, ScriptedEngine
from paceline.engine.timed import TimedEngine
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.toy import ToyEngine
from paceline.errors import LocalProtocolError
from paceline.sampling.params import SamplingParams
from tests.unit.engine.conftest import VOCAB_SIZE
from tests.unit.engine.families import save_family
from tests.unit.engine.subjects import COUPLED, EVERYTHING, GREEDY, assert_close, load, tokens
from tests.unit.engine.trees import decoded, random_tree

INFO = EngineInfo("toy", VOCAB_SIZE, max_model_len=256, block_size=4, num_blocks=256)
BIASED = SamplingParams(
    temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=7, logit_bias=((3, 1.5), (90, -2.0))
)
KINDS = ["toy", "scripted", "scripted draft", "llama", "gemma3"]


@dataclass
class Kind:
    """Makes equal engines, and says which laws they know."""

    make: Callable[[], Engine]
    laws: tuple[SamplingParams, ...] = (GREEDY, COUPLED, BIASED)
    has_logprobs: bool = True


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    name = request.param
    if name == "toy":
        return Kind(lambda: ToyEngine(INFO))
    if name == "scripted":
        return Kind(lambda: ScriptedEngine(INFO), (GREEDY,), has_logprobs=False)
    if name == "scripted draft":
        script = Script.steady(0.5)
        return Kind(lambda: ScriptedEngine(INFO, script), (GREEDY,), has_logprobs=False)
    folder = save_family(name, tmp_path_factory.mktemp(name), max_position_embeddings=512)
    return Kind(lambda: load(folder))


@dataclass
class Writer:
    """One sequence written by trees: `text` so far, `truth` all that it shall become."""

    sequence_id: int
    prompt: tuple[int, ...]
    truth: tuple[int, ...]
    law: SamplingParams
    num_written: int = 0
    num_nodes_right: int = 0

    @property
    def text(self) -> tuple[int, ...]:
        return (*self.prompt, *self.truth[: self.num_written])

    def item(self, rng: random.Random, cached_len: int, max_nodes: int) -> StepItem:
        goes_on = self.truth[self.num_written :]
        nodes, parents, _ = random_tree(rng, rng.randint(0, max_nodes), goes_on[:5], VOCAB_SIZE)
        start = min(cached_len, len(self.text) - 1)
        start = max(0, start - rng.choice((0, 0, 0, 1, 5)))
        rows = (*self.text[start:], *nodes)
        return StepItem(
            self.sequence_id,
            start,
            rows,
            len(nodes) + 1,
            self.law,
            output_index=self.num_written,
            tree_parents=parents,
        )

    def take(self, item: StepItem, result: StepResult) -> None:
        num_new = len(result.token_ids)
        assert result.token_ids == self.truth[self.num_written : self.num_written + num_new]
        if item.tree_parents:
            assert result.num_accepted == num_new - 1
        assert result.cached_len == len(self.text) + num_new - 1
        self.num_written += num_new
        self.num_nodes_right += num_new - 1


def write_all(engine: Engine, writers: Sequence[Writer], rng: random.Random) -> None:
    """Until each has 30 tokens; every pass also has a plain row and a piece of a prefill."""
    engine.add(90)
    engine.step([StepItem(90, 0, tokens(90, 3), 0, GREEDY)])
    prefill_id, prefill_start = 100, 0
    while any(writer.num_written < 30 for writer in writers):
        length = engine.cached_len(90)
        items = [StepItem(90, length, (7,), 1, GREEDY)]
        if prefill_start == 0:
            prefill_id += 1
            engine.add(prefill_id)
        chunk = StepItem(prefill_id, prefill_start, tokens(100, 30)[prefill_start:], 1, GREEDY)
        items.append(replace(chunk, max_rows=6))
        busy = [writer for writer in writers if writer.num_written < 30]
        busy = rng.sample(busy, rng.randint(1, len(busy)))
        for writer in busy:
            items.append(writer.item(rng, engine.cached_len(writer.sequence_id), 9))
        rng.shuffle(items)
        results = dict(zip((item.sequence_id for item in items), engine.step(items), strict=True))
        engine.check_integrity()
        by_id = {item.sequence_id: item for item in items}
        for writer in busy:
            writer.take(by_id[writer.sequence_id], results[writer.sequence_id])
            assert engine.cached_len(writer.sequence_id) == len(writer.text) - 1
        prefill_start = results[prefill_id].cached_len or 0
        if prefill_start == 30:
            engine.free(prefill_id)
            prefill_start = 0


@pytest.mark.parametrize("seed", range(4))
def test_trees_write_what_decoding_writes(kind: Kind, seed: int) -> None:
    rng, reference, engine = random.Random(seed), kind.make(), kind.make()
    writers = []
    for sequence_id in range(1, 5):
        law, prompt = rng.choice(kind.laws), tokens(seed + sequence_id, rng.randint(1, 11))
        truth = decoded(reference, sequence_id, prompt, 40, law)
        engine.add(sequence_id)
        writers.append(Writer(sequence_id, prompt, truth, law))
    write_all(engine, writers, rng)
    assert all(writer.num_nodes_right for writer in writers)
    # what the trees left in the cache is named rightly, and good for others
    num_before = engine.stats().num_prefix_tokens
    for writer in writers:
        rows, index = (*writer.text, 9), writer.num_written + 1
        fresh, again = kind.make(), StepItem(70, 0, rows, 1, writer.law, output_index=index)
        fresh.add(70)
        engine.add(70)
        again = replace(again, max_rows=len(rows))
        [found], [expected] = engine.step([again]), fresh.step([again])
        assert found.num_prefix_tokens == (len(writer.text) - 1) // 4 * 4
        assert found.token_ids == expected.token_ids
        engine.free(70)
        engine.free(writer.sequence_id)
    assert engine.stats().num_prefix_tokens > num_before
    engine.check_integrity()


def with_tree(text: Sequence[int], nodes: tuple[int, ...], parents: tuple[int, ...]) -> StepItem:
    rows = (text[-1], *nodes)
    return StepItem(1, len(text) - 1, rows, len(rows), GREEDY, tree_parents=parents)


def test_a_path_deep_in_garbage_is_accepted_whole(kind: Kind) -> None:
    engine, prompt = kind.make(), tokens(1, 6)
    a, b, c, d, e = decoded(engine, 1, prompt, 5, GREEDY)
    w = next(i for i in range(VOCAB_SIZE) if i not in (a, b, c, d, e))
    # right: nodes 1 (a), 4 (b), 5 (c), 8 (d); the b of node 2 goes on from the wrong node
    nodes, parents = (w, a, b, w, b, c, c, w, d), (-1, -1, 0, 1, 1, 4, 3, 5, 5)
    engine.add(1)
    engine.step([StepItem(1, 0, prompt[:-1], 0, GREEDY)])
    [result] = engine.step([with_tree(prompt, nodes, parents)])
    assert (result.token_ids, result.num_accepted) == ((a, b, c, d, e), 4)
    assert result.cached_len == engine.cached_len(1) == len(prompt) + 4
    engine.check_integrity()
    # nothing right, and a sibling that comes too late: the first of two equal nodes is taken
    engine.step([StepItem(1, 0, prompt[:-1], 0, GREEDY)])
    [result] = engine.step([with_tree(prompt, (w, w), (-1, 0))])
    assert (result.token_ids, result.num_accepted, result.cached_len) == ((a,), 0, len(prompt))
    [result] = engine.step([with_tree(prompt, (a, a, b), (-1, -1, 1))])
    assert (result.token_ids, result.num_accepted) == ((a, b), 1)


def test_logprobs_are_those_of_the_path(kind: Kind) -> None:
    if not kind.has_logprobs:
        pytest.skip("it has none")
    engine, prompt = kind.make(), tokens(2, 6)
    truth = decoded(engine, 1, prompt, 3, COUPLED)
    engine.add(1)
    engine.step([StepItem(1, 0, prompt[:-1], 0, GREEDY)])
    chain = StepItem(1, 5, (prompt[-1], *truth[:2]), 3, COUPLED, num_logprobs=4)
    [expected] = engine.step([chain])
    w = (truth[0] + 1) % VOCAB_SIZE
    rows, parents = (prompt[-1], w, truth[0], w, truth[1], w), (-1, -1, 0, 1, -1)
    tree = replace(chain, token_ids=rows, num_samples=6, tree_parents=parents)
    [result] = engine.step([tree])
    assert result.token_ids == expected.token_ids == truth
    assert len(result.logprobs) == 3
    for one, other in zip(result.logprobs, expected.logprobs, strict=True):
        assert_close(one, other)


def test_a_tree_over_blocks_that_another_shares(kind: Kind) -> None:
    """A rewind into a block that two sequences have, and a fork: neither sees the other's nodes."""
    engine, text = kind.make(), tokens(3, 14)
    truth = decoded(engine, 1, text[:7], 6, GREEDY)
    whole = decoded(engine, 1, text, 1, GREEDY)
    for sequence_id in (1, 2):
        engine.add(sequence_id)
        engine.step([StepItem(sequence_id, 0, text, 1, GREEDY, max_rows=14)])
    w = (truth[0] + 1) % VOCAB_SIZE
    rows, parents = (text[6], w, truth[0], w, truth[1], w), (-1, -1, 0, 1, 3)
    tree = StepItem(1, 6, rows, 6, GREEDY, tree_parents=parents)
    fork = replace(tree, sequence_id=3, fork_of=2)
    engine.add(3)
    for result in engine.step([tree, fork]):
        assert (result.token_ids, result.num_accepted, result.cached_len) == (truth[:3], 2, 9)
    engine.check_integrity()
    after = [StepItem(n, 9, truth[2:3], 1, GREEDY) for n in (1, 3)]
    after.append(StepItem(2, 13, text[13:], 1, GREEDY))
    found = [result.token_ids for result in engine.step(after)]
    assert found == [truth[3:4], truth[3:4], whole]
    engine.check_integrity()


def test_a_tree_without_room_changes_nothing(kind: Kind) -> None:
    engine = kind.make()
    engine.add(1)
    engine.add(2)
    engine.step([StepItem(1, 0, tokens(1, 6), 0, GREEDY)])
    for sequence_id in range(2, 8):  # all but one block
        if sequence_id > 2:
            engine.add(sequence_id)
        length = min(250, 4 * (engine.stats().num_free_blocks - 1))
        if length:
            engine.step([StepItem(sequence_id, 0, tokens(sequence_id, length), 0, GREEDY)])
    assert engine.stats().num_free_blocks == 1
    tree = StepItem(1, 5, (8, *tokens(9, 8)), 9, GREEDY, tree_parents=(-1,) * 8)
    before = engine.stats()
    with pytest.raises(OutOfBlocks):
        engine.step([tree])
    assert (engine.stats(), engine.cached_len(1)) == (before, 6)
    engine.check_integrity()
    fits = replace(tree, token_ids=tree.token_ids[:7], num_samples=7, tree_parents=(-1,) * 6)
    [result] = engine.step([fits])
    assert result.cached_len == 6 + (result.num_accepted or 0)
    assert engine.stats().num_free_blocks == (result.cached_len <= 8)
    engine.check_integrity()


SLIPS = [
    ({"num_samples": 2}, "3 nodes need 4 samples, not 2"),
    ({"tree_parents": (-1, 1, 0)}, "node 1 of a tree cannot go on from node 1"),
    ({"tree_parents": (-1, -2, 0)}, "node 1 of a tree cannot go on from node -2"),
    ({"tree_parents": (0, -1, 0)}, "node 0 of a tree cannot go on from node 0"),
    ({"token_ids": (1, 2, 3)}, "4 samples of 3 rows"),
    ({"num_runner_ups": 1}, "a tree has neither a rule nor runner-ups"),
    ({"max_rows": 9}, "a tree is no part of a prefill"),
]
MORE_SLIPS = [
    ({"rule": Propose(0)}, "a tree has neither a rule nor runner-ups"),
    ({"num_prompt_logprobs": 0}, "a tree is no part of a prefill"),
    ({"sampling": EVERYTHING}, "a tree cannot have penalties"),
    ({"sampling": SamplingParams(min_tokens=2)}, "a tree cannot have penalties"),
    ({"sampling": SamplingParams(grammar="x")}, "a tree cannot have penalties"),
]


@pytest.mark.parametrize(("changes", "problem"), SLIPS + MORE_SLIPS)
def test_slips_are_refused_and_change_nothing(
    kind: Kind, changes: dict[str, object], problem: str
) -> None:
    if (changes, problem) in MORE_SLIPS and kind.laws == (GREEDY,):
        pytest.skip("it refuses these anyway")
    engine = kind.make()
    engine.add(1)
    engine.step([StepItem(1, 0, (1, 2, 3), 0, GREEDY)])
    good = StepItem(1, 3, (5, 6, 7, 8), 4, GREEDY, tree_parents=(-1, 0, -1))
    before = engine.stats()
    with pytest.raises(LocalProtocolError, match=problem):
        engine.step([replace(good, **changes)])  # type: ignore[arg-type]
    assert (engine.stats(), engine.cached_len(1)) == (before, 3)
    engine.check_integrity()
    assert engine.step([good])[0].token_ids


class StuckRunner:
    """Fails to move the last slot: what it has moved before is not to be trusted."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.is_stuck = runner, True
        self.dtype, self.device = runner.dtype, runner.device

    def forward(self, rows: Sequence[SequenceRows]) -> torch.Tensor:
        return self.runner.forward(rows)

    def head_logits(self, rows: Sequence[int]) -> torch.Tensor:
        return self.runner.head_logits(rows)

    def move(self, slots: Sequence[tuple[int, int]]) -> None:
        self.runner.move(slots[:-1] if self.is_stuck else slots)
        if self.is_stuck:
            raise RuntimeError("no memory")

    def close(self) -> None:
        self.runner.close()


def test_a_failed_move_takes_the_pass_back(tmp_path: Path) -> None:
    whole = load(save_family("llama", tmp_path, max_position_embeddings=512))
    assert isinstance(whole, TorchEngine)
    runner = StuckRunner(whole._runner)
    engine, prompt = TorchEngine(runner, whole.info), tokens(4, 7)
    truth = decoded(engine, 1, prompt, 4, GREEDY)
    engine.add(1)
    engine.step([StepItem(1, 0, prompt[:-1], 0, GREEDY)])
    w = (truth[0] + 1) % VOCAB_SIZE
    tree = with_tree(prompt, (w, truth[0], truth[1]), (-1, -1, 1))
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step([tree])
    assert engine.cached_len(1) == 6
    engine.check_integrity()
    runner.is_stuck = False
    assert engine.step([tree])[0].token_ids == truth[:3]


def test_all_rows_of_a_tree_cost_time() -> None:
    slept: list[float] = []
    engine = TimedEngine(
        ToyEngine(INFO), base_ms=1.0, row_ms=2.0, sleep=slept.append, clock=lambda: 0.0
    )
    engine.add(1)
    engine.step([StepItem(1, 0, (1, 2, 3), 0, GREEDY)])
    engine.step([StepItem(1, 2, (3, 4, 5, 6), 4, GREEDY, tree_parents=(-1, -1, -1))])
    assert slept == [0.007, 0.009]
