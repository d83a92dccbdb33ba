"""Outputs that follow a grammar: with any draft exactly those of the target alone, always valid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llguidance import LLMatcher

from paceline.config import ModelConfig, SpeculationConfig, TargetConfig
from paceline.engine.base import Engine
from paceline.engine.grammar_masks import GrammarMasks
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.torch_loader import load_torch_engine
from paceline.generation import GenerateRequest, Resumption, SpeculationRequest
from paceline.models import TOY_EOS_TOKEN_ID
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.testing.loopback import Loopback, Run
from tests.e2e.structured import GRAMMAR, Adversary, problem, save_model, text_of, toy

torch.set_num_threads(1)

NUM_OUTPUTS = 200
KS = (1, 4, 8)
LAWS = {"greedy": SamplingParams(0.0, grammar=GRAMMAR), "coupled": SamplingParams(grammar=GRAMMAR)}
TOY_DRAFTS: dict[str, Callable[[], Engine]] = {
    "perfect": toy,
    "other": lambda: toy(seed=9),
    "without grammars": lambda: toy(has_grammars=False),
    "adversarial": lambda: Adversary(
        toy(has_grammars=False), toy().info.vocab_size, TOY_EOS_TOKEN_ID
    ),
}


def requests(law: SamplingParams, count: int, **changes: object) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"structured-{i}",
            prompt_token_ids=tuple(f"shape number {i}: ".encode()),
            max_tokens=200,
            sampling=replace(law, seed=i),
            **changes,  # type: ignore[arg-type]
        )
        for i in range(count)
    ]


def speculation(k: int) -> SpeculationConfig:
    return SpeculationConfig(num_speculative_tokens=k, max_num_speculative_tokens=8)


def run(
    target: Engine,
    draft: Engine | None,
    wanted: list[GenerateRequest],
    k: int = 4,
    fan_out: int = 0,
    config: TargetConfig | None = None,
) -> list[Run]:
    runs = Loopback(target, draft, speculation(k), config, fan_out).run(wanted)
    for engine in (target, draft):
        if engine is not None:
            engine.check_integrity()
            assert engine.stats().num_sequences == 0
    return runs


def texts(runs: list[Run]) -> list[list[int]]:
    return [run.token_ids for run in runs]


def accepted(runs: list[Run]) -> int:
    return sum(run.num_accepted_tokens for run in runs)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("draft", TOY_DRAFTS)
def test_any_draft_gives_the_targets_own_output(law: str, draft: str) -> None:
    wanted = requests(LAWS[law], 2)
    alone = texts(run(toy(), None, wanted))
    assert [problem(text_of(text)) for text in alone] == [""] * 2
    assert len({tuple(text) for text in alone}) > 1
    for k in KS:
        runs = run(toy(), TOY_DRAFTS[draft](), wanted, k, fan_out=2 if k == 4 else 0)
        assert texts(runs) == alone, k
        if draft == "perfect":
            assert accepted(runs) >= 0.7 * sum(map(len, alone)) * k / (k + 1)


@pytest.mark.parametrize("mode", [VerificationMode.REJECTION, VerificationMode.BLOCK])
@pytest.mark.parametrize("draft", ["perfect", "other", "without grammars"])
def test_the_rejection_modes_give_valid_outputs_alone(mode: VerificationMode, draft: str) -> None:
    wanted = requests(LAWS["coupled"], 3, speculation=SpeculationRequest(mode=mode))
    for k in KS if draft != "without grammars" else KS[1:2]:
        runs = run(toy(), TOY_DRAFTS[draft](), wanted, k)
        assert [problem(text_of(text)) for text in texts(runs)] == [""] * 3
        assert any(run.num_draft_tokens for run in runs)
        if draft == "perfect":
            assert accepted(runs) > 0


@pytest.mark.parametrize("law", LAWS)
def test_preempted_outputs_go_on_where_they_were(law: str) -> None:
    """Room for two of six: the others lose their cache, and their state with it."""
    wanted = requests(LAWS[law], 6)
    alone = texts(run(toy(), None, wanted))
    small = toy(num_blocks=30)
    loopback = Loopback(small, toy(), speculation(4), TargetConfig(max_num_seqs=6))
    runs = loopback.run(wanted)
    assert loopback.scheduler.stats.num_preemptions > 0
    assert texts(runs) == alone
    assert len(small._masks) == 0


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("draft", TOY_DRAFTS)
def test_an_output_can_be_resumed_at_any_token(law: str, draft: str) -> None:
    [wanted] = requests(LAWS[law], 1)
    [alone] = texts(run(toy(), None, [wanted]))
    for cut in range(1, len(alone), 25):
        resumed = replace(wanted, resumption=Resumption(1, (tuple(alone[:cut]),)))
        [rest] = texts(run(toy(), TOY_DRAFTS[draft](), [resumed]))
        assert alone[:cut] + rest == alone


def test_sequences_of_one_batch_have_grammars_of_their_own() -> None:
    """Two grammars, and no grammar, beside each other: each is as if it were alone."""
    number = LLMatcher.grammar_from_regex("[1-9][0-9]{3,5}")
    laws = [
        SamplingParams(0.0, grammar=GRAMMAR),
        SamplingParams(0.9, grammar=number),
        SamplingParams(0.9),
        SamplingParams(0.0, repetition_penalty=1.3, grammar=number),
    ]
    wanted = [requests(law, 1, n=2)[0] for law in laws]
    wanted = [replace(one, request_id=f"r{i}", max_tokens=100) for i, one in enumerate(wanted)]
    for draft in (None, toy(), TOY_DRAFTS["adversarial"]()):
        together = run(toy(), draft, wanted)
        for one, mixed in zip(wanted, together, strict=True):
            [alone] = run(toy(), None, [one])
            assert [mixed.text(0), mixed.text(1)] == [alone.text(0), alone.text(1)]
        assert problem(text_of(together[0].token_ids)) == ""
        assert 1000 <= int(text_of(together[1].text(1))) < 1_000_000
        assert 1000 <= int(text_of(together[3].token_ids)) < 1_000_000


def test_a_grammar_goes_with_every_other_parameter() -> None:
    law = SamplingParams(
        0.8,
        top_k=30,
        top_p=0.95,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias=((34, 3.0), (125, -100.0)),
        min_tokens=190,  # more than there is to say: the end is then the only choice
        grammar=GRAMMAR,
    )
    wanted = requests(law, 2)
    alone = texts(run(toy(), None, wanted))
    assert [problem(text_of(text)) for text in alone] == [""] * 2
    for draft in TOY_DRAFTS.values():
        assert texts(run(toy(), draft(), wanted)) == alone


# -- a model with weights ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(root / name, seed) for seed, name in enumerate(("target", "other"))}


def llama(folder: Path) -> TorchEngine:
    model = ModelConfig(source=str(folder), max_model_len=256, num_kv_blocks=4096, device="cpu")
    return load_torch_engine(model, folder)


def knowing_nothing(folder: Path) -> Engine:
    """As a draft whose folder has no tokenizer that llguidance reads."""
    engine = llama(folder)
    engine._masks = GrammarMasks(None)
    return engine


def decoded(target: Engine, token_ids: list[int]) -> str:
    grammars = target.info.grammars
    assert grammars is not None
    return grammars._tokenizer.decode_str([i for i in token_ids if i != 0])


def test_two_hundred_objects_of_three_levels_are_valid_and_as_without_a_draft(
    models: dict[str, Path],
) -> None:
    target = llama(models["target"])
    wanted = requests(SamplingParams(0.0, grammar=GRAMMAR), NUM_OUTPUTS)
    wanted = [replace(one, prompt_token_ids=(5 + i, 7, 9 + i % 90)) for i, one in enumerate(wanted)]
    config = TargetConfig(max_num_seqs=64, max_queued_seqs=NUM_OUTPUTS)
    alone = run(target, None, wanted, config=config)
    helped = Adversary(knowing_nothing(models["target"]), target.info.vocab_size, 0)
    drafted = run(target, helped, wanted, config=config)
    valid = [problem(decoded(target, text)) == "" for text in texts(drafted)]
    assert (len(valid), sum(valid)) == (NUM_OUTPUTS, NUM_OUTPUTS)
    assert texts(drafted) == texts(alone)
    assert 0 < accepted(drafted) < sum(run.num_draft_tokens for run in drafted)
    assert len({tuple(text) for text in texts(alone)}) > 20


@pytest.mark.parametrize("mode", VerificationMode)
@pytest.mark.parametrize("other", ["target", "other"])
def test_a_model_with_weights_follows_a_grammar_in_every_mode(
    models: dict[str, Path], mode: VerificationMode, other: str
) -> None:
    target, draft = llama(models["target"]), llama(models[other])
    law = LAWS["greedy" if mode is VerificationMode.GREEDY else "coupled"]
    wanted = requests(law, 8, speculation=SpeculationRequest(mode=mode))
    wanted = [replace(one, prompt_token_ids=(5 + i, 7, 11)) for i, one in enumerate(wanted)]
    alone = texts(run(target, None, wanted))
    for k in KS:
        runs = run(target, draft, wanted, k, fan_out=2 if k == 4 else 0)
        assert [problem(decoded(target, text)) for text in texts(runs)] == [""] * 8
        assert any(run.num_draft_tokens for run in runs)
        if mode in (VerificationMode.GREEDY, VerificationMode.COUPLED):
            assert texts(runs) == alone
