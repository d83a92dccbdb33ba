"""{greedy, coupled} x {every parameter, ten mixtures of all} x {three drafts, none}."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline.config import ModelConfig, SpeculationConfig
from paceline.engine.base import Engine
from paceline.engine.loader import load_engine
from paceline.gateway.assembler import Assembler
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import GenerateRequest, RoundDelta
from paceline.testing.loopback import Loopback
from tests.e2e import matrix

torch.set_num_threads(1)

CASES = matrix.SINGLE | matrix.mixtures(10)
TEMPERATURES = {"greedy": 0.0, "coupled": 0.9}
DRAFTS = ("none", "perfect", "random", "adversarial")


class Bench:
    """One target, the oracle of its weights, and the drafts."""

    def __init__(self, folder: Path) -> None:
        weights = matrix.save_model(folder / "target", seed=1)
        others = matrix.save_model(folder / "other", seed=2)
        self.oracle = matrix.Oracle(weights)
        self.target = _engine(weights)
        self.drafts: dict[str, Engine | None] = {
            "none": None,
            "perfect": _engine(weights),
            "random": _engine(others),
            "adversarial": matrix.Adversary(_engine(weights)),
        }

    def run(self, draft: str, request: GenerateRequest, draft_tokens: int = 4) -> list[RoundDelta]:
        speculation = SpeculationConfig(num_speculative_tokens=draft_tokens)
        loopback = Loopback(self.target, self.drafts[draft], speculation)
        [run] = loopback.run([request])
        for engine in (self.target, self.drafts[draft]):
            if engine is not None:
                engine.check_integrity()
                assert engine.stats().num_free_blocks == engine.info.num_blocks
        return run.deltas


def _engine(folder: Path) -> Engine:
    return load_engine(ModelConfig(source=str(folder), max_model_len=256), folder)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("mode", TEMPERATURES)
@pytest.mark.parametrize("name", CASES)
def test_every_parameter_gives_the_oracles_tokens(
    bench: Bench, name: str, mode: str, draft: str
) -> None:
    request = matrix.request(name, TEMPERATURES[mode], **CASES[name])
    deltas = bench.run(draft, request)
    for index in range(request.n):
        expected = bench.oracle.choice(request, index)
        mine = matrix.choice_of(deltas, index)
        assert tuple(t for delta in mine for t in delta.token_ids) == expected.token_ids
        assert [d.finish_reason for d in mine if d.finish_reason] == [expected.finish_reason]
        _check_logprobs(request, mine, expected, bench.oracle)
    _check_prompt_logprobs(request, deltas, bench.oracle)
    assert all(t < matrix.VOCAB_SIZE for delta in deltas for t in delta.token_ids)


def _check_logprobs(
    request: GenerateRequest,
    deltas: Sequence[RoundDelta],
    expected: matrix.Expected,
    oracle: matrix.Oracle,
) -> None:
    entries = [entry for delta in deltas for entry in delta.logprobs]
    if request.num_logprobs is None:
        assert entries == []
        return
    assert tuple(entry.token_id for entry in entries) == expected.token_ids
    assert [entry.logprob for entry in entries] == pytest.approx(
        expected.logprobs, abs=matrix.LOGPROB_TOLERANCE
    )
    prefix = request.prompt_token_ids
    for entry in entries:
        _check_top(entry.top, request.num_logprobs, prefix, oracle)
        prefix = (*prefix, entry.token_id)


def _check_prompt_logprobs(
    request: GenerateRequest, deltas: Sequence[RoundDelta], oracle: matrix.Oracle
) -> None:
    entries = [entry for delta in deltas for entry in delta.prompt_logprobs]
    if request.num_prompt_logprobs is None:
        assert entries == []
        return
    prompt = request.prompt_token_ids
    assert tuple(entry.token_id for entry in entries) == prompt[1:]
    for end, entry in enumerate(entries, start=1):
        truth = oracle.logprob(prompt[:end], prompt[end])
        assert entry.logprob == pytest.approx(truth, abs=matrix.LOGPROB_TOLERANCE)
        _check_top(entry.top, request.num_prompt_logprobs, prompt[:end], oracle)


def _check_top(
    top: Sequence[tuple[int, float]],
    num_top: int,
    prefix: tuple[int, ...],
    oracle: matrix.Oracle,
) -> None:
    row = oracle.logits(prefix)
    best = sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id))[:num_top]
    assert [token_id for token_id, _ in top] == best
    truth = [oracle.logprob(prefix, token_id) for token_id in best]
    assert [logprob for _, logprob in top] == pytest.approx(truth, abs=matrix.LOGPROB_TOLERANCE)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("draft_tokens", [1, 4, 8])
@pytest.mark.parametrize("mode", TEMPERATURES)
def test_stop_strings_end_at_the_same_token(
    bench: Bench, mode: str, draft_tokens: int, draft: str
) -> None:
    plain = matrix.request("plain", TEMPERATURES[mode], **matrix.ASCII)
    text = ToyTokenizer().decode(bench.oracle.choice(plain, 0).token_ids)
    deltas = bench.run(draft, plain, draft_tokens)
    for end in (2, 6, 9, 24):
        # the stop string's last character is that of token `end`, wherever blocks end
        stop = text[max(0, end - 2) : end]
        cut = text.index(stop)
        answer, finish_reason, num_tokens = _assembled(deltas, stop)
        assert (answer, finish_reason) == (text[:cut], "stop")
        assert num_tokens == cut + len(stop)


def test_a_stop_string_beats_max_tokens_in_the_same_block(bench: Bench) -> None:
    plain = matrix.request("plain", 0.0, **matrix.ASCII)
    text = ToyTokenizer().decode(bench.oracle.choice(plain, 0).token_ids)
    short = matrix.request("short", 0.0, max_tokens=8, **matrix.ASCII)
    stop = text[4:6]
    answer, finish_reason, _ = _assembled(bench.run("perfect", short, 8), stop)
    assert (answer, finish_reason) == (text[: text.index(stop)], "stop")


def _assembled(deltas: Sequence[RoundDelta], stop: str) -> tuple[str, str | None, int]:
    assembler = Assembler(ToyTokenizer(), (stop,), len(matrix.PROMPT))
    text = ""
    for delta in deltas:
        text += assembler.receive_round(delta).text
        if assembler.finish_reason:
            break
    return text, assembler.finish_reason, assembler.usage.num_completion_tokens
