"""Bugs that other systems had in public (peers.md section 3), replayed on weights and paged caches.

Those about one layer are tested beside it; these need the whole: scheduler, sessions, both engines.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from paceline.config import ModelConfig, SpeculationConfig
from paceline.engine.base import Engine
from paceline.engine.loader import load_engine
from paceline.generation import GenerateRequest, SpeculationRequest
from paceline.testing.loopback import Loopback, Run
from tests.e2e import matrix

torch.set_num_threads(1)


def engine(folder: Path, **changes: object) -> Engine:
    config = ModelConfig.model_validate({"source": str(folder), "max_model_len": 512, **changes})
    return load_engine(config, folder)


def run(target: Engine, draft: Engine | None, request: GenerateRequest, draft_tokens: int) -> Run:
    speculation = SpeculationConfig(num_speculative_tokens=draft_tokens)
    [result] = Loopback(target, draft, speculation).run([request])
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.save_model(tmp_path_factory.mktemp("bugs"), seed=1)


@pytest.fixture(scope="module")
def looping_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees its last token only: greedy decoding of it must run into a circle."""
    folder = matrix.save_model(tmp_path_factory.mktemp("looping"), seed=4)
    model = LlamaForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.save_pretrained(folder)
    return folder


def period(token_ids: list[int]) -> int | None:
    """The smallest circle that the last 60 tokens run in, if any of at most 30."""
    tail = token_ids[-60:]
    for length in range(1, 31):
        if all(tail[i] == tail[i - length] for i in range(length, len(tail))):
            return length
    return None


@pytest.mark.parametrize("draft_tokens", [1, 8])
def test_no_14_penalties_do_not_weaken_as_acceptance_rises(folder: Path, draft_tokens: int) -> None:
    request = matrix.request("14", 0.0, max_tokens=64, frequency_penalty=2.0, min_tokens=64)
    result = run(engine(folder), engine(folder), request, draft_tokens)
    assert result.num_accepted_tokens == result.num_draft_tokens > 0
    assert tuple(result.token_ids) == matrix.Oracle(folder).choice(request, 0).token_ids


def test_no_16_a_repetition_penalty_ends_a_loop_under_a_draft(looping_folder: Path) -> None:
    looping = matrix.request("loop", 0.0, max_tokens=160, ignore_eos=True)
    penalized = replace(looping, sampling=replace(looping.sampling, repetition_penalty=1.3))
    target, draft = engine(looping_folder), engine(looping_folder)
    assert period(run(target, draft, looping, 8).token_ids) is not None
    result = run(target, draft, penalized, 8)
    assert result.num_accepted_tokens > 100
    assert period(result.token_ids) is None
    assert result.token_ids == run(target, None, penalized, 8).token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_17_min_tokens_is_exact_inside_a_block(folder: Path, temperature: float) -> None:
    # the bias makes EOS the most likely token from the first position on
    request = matrix.request(
        "17", temperature, min_tokens=5, logit_bias=((matrix.EOS, 100.0),), num_logprobs=0
    )
    result = run(engine(folder), engine(folder), request, 4)
    assert len(result.token_ids) == 6
    assert result.token_ids[-1] == matrix.EOS
    assert matrix.EOS not in result.token_ids[:-1]
    assert result.deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 7])
def test_no_26_usage_is_max_tokens_exactly(folder: Path, max_tokens: int) -> None:
    request = matrix.request("26", 0.0, max_tokens=max_tokens, ignore_eos=True)
    result = run(engine(folder), engine(folder), request, 4)
    assert len(result.token_ids) == max_tokens
    assert result.deltas[-1].finish_reason == "length"


def test_no_28_a_short_draft_context_stops_drafting_and_nothing_else(folder: Path) -> None:
    request = matrix.request("28", 0.0, max_tokens=150, ignore_eos=True)
    short = engine(folder, max_model_len=96)
    result = run(engine(folder), short, request, 4)
    assert result.token_ids == run(engine(folder), None, request, 4).token_ids
    assert result.num_accepted_tokens > 0
    assert all(delta.num_draft_tokens == 0 for delta in result.deltas[-40:])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_32_and_33_a_perfect_draft_is_always_accepted(folder: Path, temperature: float) -> None:
    """K in turn 1..8, then nothing verified for a while, then 4: never one rejection."""
    target, draft = engine(folder), engine(folder)
    loopback = Loopback(target, draft, SpeculationConfig(num_speculative_tokens=8))
    request = matrix.request("32", temperature, max_tokens=300, ignore_eos=True)
    [session_id], result = loopback.add(request)
    sequence = loopback.scheduler._sequences[session_id]
    caps = [*range(1, 9)] * 3 + [0] * 50 + [4] * 200
    for cap in caps:
        sequence.lookahead.asked = cap
        if not loopback.step():
            break
    while loopback.step():
        pass
    assert len(result.token_ids) == 300
    assert result.num_accepted_tokens == result.num_draft_tokens > 150
    blanks = [delta.num_draft_tokens == 0 for delta in result.deltas]
    restart = next(i for i, (a, b) in enumerate(pairwise(blanks)) if i > 30 and a and not b)
    assert result.deltas[restart + 1].num_accepted_tokens == 4  # at once after the pause


def test_no_34_a_warm_cache_drafts_as_well_as_a_cold_one(folder: Path) -> None:
    prompt = tuple((7 * i + 3) % 256 for i in range(200))
    request = replace(matrix.request("34", 0.0, ignore_eos=True), prompt_token_ids=prompt)
    target, draft = engine(folder), engine(folder)
    loopback = Loopback(target, draft, SpeculationConfig())
    [cold], [warm] = loopback.run([request]), loopback.run([request])
    assert cold.deltas[0].num_cached_tokens == 0
    assert warm.deltas[0].num_cached_tokens == 192  # whole blocks of 16
    assert draft.stats().num_prefix_tokens >= 192
    assert warm.token_ids == cold.token_ids
    for result in (cold, warm):
        assert result.num_accepted_tokens == result.num_draft_tokens > 0


def test_no_3_seeds_matter_and_only_above_temperature_0(folder: Path) -> None:
    target, draft = engine(folder), engine(folder)
    for temperature, fewest, most in ((1.0, 15, 20), (0.0, 1, 1)):
        texts = set()
        for seed in range(20):
            request = matrix.request("3", temperature, max_tokens=12, seed=seed)
            texts.add(tuple(run(target, draft, request, 4).token_ids))
        assert fewest <= len(texts) <= most


def test_speculation_off_is_the_same_text(folder: Path) -> None:
    request = matrix.request("off", 0.9, max_tokens=40)
    off = replace(request, speculation=SpeculationRequest("off"))
    target, draft = engine(folder), engine(folder)
    result = run(target, draft, off, 4)
    assert result.num_draft_tokens == 0
    assert result.token_ids == run(target, draft, request, 4).token_ids
