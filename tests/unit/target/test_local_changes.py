"""Local proposals while the configuration, the target or the cache changes under them."""

from dataclasses import replace

import pytest

from paceline.config import SpeculationConfig
from paceline.errors import RequestError
from paceline.generation import Resumption
from tests.unit.target.test_local_drafts import PROMPT, Guess, guess


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
