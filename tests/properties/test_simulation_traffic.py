"""2,000 short requests through one scheduler with far too little cache, half of it shared.

All that a target does at once: n, prefixes, preemptions, aborts at any time, every sampling
parameter, a draft that is often wrong. Each text must be what the request gets when it is alone.
"""

from collections import deque
from dataclasses import replace
from functools import lru_cache
from random import Random

import pytest

from paceline.config import SpeculationConfig, TargetConfig
from paceline.engine.base import EngineInfo, StepItem
from paceline.engine.toy import ToyEngine
from paceline.errors import OverloadedError
from paceline.generation import GenerateRequest, SpeculationRequest
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.testing.loopback import Loopback

NUM_REQUESTS = 2_000
EOS = 0
INFO = EngineInfo("toy", 32, 128, block_size=4, num_blocks=48, eos_token_ids=(EOS,))
PREFIXES = [tuple(1 + (7 * seed + i) % 31 for i in range(4 * seed)) for seed in range(6)]
PARAMETERS = [
    {},
    {"frequency_penalty": 1.5},
    {"presence_penalty": -1.0, "repetition_penalty": 1.4},
    {"logit_bias": ((EOS, 3.0), (5, -4.0)), "min_tokens": 5},
    {"top_k": 3, "repetition_penalty": 1.2},
    {"top_p": 0.8, "min_p": 0.05, "min_tokens": 3},
]


def draw(rng, index):
    """One request; a few of them in a rejection mode, whose text has no solo run to equal."""
    temperature = rng.choice((0.0, 0.0, 0.8))
    lawful = temperature > 0 and rng.random() < 0.1
    mode = rng.choice((VerificationMode.REJECTION, VerificationMode.BLOCK)) if lawful else None
    own = tuple(rng.randrange(1, 32) for _ in range(rng.randrange(1, 6)))
    return GenerateRequest(
        f"r{index}",
        rng.choice(PREFIXES) + own,
        max_tokens=rng.randrange(6, 24),
        sampling=SamplingParams(temperature, seed=rng.randrange(4), **rng.choice(PARAMETERS)),
        stop_token_ids=rng.choice(((), (), (9, 11))),
        speculation=SpeculationRequest(rng.choice(("model", "model", "off")), mode=mode),
        ignore_eos=rng.random() < 0.5,
        n=rng.choice((1, 1, 1, 2, 3)),
        num_logprobs=rng.choice((None, None, 2)),
        num_prompt_logprobs=rng.choice((None, None, None, 1)),
    )


def solo(request, choice):
    """Plain decoding on an engine of its own: tokens, logprobs and the prompt's logprobs."""
    stops = set(request.stop_token_ids) | (set() if request.ignore_eos else {EOS})
    held_back = tuple(sorted(stops)) if request.sampling.min_tokens else ()
    sampling = replace(request.sampling, choice=choice, stop_token_ids=held_back)
    text = []
    for token_id, entry in plain(request.prompt_token_ids, sampling, request.max_tokens):
        text.append((token_id, entry))
        if token_id in stops:
            break
    return text


@lru_cache(maxsize=1 << 12)
def plain(prompt, sampling, max_tokens):
    engine = ToyEngine(INFO, enable_prefix_caching=False)
    engine.add(1)
    out, rows, start = [], prompt, 0
    while len(out) < max_tokens:
        item = StepItem(1, start, rows, 1, sampling, len(out), num_logprobs=2)
        [result] = engine.step([item])
        start, rows = start + len(rows), result.token_ids
        out.append((result.token_ids[0], result.logprobs[0]))
    return out


@lru_cache(maxsize=1 << 10)
def plain_prompt(prompt):
    engine = ToyEngine(INFO, enable_prefix_caching=False)
    engine.add(1)
    scored = prompt[1:]
    item = StepItem(1, 0, prompt, 0, SamplingParams(), 0, None, None, None, 1, scored)
    return engine.step([item])[0].prompt_logprobs


class Traffic:
    """Requests come, leave and are aborted by one seed."""

    def __init__(self, seed):
        self.rng = Random(seed)
        self.target = ToyEngine(INFO)
        self.draft = ToyEngine(replace(INFO, num_blocks=120), error_rate=0.15)
        config = TargetConfig(max_num_seqs=16, max_rows_per_pass=32, max_queued_seqs=24)
        self.loopback = Loopback(self.target, self.draft, SpeculationConfig(), config)
        self.runs = {}
        self.aborted = set()
        self.num_refused = 0

    def play(self, requests):
        pending, num_steps, is_busy = deque(requests), 0, True
        while pending or is_busy:
            for _ in range(self.rng.randrange(6)):
                if pending and self._add(pending[0]):
                    pending.popleft()
            self._abort_some(0.05)
            is_busy = self.loopback.step(lambda: self._abort_some(0.05))
            num_steps += 1
            if num_steps % 50 == 0:
                self.check_integrity()

    def _add(self, request):
        try:
            session_ids, run = self.loopback.add(request)
        except OverloadedError:
            self.num_refused += 1
            return False
        self.runs[session_ids] = (request, run)
        return True

    def _abort_some(self, chance):
        sequences = self.loopback.scheduler._sequences
        if sequences and self.rng.random() < chance:
            session_id = self.rng.choice(list(sequences))
            self.loopback.scheduler.abort(session_id)
            self.aborted.add(session_id)

    def check_integrity(self):
        self.target.check_integrity()
        self.draft.check_integrity()

    def check_clean(self):
        self.check_integrity()
        for engine in (self.target, self.draft):
            stats = engine.stats()
            assert (stats.num_free_blocks, stats.num_sequences) == (engine.info.num_blocks, 0)
        scheduler = self.loopback.scheduler
        assert scheduler.num_free_blocks == INFO.num_blocks
        assert (scheduler.num_running, scheduler.num_waiting, len(scheduler._sequences)) == (
            0,
            0,
            0,
        )
        assert not self.loopback.scheduler.drafts.pool.links()[1].sessions

    def check_texts(self):
        for session_ids, (request, run) in self.runs.items():
            for choice, session_id in enumerate(session_ids):
                self._check_text(request, choice, run.of(choice), session_id in self.aborted)

    def _check_text(self, request, choice, deltas, is_aborted):
        assert is_aborted or deltas[-1].finish_reason
        assert sum(delta.finish_reason is not None for delta in deltas) <= 1
        tokens = [token_id for delta in deltas for token_id in delta.token_ids]
        entries = [entry for delta in deltas for entry in delta.logprobs]
        if request.speculation.mode is None:
            expected = solo(request, choice)
            end = len(tokens) if is_aborted else len(expected)
            assert tokens == [token_id for token_id, _ in expected[:end]]
            if request.num_logprobs is not None:
                assert entries == [entry for _, entry in expected[:end]]
        if request.num_logprobs is None:
            assert not entries
        assert len(entries) in (0, len(tokens))
        scores = [entry for delta in deltas for entry in delta.prompt_logprobs]
        if deltas and choice == 0 and request.num_prompt_logprobs is not None:
            assert tuple(scores) == plain_prompt(request.prompt_token_ids)
        else:
            assert not scores


def test_two_thousand_short_requests():
    traffic = Traffic(3)
    traffic.play([draw(traffic.rng, index) for index in range(NUM_REQUESTS)])
    traffic.check_clean()
    traffic.check_texts()
    stats = traffic.loopback.scheduler.stats
    assert len(traffic.runs) == NUM_REQUESTS
    assert stats.num_preemptions > 200
    assert stats.num_prefix_tokens > 5_000
    assert stats.num_accepted_tokens > 5_000
    assert stats.num_aborted > 50
    assert stats.num_finished + stats.num_aborted == sum(len(ids) for ids in traffic.runs)
    assert traffic.num_refused > 50
    assert traffic.target.stats().num_rows == stats.num_rows


@pytest.mark.parametrize("seed", range(4))
def test_with_hardly_any_cache(seed):
    """13 blocks: the longest request alone fills them, so that hardly two run at a time."""
    traffic = Traffic(seed)
    small = replace(INFO, num_blocks=13)
    traffic.target = ToyEngine(small)
    config = TargetConfig(max_num_seqs=16, max_rows_per_pass=16, max_queued_seqs=24)
    traffic.loopback = Loopback(traffic.target, traffic.draft, SpeculationConfig(), config)
    traffic.play([draw(traffic.rng, index) for index in range(60)])
    traffic.check_integrity()
    assert traffic.target.stats().num_free_blocks == 13
    traffic.check_texts()
    assert traffic.loopback.scheduler.stats.num_preemptions > 20
