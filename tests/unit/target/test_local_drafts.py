"""Proposals made inside the target: who has them, what they cost when they fail, who learns."""

from collections import Counter
from dataclasses import replace

import pytest

from paceline.config import SpeculationConfig
from paceline.engine.toy import ToyEngine
from paceline.errors import RequestError
from paceline.generation import SpeculationRequest
from paceline.protocol.messages import OpenSession
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.target.scheduler import Hold, PassPlan
from tests.unit.target.conftest import INFO, PlantedError

PROMPT = (1, 2, 3)
HEADS = replace(INFO, num_heads=3)


class Guess:
    """Proposes what it is told to: the right text, and wrong from place `num_right` on."""

    def __init__(self, text, num_right=99):
        self.text, self.num_right, self.num_told = tuple(text), num_right, 0

    def extend(self, token_ids):
        assert tuple(token_ids) == self.text[self.num_told : self.num_told + len(token_ids)]
        self.num_told += len(token_ids)

    def propose(self, max_tokens):
        right = self.text[self.num_told : self.num_told + max_tokens]
        return (*right[: self.num_right], *(63 - i for i in right[self.num_right :]))


class Broken(Guess):
    def propose(self, max_tokens):
        if self.num_told > len(PROMPT) + 4:
            raise ZeroDivisionError
        return super().propose(max_tokens)


class Silent(Guess):
    def propose(self, max_tokens):
        return ()


class Constant(Guess):
    """Whatever the text is."""

    def extend(self, token_ids):
        pass

    def propose(self, max_tokens):
        return (5,) * max_tokens


class Alien(Guess):
    def propose(self, max_tokens):
        return (INFO.vocab_size,)


def guess(rig, max_tokens=40, kind=Guess, **asked):
    """Every proposer knows the text of this prompt."""
    text = (*PROMPT, *rig.oracle(PROMPT, max_tokens, **asked))
    rig.scheduler.local._proposer = lambda sequence, name: kind(text)
    return text[len(PROMPT) :]


def sources(rig, session_id):
    return Counter(delta.source for delta in rig.deltas[session_id])


class TestTheSeam:
    @pytest.mark.parametrize("method", ["ngram", "suffix"])
    def test_a_local_source_is_verified_and_needs_no_draft(self, make_rig, method):
        rig = make_rig()
        rig.add_draft(1)
        text = guess(rig)
        session_id = rig.add(PROMPT, 40, method=method)
        rig.run(2)
        assert rig.out[session_id] == list(text)
        assert sources(rig, session_id) == {"": 1, method: 8}  # 1 + 7 x 5 + 4
        assert not any(isinstance(message, OpenSession) for _, message in rig.sent)
        counts = rig.scheduler.stats.by_source[method]
        assert (counts.num_rounds, counts.num_chosen) == (8, 8)
        assert (counts.num_draft_tokens, counts.num_accepted_tokens) == (31, 31)
        rig.check_clean()

    def test_hybrid_fills_in_until_the_draft_is_there(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        text = guess(rig)
        session_id = rig.add(PROMPT, 40, method="hybrid")
        rig.step()
        rig.step()
        assert sources(rig, session_id) == {"": 1, "suffix": 1}
        rig.run(3)
        assert rig.out[session_id] == list(text)
        assert set(sources(rig, session_id)) == {"", "suffix", "model"}

    def test_what_the_draft_sent_survives_a_local_round(self, make_rig):
        """In auto the lookup is chosen for what it has; the window is as good as before."""
        rig = make_rig(speculation={"num_speculative_tokens": 3})
        rig.add_draft(1)
        text = guess(rig, kind=lambda text: Guess(text, 1))
        session_id = rig.add(PROMPT, 40, method="auto")
        rig.step()
        rig.draft(6)
        session = rig.scheduler._sequences[session_id].session
        have = session.window_len
        assert have >= 3
        rig.scheduler.policy.gain = lambda lookahead, *_: (float(lookahead.key.is_local), 0.0)
        rig.step()
        assert rig.deltas[session_id][-1].source == "suffix"
        assert session.window_len == have - 2
        rig.run(2)
        assert rig.out[session_id] == list(text)

    def test_a_choice_of_its_own_per_request(self, make_rig):
        rig = make_rig(info=HEADS)
        rig.add_draft(1)
        methods = ("model", "ngram", "suffix", "medusa", "hybrid", "auto", "off")
        ids = {method: rig.add(PROMPT, 30, method=method) for method in methods}
        rig.run(2)
        texts = {tuple(rig.out[session_id]) for session_id in ids.values()}
        assert texts == {tuple(rig.oracle(PROMPT, 30))}
        seen = {method: set(sources(rig, session_id)) - {""} for method, session_id in ids.items()}
        assert seen["off"] == set()
        assert seen["model"] == {"model"}
        assert seen["medusa"] == {"medusa"}
        assert seen["ngram"] <= {"ngram"}
        assert seen["suffix"] <= {"suffix"}
        rig.check_clean()

    @pytest.mark.parametrize(
        ("lookahead", "asked", "most"),
        [("adaptive", 0, 0), ("adaptive", 1, 1), ("adaptive", 3, 3), ("fixed", None, 4)],
    )
    def test_a_fixed_k_holds_for_local_sources(self, make_rig, lookahead, asked, most):
        rig = make_rig(speculation={"lookahead": lookahead})
        guess(rig)
        fixed = SpeculationRequest("suffix", asked, lookahead="fixed" if asked else None)
        [session_id] = rig.submit(replace(rig.request(PROMPT, 40), speculation=fixed))
        rig.run()
        assert max(delta.num_draft_tokens for delta in rig.deltas[session_id]) == most

    def test_a_draft_is_not_missed_by_who_does_without(self, make_rig):
        rig = make_rig(speculation={"lookahead": "adaptive"})
        rig.add_draft(1)
        guess(rig)
        rig.add(PROMPT, 40, method="suffix")
        rig.run(1)
        assert rig.scheduler.policy.starvation().wanted == 0


class TestTheDoor:
    def test_medusa_without_heads(self, make_rig):
        with pytest.raises(RequestError) as caught:
            make_rig().add(method="medusa")
        said = "'speculation.method' cannot be 'medusa': this model has no Medusa heads."
        assert caught.value.args[:3] == (said, "speculation.method", "unsupported_parameter")
        assert caught.value.status == 400
        make_rig(info=HEADS).add(method="medusa")

    @pytest.mark.parametrize("method", ["ngram", "suffix", "medusa", "hybrid", "auto"])
    def test_nothing_where_speculation_is_off(self, make_rig, method):
        rig = make_rig(info=HEADS, speculation={"method": "off"})
        with pytest.raises(RequestError) as caught:
            rig.add(method=method)
        reason = "speculation is off in this deployment"
        said = f"'speculation.method' cannot be '{method}': {reason}."
        assert caught.value.args[:3] == (said, "speculation.method", "unsupported_parameter")

    @pytest.mark.parametrize("method", [None, "off", "model"])
    def test_plain_decoding_where_it_is_off(self, make_rig, method):
        rig = make_rig(info=HEADS, speculation={"method": "off"})
        rig.add_draft(1)
        session_id = rig.add(PROMPT, 12, method=method)
        rig.run(2)
        assert sources(rig, session_id) == {"": 12}

    def test_the_deployments_method_is_what_nobody_asks_for(self, make_rig):
        rig = make_rig(speculation={"method": "ngram"})
        guess(rig)
        asked, other = rig.add(PROMPT, 20), rig.add(PROMPT, 20, method="off")
        rig.run()
        assert set(sources(rig, asked)) == {"", "ngram"}
        assert set(sources(rig, other)) == {""}


class TestFailures:
    @pytest.mark.parametrize("kind", [Broken, Alien])
    def test_a_proposer_that_fails_costs_its_sequence_the_proposer(self, make_rig, kind, caplog):
        rig = make_rig()
        text = guess(rig, kind=kind)
        ids = [rig.add(PROMPT, 40, method="suffix") for _ in range(2)]
        rig.run()
        assert all(rig.out[session_id] == list(text) for session_id in ids)
        assert rig.scheduler.stats.by_source["suffix"].num_failures == 2
        assert rig.scheduler.stats.num_failed == rig.scheduler.stats.num_failed_passes == 0
        assert all(rig.deltas[session_id][-1].source == "" for session_id in ids)
        [line] = caplog.records
        assert line.getMessage().startswith("a suffix proposer failed")
        assert line.exc_info[0] in (ZeroDivisionError, ValueError)

    def test_the_draft_goes_on_without_it(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        guess(rig, kind=Broken)
        session_id = rig.add(PROMPT, 60, method="hybrid")
        rig.scheduler._sequences[session_id].session.end_len -= 20  # what it knows
        while rig.scheduler.num_running:
            rig.step()
            if rig.scheduler.stats.by_source["suffix"].num_failures:
                rig.draft(3)
        assert sources(rig, session_id)["model"] > 2

    def test_a_pass_that_fails_with_local_proposals_is_done_without(self, make_rig):
        rig = make_rig()
        text = guess(rig)

        class Fails(ToyEngine):
            def step(self, items):
                if any(len(item.token_ids) == item.num_samples > 1 for item in items):
                    raise PlantedError
                return super().step(items)

        rig.engine = Fails(INFO)
        rig.add_draft(1)
        session_id = rig.add(PROMPT, 20, method="suffix")
        rig.run()
        assert rig.out[session_id] == list(text[:20])
        assert (rig.ended, rig.scheduler.stats.num_failed_passes) == ([], 1)
        assert rig.scheduler.stats.by_source["suffix"].num_rounds == 0


class TestRecentOutputs:
    def run(self, rig, salt, **asked):
        request = rig.request(PROMPT, 40, method="suffix", **asked)
        [session_id] = rig.submit(replace(request, cache_salt=salt))
        rig.run()
        return len(rig.deltas[session_id])

    def test_a_text_helps_the_next_one_of_its_salt_alone(self, make_rig):
        rig = make_rig()
        first = self.run(rig, 7)
        assert self.run(rig, 8) == first > 30
        assert self.run(rig, 7) < 12
        assert self.run(rig, 8) < 12

    def test_none_where_none_are_kept(self, make_rig):
        rig = make_rig(speculation={"suffix_decoding_max_cached_tokens": 0})
        assert self.run(rig, 7) == self.run(rig, 7)

    def test_an_output_that_was_given_up_is_not_remembered(self, make_rig):
        rig = make_rig()
        session_id = rig.add(PROMPT, 40, method="suffix")
        for _ in range(30):
            rig.step()
        rig.scheduler.abort(session_id)
        assert self.run(rig, 0) > 30


class TestHolds:
    def hold(self, make_rig, method, kind=Guess):
        rig = make_rig(speculation={"max_lone_wait_ms": 50.0})
        rig.add_draft(1)
        rig.deliver()
        guess(rig, 60, kind=kind)
        rig.add(PROMPT, 60, method=method)
        rig.deliver()
        rig.step()
        rig.deliver()
        lone = rig.scheduler.policy.lone
        lone.num_draft_tokens.value = lone.row_us = 0.0
        lone.pass_us.value, lone.draft_token_us.value = 10_000.0, 1_000.0
        return rig.scheduler.plan(rig.now)

    def test_a_pass_waits_for_a_draft_alone(self, make_rig):
        assert isinstance(self.hold(make_rig, "model"), Hold)

    @pytest.mark.parametrize("method", ["hybrid", "auto"])
    def test_no_pass_waits_that_has_local_proposals(self, make_rig, method):
        plan = self.hold(make_rig, method)
        assert isinstance(plan, PassPlan)
        assert plan.has_drafts

    @pytest.mark.parametrize("method", ["hybrid", "auto"])
    def test_without_any_it_waits_as_ever(self, make_rig, method):
        plan = self.hold(make_rig, method, kind=Silent)
        assert isinstance(plan, Hold)


class TestLiveChanges:
    def change(self, rig, **fields):
        config = SpeculationConfig(**{"lookahead": "fixed", "max_lone_wait_ms": 0.0, **fields})
        rig.scheduler.set_speculation(config)

    def test_the_deployments_method_changes_for_requests_in_progress(self, make_rig):
        rig = make_rig()
        guess(rig)
        session_id = rig.add(PROMPT, 40)
        own = rig.add(PROMPT, 40, method="ngram")
        rig.step()
        rig.step()
        self.change(rig, method="suffix")
        rig.step()
        assert rig.deltas[session_id][-1].source == "suffix"
        assert rig.deltas[own][-1].source == "ngram"
        self.change(rig, method="off")
        rig.step()
        assert rig.deltas[session_id][-1].source == rig.deltas[own][-1].source == ""
        self.change(rig, method="model")
        rig.step()
        assert (rig.deltas[session_id][-1].source, rig.deltas[own][-1].source) == ("", "ngram")
        rig.run()
        rig.check_clean()

    def test_a_draft_is_let_go_and_asked_again(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        session_id = rig.add(PROMPT, 120)
        rig.draft(3)
        rig.step()
        self.change(rig, method="ngram")
        for _ in range(6):
            rig.draft(3)
            rig.step()
        assert rig.deltas[session_id][-1].source in ("", "ngram")
        self.change(rig, method="model")
        for _ in range(6):
            rig.draft(3)
            rig.step()
        assert rig.deltas[session_id][-1].source == "model"


class TestChoosing:
    def test_auto_ends_with_what_is_right(self, make_rig):
        """The draft is wrong in six of ten contexts, the lookup never."""
        rig = make_rig(speculation={"lookahead": "adaptive"})
        rig.add_draft(1, error_rate=0.6)
        text = guess(rig, 200)
        session_id = rig.add(PROMPT, 200, method="auto")
        rig.run(3)
        assert rig.out[session_id] == list(text)
        late = [delta.source for delta in rig.deltas[session_id][10:] if delta.source]
        assert late.count("suffix") >= 0.9 * len(late) > 5

    @pytest.mark.parametrize("better", ["ngram", "suffix"])
    def test_auto_asks_both_lookups(self, make_rig, better):
        rig = make_rig(speculation={"lookahead": "adaptive"})
        text = guess(rig, 200)
        kinds = {better: Guess(PROMPT + text), "": Guess(PROMPT + text, 0)}
        rig.scheduler.local._proposer = lambda sequence, name: kinds.get(name, kinds[""])
        session_id = rig.add(PROMPT, 200, method="auto")
        rig.run()
        assert rig.out[session_id] == list(text)
        late = [delta.source for delta in rig.deltas[session_id][10:] if delta.source]
        assert late.count(better) >= 0.9 * len(late) > 5

    @pytest.mark.parametrize(
        ("mode", "fewest", "most"),
        [(VerificationMode.REJECTION, 2, 6), (VerificationMode.COUPLED, 0, 0)],
    )
    def test_a_draft_is_tried_where_nothing_else_shows_it(self, make_rig, mode, fewest, most):
        """In the rejection modes, what was not verified is not compared with the text."""
        rig = make_rig()
        rig.add_draft(1)
        guess(rig, 300, kind=Constant)
        sampling = SamplingParams(temperature=0.8, seed=1)
        asked = SpeculationRequest("auto", mode=mode)
        rig.submit(replace(rig.request(PROMPT, 300), sampling=sampling, speculation=asked))
        rig.scheduler.policy.gain = lambda lookahead, *_: (float(lookahead.key.is_local), 0.0)
        rig.run(3)
        counts = rig.scheduler.stats.by_source
        assert fewest <= counts["model"].num_explored == counts["model"].num_rounds <= most
        assert counts["suffix"].num_explored == 0
