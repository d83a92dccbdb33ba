"""A tiny torch model that is cut off and goes on elsewhere: the same tokens, ends and logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.config import ModelConfig, SpeculationConfig
from paceline.engine.base import Engine
from paceline.engine.loader import load_engine
from paceline.generation import GenerateRequest, Resumption, RoundDelta
from paceline.testing.loopback import Loopback
from tests.e2e import matrix

torch.set_num_threads(1)

PENALTIES = {"presence_penalty": 1.2, "frequency_penalty": 0.8, "repetition_penalty": 1.3}
CASES: dict[str, dict[str, object]] = {
    "defaults": {},
    "penalties": PENALTIES,
    "min_p": {"min_p": 0.1, "top_k": 20},
    "bias": matrix.SINGLE["logit_bias"],
    "min_tokens": matrix.SINGLE["min_tokens"] | {"min_tokens": 9},
    "stop_token_ids": matrix.SINGLE["stop_ids_and_min_tokens"],
    "logprobs": {"num_logprobs": 4, "num_prompt_logprobs": 1},
    "n": {"n": 3, "stop_token_ids": tuple(range(0, 256, 11)), "num_logprobs": 0},
    "all": PENALTIES
    | {"n": 3, "num_logprobs": 2, "min_p": 0.05, "min_tokens": 4, "ignore_eos": False}
    | {"logit_bias": ((7, 3.0), (matrix.EOS, 8.0)), "stop_token_ids": (3, 99)},
}
TEMPERATURES = {"greedy": 0.0, "coupled": 0.9}
DRAFTS = ("none", "adversarial")


class Bench:
    """A target, and another of the same weights with nothing in its cache."""

    def __init__(self, folder: Path) -> None:
        weights = matrix.save_model(folder / "target", seed=1)
        self.target, self.spare = _engine(weights), _engine(weights)
        self.drafts: dict[str, Engine | None] = {
            "none": None,
            "adversarial": matrix.Adversary(_engine(weights)),
        }
        self._undisturbed: dict[GenerateRequest, list[RoundDelta]] = {}

    def undisturbed(self, request: GenerateRequest) -> list[RoundDelta]:
        if request not in self._undisturbed:
            self._undisturbed[request] = self._run(self.target, None, request)
        return self._undisturbed[request]

    def resumed(
        self, draft: str, request: GenerateRequest, outputs: tuple[tuple[int, ...] | None, ...]
    ) -> list[RoundDelta]:
        request = replace(request, resumption=Resumption(1, outputs))
        return self._run(self.spare, self.drafts[draft], request)

    def _run(
        self, target: Engine, draft: Engine | None, request: GenerateRequest
    ) -> list[RoundDelta]:
        loopback = Loopback(target, draft, SpeculationConfig(num_speculative_tokens=4))
        [run] = loopback.run([request])
        for engine in (target, draft):
            if engine is not None:
                engine.check_integrity()
                assert engine.stats().num_free_blocks == engine.info.num_blocks
        return run.deltas


def _engine(folder: Path) -> Engine:
    return load_engine(ModelConfig(source=str(folder), max_model_len=256), folder)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("resumption"))


def _text(deltas: Sequence[RoundDelta], choice: int) -> tuple[int, ...]:
    return tuple(t for delta in matrix.choice_of(deltas, choice) for t in delta.token_ids)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("mode", TEMPERATURES)
@pytest.mark.parametrize("name", CASES)
def test_what_follows_a_cut_is_what_had_followed(
    bench: Bench, name: str, mode: str, draft: str
) -> None:
    request = matrix.request(name, TEMPERATURES[mode], **CASES[name])
    before = bench.undisturbed(request)
    texts = [_text(before, choice) for choice in range(request.n)]
    longest = max(map(len, texts))
    first = 0 if request.num_prompt_logprobs is not None else 1
    for length in sorted({first, longest // 2, longest - 1}):
        outputs = tuple(text[:length] if length < len(text) else None for text in texts)
        after = bench.resumed(draft, request, outputs)
        for choice, output in enumerate(outputs):
            if output is None:
                assert matrix.choice_of(after, choice) == []
                continue
            assert output + _text(after, choice) == texts[choice]
            assert _ends(after, choice) == _ends(before, choice)
            _check_logprobs(before, after, choice, length)
        scores = [len(delta.prompt_logprobs) for delta in after if delta.prompt_logprobs]
        asked = request.num_prompt_logprobs is not None
        assert scores == ([len(matrix.PROMPT) - 1] if asked and length == 0 else [])


def _ends(deltas: Sequence[RoundDelta], choice: int) -> list[str]:
    return [d.finish_reason for d in matrix.choice_of(deltas, choice) if d.finish_reason]


def _check_logprobs(
    before: Sequence[RoundDelta], after: Sequence[RoundDelta], choice: int, length: int
) -> None:
    wanted = [entry for delta in matrix.choice_of(before, choice) for entry in delta.logprobs]
    got = [entry for delta in matrix.choice_of(after, choice) for entry in delta.logprobs]
    assert [(e.token_id, e.rank, len(e.top)) for e in got] == [
        (e.token_id, e.rank, len(e.top)) for e in wanted[length:]
    ]
    assert [e.logprob for e in got] == pytest.approx(
        [e.logprob for e in wanted[length:]], abs=matrix.LOGPROB_TOLERANCE
    )


def test_the_cases_end_in_every_way(bench: Bench) -> None:
    """Else the test above would show less than it says."""
    ends = {
        (name, mode): [
            (len(_text(deltas, choice)), *_ends(deltas, choice))
            for deltas in [bench.undisturbed(matrix.request(name, temperature, **CASES[name]))]
            for choice in range(CASES[name].get("n", 1))  # type: ignore[call-overload]
        ]
        for name in CASES
        for mode, temperature in TEMPERATURES.items()
    }
    assert ends["defaults", "greedy"] == [(24, "length")]
    assert ends["min_tokens", "greedy"] == [(10, "stop")]
    for name in ("n", "all"):
        assert len({length for length, _ in ends[name, "coupled"]}) > 1, "one is left over"
