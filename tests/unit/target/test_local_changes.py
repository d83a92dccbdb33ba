"""Local proposals while the configuration, the target or the cache changes under them."""

from dataclasses import replace

import pytest

from paceline.config import SpeculationConfig
from paceline.errors import RequestError
from paceline.generation import Resumption
from paceline.proposers.ngram import MAX_RUN_BYTES
from tests.unit.target.test_local_drafts import PROMPT, Guess, guess
from tests.unit.target.test_lookup_costs import BIG, ROOM, drafting, prompt


def change(rig, **fields):
    config = SpeculationConfig(**{"lookahead": "fixed", "max_lone_wait_ms": 0.0, **fields})
    rig.scheduler.set_speculation(config)


def test_a_pass_that_is_under_way_keeps_its_source(make_rig):
    """What it verified was the lookup's, and nobody's draft is to blame for it."""
    rig = make_rig(speculation={"method": "suffix"})
    guess(rig, kind=lambda text: Guess(text, 0))
    session_id = rig.add(PROMPT, 40)
    rig.step()
    plan, results = rig.begin()
    assert plan.has_drafts
    change(rig, method="model")
    rig.end(plan, results)
    assert rig.deltas[session_id][-1].source == "suffix"
    counts = rig.scheduler.stats.by_source
    assert (counts["suffix"].num_rounds, counts["model"].num_rounds) == (1, 0)
    posterior = rig.scheduler._sequences[session_id].lookahead.posterior
    assert posterior == type(posterior)()
    rig.step()
    assert rig.deltas[session_id][-1].source == ""
    rig.run()
    rig.check_clean()


def test_who_runs_already_is_not_refused_for_its_method(make_rig):
    """It has lost its target: this one has no heads, and the configuration is another."""
    rig = make_rig()
    text = rig.oracle(PROMPT, 20)
    for method, deployed in (("medusa", "model"), ("ngram", "off"), ("auto", "off")):
        change(rig, method=deployed)
        request = rig.request(PROMPT, 20, method=method)
        with pytest.raises(RequestError, match=f"cannot be '{method}'"):
            rig.submit(request)
        resumed = replace(request, resumption=Resumption(1, (tuple(text[:5]),)))
        (session_id,) = rig.submit(resumed)
        rig.run()
        assert rig.out[session_id] == list(text[5:])


def test_a_prefill_after_a_preemption_is_no_choice_of_the_source(make_rig):
    """The round that computes a lost text again has no proposals, whoever had them before."""
    rig = make_rig()
    guess(rig)
    session_id = rig.add(PROMPT, 40, method="ngram")
    rig.step()
    rig.step()
    counts = rig.scheduler.stats.by_source["ngram"]
    assert counts.num_chosen == 1
    sequence = rig.scheduler._sequences[session_id]
    rig.scheduler._roster.drop_cache(sequence)
    rig.step()
    assert rig.deltas[session_id][-1].source == ""
    assert counts.num_chosen == 1
    assert sequence.cap == sequence.lookahead.cap


class TestLookupMemory:
    def start(self, make_rig, method="suffix", **speculation):
        """Outputs of 5000 tokens are known; a text is under way."""
        asked = {"method": method, **speculation}
        rig = make_rig(info=BIG, target=ROOM, speculation=asked)
        for first in range(5):
            rig.scheduler.local.memory.recent.put_off(prompt(1000, first))
        rig.scheduler.local.memory.learn(5000)
        session_id = rig.add(prompt(300), 400)
        for _ in range(20):
            drafting(rig)
        return rig, rig.scheduler._sequences[session_id]

    def change(self, rig, **fields):
        changed = rig.scheduler.speculation.model_copy(update=fields)
        rig.scheduler.set_speculation(changed)
        return rig.scheduler.local.memory

    def test_a_smaller_limit_holds_at_once(self, make_rig):
        rig, sequence = self.start(make_rig)
        found = self.change(rig, max_lookup_memory_mib=1)
        assert 0 < found.num_bytes <= found.max_bytes
        assert found.drops.num_recent == found.drops.num_full == 1
        assert sequence.sources.get("suffix") is not None

    def test_what_is_given_back_by_it_counts_first(self, make_rig):
        rig, sequence = self.start(make_rig, suffix_decoding_max_cached_tokens=0)
        for _ in range(3):
            rig.add(prompt(1200), 400)
        for _ in range(10):
            drafting(rig)
        found = self.change(rig, max_lookup_memory_mib=1, method="model")
        assert (found.num_bytes, found.drops.num_suffix) == (0, 0)
        assert not sequence.barred_sources

    def test_nothing_is_kept_where_speculation_is_off(self, make_rig):
        rig, _ = self.start(make_rig)
        assert self.change(rig, method="model").recent.num_tokens > 5000  # a request may ask
        assert self.change(rig, method="off").num_bytes == 0

    def test_other_limits_of_recent_outputs_hold_for_who_looks_into_them(self, make_rig):
        rig, sequence = self.start(make_rig)
        found = self.change(rig, suffix_decoding_max_cached_tokens=10_000)
        assert found.recent.num_tokens == 0
        assert sequence.sources.get("suffix").proposer._recent is found.recent
        rig.run()
        rig.add(PROMPT, 40)
        rig.run()
        assert found.recent.num_tokens == 401

    def test_a_lookup_costs_what_it_was_made_for(self, make_rig):
        """Of 15 lengths of runs; those that come later have one."""
        rig, _ = self.start(make_rig, "ngram", prompt_lookup_min=2, prompt_lookup_max=16)
        found = rig.scheduler.local.memory
        self.change(rig, prompt_lookup_min=16)
        for num_lengths in (15, 1):
            before = found._held_bytes
            drafting(rig)
            grown = found._held_bytes - before
            assert grown > 0
            assert grown % (num_lengths * MAX_RUN_BYTES) == 0
            assert grown <= 5 * num_lengths * MAX_RUN_BYTES
            rig.run()
            rig.add(prompt(300), 400)
            for _ in range(4):
                drafting(rig)
