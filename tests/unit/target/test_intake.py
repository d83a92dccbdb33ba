"""What a target does not take from anybody, and what it makes of a request that it takes."""

from dataclasses import replace

import pytest
from llguidance import LLMatcher

from paceline.engine.base import EngineInfo, Verify
from paceline.errors import RequestError
from paceline.generation import Resumption, SpeculationRequest
from paceline.grammars import load_grammars
from paceline.sampling.params import SamplingParams, VerificationMode

INFO = EngineInfo("toy", 64, 512, 16, 64, eos_token_ids=(0, 63))
REJECTION, BLOCK = VerificationMode.REJECTION, VerificationMode.BLOCK


def refused(rig, **changes):
    with pytest.raises(RequestError) as caught:
        rig.submit(replace(rig.request(max_tokens=10), **changes))
    rig.check_clean()
    assert caught.value.status == 400
    return str(caught.value), caught.value.param


def session_of(rig, **changes):
    [session_id] = rig.submit(replace(rig.request(max_tokens=10), **changes))
    return rig.scheduler._sequences[session_id].session


class TestRefused:
    @pytest.mark.parametrize("bad", [-1, 64, 2**40])
    def test_stop_ids(self, make_rig, bad):
        answer = refused(make_rig(), stop_token_ids=(1, bad))
        assert answer == ("stop token ids must be in [0, 64)", "stop_token_ids")

    @pytest.mark.parametrize("bad", [-1, 64, 2**40])
    def test_prompt_ids(self, make_rig, bad):
        answer = refused(make_rig(), prompt_token_ids=(1, bad, 2))
        assert answer == ("prompt token ids must be in [0, 64)", "prompt")

    def test_logit_bias(self, make_rig):
        sampling = SamplingParams(logit_bias=((3, 1.0), (64, 1.0)))
        answer = refused(make_rig(), sampling=sampling)
        assert answer == ("logit bias ids must be in [0, 64)", "logit_bias")

    def test_more_min_tokens_than_tokens(self, make_rig):
        answer = refused(make_rig(), sampling=SamplingParams(min_tokens=11))
        assert answer == ("min_tokens 11 is more than max_tokens 10", "min_tokens")

    def test_more_stop_ids_than_sampling_can_hold_back(self, make_rig):
        rig = make_rig(info=replace(INFO, vocab_size=500))
        answer = refused(rig, stop_token_ids=tuple(range(1, 257)))
        assert answer == (
            "at most 256 token ids can end a sequence, EOS included",
            "stop_token_ids",
        )
        session_of(rig, stop_token_ids=tuple(range(256)), sampling=SamplingParams(min_tokens=1))

    @pytest.mark.parametrize("name", ["num_logprobs", "num_prompt_logprobs"])
    def test_fewer_than_no_logprobs(self, make_rig, name):
        assert refused(make_rig(), **{name: -1}) == (f"{name} must be >= 0, got -1", "logprobs")


class TestGrammars:
    TOY = EngineInfo("toy", 257, 512, 16, 64, eos_token_ids=(256,), grammars=load_grammars("toy"))
    NUMBER = SamplingParams(grammar=LLMatcher.grammar_from_regex("[1-4]{3}"))

    @pytest.fixture
    def rig(self, make_rig):
        return make_rig(info=self.TOY)

    def test_a_model_without_them(self, make_rig):
        answer = refused(make_rig(), sampling=self.NUMBER)
        sentence = "this model's tokenizer cannot be used for structured output"
        assert answer == (sentence, "response_format")

    def test_an_end_that_does_not_end(self, rig):
        sentence, param = refused(rig, sampling=self.NUMBER, ignore_eos=True)
        assert "ignore_eos does not go with structured output" in sentence
        assert param == "ignore_eos"

    @pytest.mark.parametrize("grammar", ["no grammar (", "\ud800", '{"grammars":[]}'])
    def test_one_that_does_not_compile(self, rig, grammar):
        sentence, param = refused(rig, sampling=SamplingParams(grammar=grammar))
        assert sentence.startswith("the grammar of this output cannot be used: ")
        assert "\n" not in sentence
        assert param == "response_format"

    def test_an_output_that_does_not_follow_it(self, rig):
        def resumed(*outputs):
            return {"sampling": self.NUMBER, "n": 2, "resumption": Resumption(1, outputs)}

        sentence, param = refused(rig, **resumed(tuple(b"12"), tuple(b"15")))
        assert sentence == "the grammar of this output cannot be used: the output so far breaks it"
        assert param == "response_format"
        assert len(rig.submit(replace(rig.request(), **resumed(tuple(b"12"), None)))) >= 1

    def test_one_that_runs(self, rig):
        [session_id] = rig.submit(replace(rig.request(max_tokens=10), sampling=self.NUMBER))
        rig.run()
        output = rig.out[session_id]
        assert len(output) == 4
        assert set(output[:3]) <= set(b"1234")
        assert (output[3], rig.deltas[session_id][-1].finish_reason) == (256, "stop")


class TestEnds:
    def test_eos_and_the_clients_ids(self, make_rig):
        rig = make_rig(info=INFO)
        assert session_of(rig, stop_token_ids=(5,)).stop_token_ids == {0, 5, 63}
        assert session_of(rig, stop_token_ids=(5,), ignore_eos=True).stop_token_ids == {5}
        assert session_of(rig, ignore_eos=True).stop_token_ids == frozenset()

    def test_the_clients_ids_end_it_even_if_eos_does_not(self, make_rig):
        rig = make_rig()
        text = rig.oracle((1, 2, 3), 20)
        request = replace(rig.request(max_tokens=20, stop=(text[4],)), ignore_eos=True)
        [session_id] = rig.submit(request)
        rig.run()
        assert rig.out[session_id] == text[: text.index(text[4]) + 1]
        assert rig.deltas[session_id][-1].finish_reason == "stop"

    def test_min_tokens_hold_back_whatever_ends_it(self, make_rig):
        rig = make_rig(info=INFO)
        sampling = SamplingParams(min_tokens=2, stop_token_ids=(9,))
        assert session_of(rig, sampling=sampling).sampling.stop_token_ids == (0, 63)
        session = session_of(rig, sampling=sampling, stop_token_ids=(7, 5, 7))
        assert session.sampling.stop_token_ids == (0, 5, 7, 63)
        session = session_of(rig, sampling=sampling, stop_token_ids=(7,), ignore_eos=True)
        assert session.sampling.stop_token_ids == (7,)

    def test_without_min_tokens_nothing_is_held_back(self, make_rig):
        rig = make_rig(info=INFO)
        sampling = SamplingParams(stop_token_ids=(9,))
        assert session_of(rig, sampling=sampling).sampling.stop_token_ids == ()

    @pytest.mark.parametrize("num_draft_passes", [0, 6])
    def test_exactly_min_tokens(self, make_rig, num_draft_passes):
        """seen in peers, no. 17: with this bias EOS comes wherever a context has it at all."""
        rig = make_rig(info=replace(INFO, eos_token_ids=(0,)))
        rig.add_draft(1)
        sampling = SamplingParams(temperature=0.0, logit_bias=((0, 100.0),), min_tokens=5)
        lengths = []
        for start in range(1, 60):
            [session_id] = rig.submit(replace(rig.request((start,), 20), sampling=sampling))
            rig.run(num_draft_passes)
            text, last = rig.out[session_id], rig.deltas[session_id][-1]
            assert text.index(0) == len(text) - 1 >= 5 if 0 in text else len(text) == 20
            assert last.finish_reason == ("stop" if 0 in text else "length")
            lengths.append(len(text))
        assert min(lengths) == 6
        assert lengths.count(6) > 3
        assert bool(rig.scheduler.stats.num_accepted_tokens) == bool(num_draft_passes)
        rig.check_clean()


class TestMode:
    @pytest.mark.parametrize("deployed", ["coupled", "rejection", "block"])
    @pytest.mark.parametrize("asked", [None, "coupled", "rejection", "block"])
    def test_of_the_request_before_the_deployments(self, make_rig, deployed, asked):
        rig = make_rig(speculation={"mode": deployed})
        mode = None if asked is None else VerificationMode(asked)
        session = session_of(
            rig, sampling=SamplingParams(seed=1), speculation=SpeculationRequest(mode=mode)
        )
        assert session.mode == (asked or deployed)

    def test_greedy_at_temperature_0(self, make_rig):
        rig = make_rig(speculation={"mode": "block"})
        assert session_of(rig).mode is VerificationMode.GREEDY

    def test_the_refusal_says_what_it_would_be(self, make_rig):
        rig = make_rig(speculation={"mode": "block"})
        asked = SpeculationRequest(mode=VerificationMode.GREEDY)
        sentence, param = refused(rig, sampling=SamplingParams(), speculation=asked)
        assert sentence.endswith("greedy does not fit temperature 1.0; it would be block")
        assert param == "speculation.mode"

    def test_a_draft_that_cannot_do_it_is_not_chosen(self, make_rig):
        rig = make_rig(speculation={"mode": "rejection"})
        rig.desk.attach(1, rig.hello(1, modes=(VerificationMode.COUPLED,)))
        session_of(rig, sampling=SamplingParams(seed=1))
        assert rig.take_sent() == []


class TestRule:
    def test_matching_modes_have_none(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        rig.add(max_tokens=10)
        rig.add(max_tokens=10, seed=1)
        rig.run(4)
        assert {entry.item.rule for plan in rig.plans for entry in plan.entries} == {None}

    @pytest.mark.parametrize("mode", [REJECTION, BLOCK])
    def test_rejection_modes_have_the_laws_of_the_proposals(self, make_rig, mode):
        rig = make_rig()
        rig.add_draft(1, error_rate=0.3)
        request = rig.request(max_tokens=40, seed=1, mode=mode)
        [session_id] = rig.submit(request)
        rig.run(6)
        rounds = []
        for plan in rig.plans:
            [entry] = plan.entries
            rule = entry.item.rule
            assert isinstance(rule, Verify)
            assert rule.mode is mode
            assert len(rule.draft_probs) == len(entry.draft_token_ids)
            pairs = zip(rule.draft_probs, entry.draft_token_ids, strict=True)
            assert all(law.weight(token_id) for law, token_id in pairs)
            rounds.append(rule.round)
        assert rounds == list(range(len(rig.plans))), "no round's noise twice"
        deltas = rig.deltas[session_id]
        assert len(rig.out[session_id]) == 40
        assert (
            0 < sum(d.num_accepted_tokens for d in deltas) < sum(d.num_draft_tokens for d in deltas)
        )
        rig.check_clean()

    def test_without_a_draft_the_rule_stays(self, make_rig):
        """The same law; the noise is that of the rejection modes, in every pass."""
        rig = make_rig(speculation={"mode": "rejection"})
        rig.submit(rig.request(max_tokens=5, seed=1, method="off"))
        rig.run()
        rules = [entry.item.rule for plan in rig.plans for entry in plan.entries]
        assert rules == [Verify(REJECTION, (), round) for round in range(5)]
        rig.check_clean()


def test_logprobs_stop_where_the_text_does(make_rig):
    """A stop id inside an accepted block: rows were sampled behind it."""
    rig = make_rig()
    rig.add_draft(1)
    text = rig.oracle((1, 2, 3), 20)
    request = replace(rig.request((1, 2, 3), 20, stop=(text[3],)), num_logprobs=1)
    [session_id] = rig.submit(request)
    rig.run(6)
    last = rig.deltas[session_id][-1]
    assert (last.num_draft_tokens, len(last.token_ids)) == (4, 3)
    entries = [entry for delta in rig.deltas[session_id] for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == text[:4]
    assert [entry.top[0][0] for entry in entries] == text[:4], "greedy"
