"""Medusa heads of a target over two ranks: candidates and texts of one process, and lost ranks."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.config import ModelConfig
from paceline.engine import tensor_parallel as tp
from paceline.engine.base import EngineBroken, StepItem
from paceline.engine.draft_head import DRAFT_VOCAB
from paceline.engine.torch_engine import TorchEngine
from paceline.errors import ConfigError
from paceline.generation import GenerateRequest
from paceline.sampling.params import SamplingParams
from tests.unit.engine.conftest import VOCAB_SIZE, save_tiny
from tests.unit.engine.counting import FORMS, counting_heads, save_counting
from tests.unit.engine.families import save_family
from tests.unit.engine.medusa_heads import random_heads, rolled_heads, save_heads
from tests.unit.engine.ranks import LOOPBACK, alone, needs_no_gpu, two_ranks
from tests.unit.engine.subjects import COUPLED, GREEDY, tokens
from tests.unit.engine.trees import decoded
from tests.unit.target.conftest import Rig

pytestmark = needs_no_gpu

SMALL_VOCAB = [*range(3, 40), 60, 99]
LENGTH = 30


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_counting(tmp_path_factory.mktemp("counting"))


def heads_of(form: str, folder: Path) -> Path:
    return save_heads(folder, counting_heads(form))


# -- texts ----------------------------------------------------------------------------------------


def requests(rig: Rig, method: str) -> list[GenerateRequest]:
    """Greedy and seeded; every fourth with a penalty (chains); two choices of one prompt."""
    found = []
    for seed in range(8):
        prompt = tokens(seed, 5 + 2 * seed)
        sampling = SamplingParams(temperature=0.8 if seed % 2 else 0.0, seed=seed)
        if seed % 4 > 1:
            sampling = replace(sampling, presence_penalty=0.1)
        made = rig.request(prompt, LENGTH, method=method)
        found.append(replace(made, sampling=sampling, n=1 + (seed == 5)))
    return found


@dataclass
class Written:
    texts: list[list[int]]
    rig: Rig

    def num_accepted(self, is_tree: bool) -> int:
        """Of trees or of chains, by the passes of the target."""
        return sum(
            count
            for plan, counts in zip(self.rig.plans, self.rig.counts, strict=True)
            for item, count in zip(plan.items, counts, strict=True)
            if bool(item.tree_parents) is is_tree
        )


class CountingRig(Rig):
    """`counts`: of every pass, each item's accepted proposals (0 where it had none)."""

    counts: list[list[int]]

    def end(self, plan: Any, results: Any) -> Any:
        self.counts.append([max(0, len(result.token_ids) - 1) for result in results])
        return super().end(plan, results)


def written(engine: TorchEngine, method: str) -> Written:
    """The texts of a target on this engine; the second half finds the prompts of the first in the
    cache, and more of the same text behind them."""
    rig = CountingRig(info=engine.info)
    rig.engine, rig.counts = engine, []
    texts = []
    wanted = requests(rig, method)
    for _ in range(2):
        ids = [rig.submit(request) for request in wanted]
        rig.run()
        texts += [rig.out[session_id] for each in ids for session_id in each]
        ids_of_text = zip(wanted, ids, strict=True)
        wanted = [
            replace(request, prompt_token_ids=(*request.prompt_token_ids, *rig.out[found[0]][:9]))
            for request, found in ids_of_text
        ]
    engine.check_integrity()
    return Written(texts, rig)


@pytest.fixture(scope="module")
def without_heads(base: Path) -> list[list[int]]:
    with two_ranks(base) as two:
        return written(two.engine, "off").texts


@pytest.mark.parametrize("form", FORMS)
def test_texts_are_those_of_two_ranks_without_heads(
    base: Path, tmp_path: Path, without_heads: list[list[int]], form: str
) -> None:
    with two_ranks(base, medusa=heads_of(form, tmp_path)) as two:
        assert two.engine.info.num_heads == 3
        found = written(two.engine, "medusa")
        num_prefix_tokens = two.engine.stats().num_prefix_tokens
    assert found.texts == without_heads
    assert len({tuple(text) for text in found.texts}) > 12
    assert found.num_accepted(is_tree=True) > 40
    assert found.num_accepted(is_tree=False) > 40
    assert num_prefix_tokens > 100


def test_and_those_of_one_process(base: Path, without_heads: list[list[int]]) -> None:
    assert written(alone(base), "off").texts == without_heads


def test_trees_in_blocks_that_two_sequences_share(base: Path, tmp_path: Path) -> None:
    """Each goes on in the middle of a block that both have, which every rank copies in its share;
    and what is moved there is good for the next pass."""
    text = tokens(3, 12)
    found = []
    with two_ranks(base, medusa=heads_of("small", tmp_path)) as two:
        for engine in (two.engine, alone(base)):
            truth = decoded(engine, 1, text[:7], 6, COUPLED)
            for sequence_id in (1, 2):
                engine.add(sequence_id)
                engine.step([StepItem(sequence_id, 0, text, 0, GREEDY)])
            engine.add(3)
            wrong = (truth[0] + 1) % VOCAB_SIZE
            rows, parents = (text[6], wrong, truth[0], wrong, truth[1], wrong), (-1, -1, 0, 1, 3)
            tree = StepItem(1, 6, rows, 6, COUPLED, tree_parents=parents)
            fork = replace(tree, sequence_id=3, start=5, token_ids=(text[5], *rows), fork_of=2)
            for result in engine.step([tree, fork]):
                assert (result.token_ids, result.num_accepted) == (truth[:3], 2)
            after = [StepItem(n, 9, truth[2:3], 1, GREEDY) for n in (1, 3)]
            after.append(StepItem(2, 12, (7,), 1, GREEDY))
            found.append(engine.logits(after))
            engine.check_integrity()
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0][0], found[0][1], rtol=1e-5, atol=1e-5)


# -- candidates -----------------------------------------------------------------------------------


def candidates(engine: TorchEngine) -> list[tuple[tuple[int, ...], ...]]:
    """Behind a prompt, a chain of which nothing is right, and greedy and seeded rows together."""
    found = []
    for sequence_id in (1, 2, 3):
        engine.add(sequence_id)
    items = [
        StepItem(1, 0, tokens(1, 12), 1, GREEDY, num_head_candidates=4),
        StepItem(2, 0, tokens(2, 9), 1, COUPLED, num_head_candidates=3),
        StepItem(3, 0, tokens(3, 7), 0, COUPLED),
    ]
    found += engine.step(items)
    items = [StepItem(n, 6, tokens(n, 9)[6:], 3, COUPLED, num_head_candidates=4) for n in (1, 3)]
    found += engine.step(items)
    named = [result.head_token_ids for result in found]
    assert [len(each) for each in named] == [3, 3, 0, 3, 3]
    return named


def check_candidates(folder: Path, medusa: Path, **fields: Any) -> None:
    expected = candidates(alone(folder, medusa=medusa, **fields))
    with two_ranks(folder, medusa=medusa, **fields) as two:
        assert candidates(two.engine) == expected


@pytest.mark.parametrize("family", ["llama", "qwen2"], ids=["tied", "with biases"])
@pytest.mark.parametrize("form", ["published", "small", "bare"])
def test_candidates_are_those_of_one_process(tmp_path: Path, family: str, form: str) -> None:
    """101 rows of the output layer are not cut evenly."""
    folder = save_tiny(family, tmp_path / "model", initializer_range=0.1)
    tensors = rolled_heads(folder)
    if form == "bare":
        tensors = {name: tensor for name, tensor in tensors.items() if "linear" in name}
    if form == "small":
        tensors = random_heads(3, 1, SMALL_VOCAB)
    check_candidates(folder, save_heads(tmp_path / "heads", tensors))


@pytest.mark.parametrize("family", ["gemma3", "phi3", "mixtral"])
def test_candidates_of_other_families(tmp_path: Path, family: str) -> None:
    folder = save_family(family, tmp_path / "model", initializer_range=0.1, num_key_value_heads=2)
    medusa = save_heads(tmp_path / "heads", random_heads(3, 1, SMALL_VOCAB))
    check_candidates(folder, medusa, max_model_len=256)


def test_an_output_layer_that_is_cut_is_whole_for_the_heads(tmp_path: Path) -> None:
    folder = save_tiny("qwen2", tmp_path / "model", initializer_range=0.1)
    kept = list(range(0, VOCAB_SIZE, 3))
    (folder / DRAFT_VOCAB).write_text(json.dumps(kept), encoding="utf-8")
    check_candidates(folder, save_heads(tmp_path / "heads", random_heads(3, 1, SMALL_VOCAB)))


def test_heads_that_do_not_fit_are_refused_by_rank_0(base: Path, tmp_path: Path) -> None:
    tensors = {
        name: tensor[:, :7].clone()
        for name, tensor in counting_heads("small").items()
        if "draft" not in name and "bias" not in name
    }
    with (
        pytest.raises(ConfigError, match="made for another model"),
        two_ranks(base, medusa=save_heads(tmp_path, tensors)),
    ):
        pytest.fail("it was loaded")


# -- lost ranks -----------------------------------------------------------------------------------


class Hanging(tp.RankGroup):
    """Has its weights, and never takes part in a gather."""

    def finish_loading(self, hf_model: Any, folder: Path, *, needs_output: bool = False) -> Any:
        dist.barrier(group=self._commands)
        self._broadcast(torch.zeros(1, dtype=torch.int32), tp.LOADING_TIMEOUT)
        signal.pause()


def hang_in_gather(model: ModelConfig, folder: Path, address: tuple[str, int]) -> None:
    torch.set_num_threads(1)
    tp.follow(model, folder, Hanging.join(model, 1, address, LOOPBACK))


def test_a_rank_that_hangs_while_the_output_layer_is_gathered_is_noticed(
    base: Path, tmp_path: Path
) -> None:
    asked = {"medusa": heads_of("small", tmp_path), "tensor_parallel_timeout_s": 1.0}
    with (
        pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"),
        two_ranks(base, rank_1=hang_in_gather, **asked),
    ):
        pytest.fail("it was loaded")


@dataclass
class Killer:
    """A clock for the engine, which reads it before and after each forward: once `countdown` is
    set, its so manieth reading ends the process."""

    other: BaseProcess
    countdown: int = 0

    def __call__(self) -> float:
        self.countdown -= 1
        if self.countdown == 0:
            os.kill(self.other.pid or 0, signal.SIGKILL)
            self.other.join()
        return 0.0


def tree_behind(engine: TorchEngine, law: SamplingParams) -> tuple[StepItem, int]:
    """After a prompt: a tree whose second node is right, so that its keys and values move; and the
    right token."""
    prompt = tokens(4, 9)
    engine.add(1)
    [first] = engine.step([StepItem(1, 0, prompt, 1, law, num_head_candidates=2)])
    assert len(first.head_token_ids) == 3
    right = first.token_ids[0]
    nodes, parents = ((right + 1) % VOCAB_SIZE, right, right), (-1, -1, 1)
    rows = (prompt[-1], *nodes)
    tree = StepItem(1, 8, rows, 4, law, tree_parents=parents, num_head_candidates=2)
    return tree, right


@pytest.mark.parametrize("countdown", [1, 2], ids=["before the pass", "before the move"])
def test_a_rank_lost_in_a_tree_breaks_the_engine_for_good(
    base: Path, tmp_path: Path, countdown: int
) -> None:
    medusa = heads_of("small", tmp_path)
    # longer than this test may take: the death itself has to be noticed
    with two_ranks(base, medusa=medusa, tensor_parallel_timeout_s=600.0) as two:
        killer = Killer(two.other)
        engine = TorchEngine(two.runner, two.engine.info, clock=killer)
        tree, truth = tree_behind(engine, COUPLED)
        killer.countdown, found = countdown, []

        def go_on() -> None:
            for _ in range(2):  # a message may be on its way before the death is known
                found.extend(engine.step([tree]))

        with pytest.raises(EngineBroken, match="failed"):
            go_on()
        assert two.other.exitcode == -signal.SIGKILL
        assert [result.token_ids[0] for result in found] in ([], [truth][: countdown - 1])
        assert engine.cached_len(1) == tree.start
        with pytest.raises(EngineBroken, match="lost before"):
            engine.step([tree])
        engine.check_integrity()
        two.runner.close()  # does not talk to a dead rank


def test_a_rank_that_stops_in_a_tree_breaks_the_engine_after_the_timeout(
    base: Path, tmp_path: Path
) -> None:
    with two_ranks(base, medusa=heads_of("bare", tmp_path), tensor_parallel_timeout_s=1.0) as two:
        tree, _ = tree_behind(two.engine, GREEDY)
        os.kill(two.other.pid or 0, signal.SIGSTOP)
        with pytest.raises(EngineBroken, match="failed"):
            two.engine.step([tree])
