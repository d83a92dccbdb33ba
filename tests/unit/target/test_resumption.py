"""A request goes on where another target was lost: nobody can tell, wherever the cut was."""

from dataclasses import replace

import pytest

from paceline.engine.base import EngineInfo
from paceline.errors import OverloadedError, RequestError
from paceline.generation import Resumption
from paceline.protocol.messages import OpenSession
from paceline.sampling.params import SamplingParams, VerificationMode

PROMPT = tuple(range(1, 41))  # 2 blocks of 16 to share, 8 tokens for each
INFO = EngineInfo("toy", 64, 512, 16, 64, eos_token_ids=(63,))
REJECTION_MODES = (VerificationMode.REJECTION, VerificationMode.BLOCK)

# name -> (temperature, changes of the request, changes of its sampling)
CASES = {
    "greedy": (0.0, {}, {}),
    "coupled": (0.8, {}, {}),
    "penalties": (
        0.9,
        {},
        {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.4},
    ),
    "greedy_penalties": (0.0, {}, {"frequency_penalty": 2.0, "repetition_penalty": 1.3}),
    "min_p": (1.2, {}, {"min_p": 0.2, "top_k": 6, "top_p": 0.9}),
    "logit_bias": (0.7, {}, {"logit_bias": ((3, 4.0), (17, -3.0))}),
    "min_tokens": (0.9, {}, {"min_tokens": 7, "logit_bias": ((63, 30.0),)}),
    "stop_ids": (0.9, {"stop_token_ids": tuple(range(0, 64, 9))}, {}),
    "ignore_eos": (0.9, {"ignore_eos": True}, {"logit_bias": ((63, 3.0),)}),
    "logprobs": (0.8, {"num_logprobs": 3, "num_prompt_logprobs": 1}, {}),
    "context_end": (0.8, {"prompt_token_ids": tuple(range(60)) * 8 + (1,) * 24}, {}),
    "choices": (1.0, {"n": 3, "num_logprobs": 0, "stop_token_ids": (5, 20, 40)}, {}),
    "everything": (
        1.0,
        {"n": 3, "num_logprobs": 2, "stop_token_ids": (7, 31), "num_prompt_logprobs": 0},
        {"min_tokens": 4, "min_p": 0.05, "presence_penalty": 1.0, "logit_bias": ((63, 2.0),)},
    ),
}


def request_of(rig, name):
    temperature, changes, law = CASES[name]
    sampling = SamplingParams(temperature=temperature, seed=11, **law)
    return replace(rig.request(PROMPT, 16), **({"sampling": sampling} | changes))


def drive(make_rig, request, num_draft_passes, **rig):
    """Each choice's deltas."""
    rig = make_rig(**({"info": INFO} | rig))
    rig.add_draft(1, error_rate=0.2)
    ids = rig.submit(request)
    rig.run(num_draft_passes)
    rig.check_clean()
    return [rig.deltas[i] for i in ids]


def whole(deltas):
    """What a client sees of a choice: tokens, logprobs, how it ended, the prompt's logprobs."""
    return (
        [token_id for delta in deltas for token_id in delta.token_ids],
        [entry for delta in deltas for entry in delta.logprobs],
        [delta.finish_reason for delta in deltas if delta.finish_reason],
        [entry for delta in deltas for entry in delta.prompt_logprobs],
    )


def cut(choices, length):
    """The outputs after so many tokens of each choice, None for those that had ended."""
    texts = [whole(deltas)[0] for deltas in choices]
    return tuple(tuple(text[:length]) if length < len(text) else None for text in texts)


@pytest.mark.parametrize("num_draft_passes", [0, 5])
@pytest.mark.parametrize("name", CASES)
def test_after_any_number_of_tokens(make_rig, name, num_draft_passes):
    request = request_of(make_rig(info=INFO), name)
    undisturbed = drive(make_rig, request, num_draft_passes)
    longest = max(len(whole(deltas)[0]) for deltas in undisturbed)
    assert longest > 2
    for length in range(longest):
        outputs = cut(undisturbed, length)
        resumed = drive(
            make_rig, replace(request, resumption=Resumption(1, outputs)), num_draft_passes
        )
        for before, output, after in zip(undisturbed, outputs, resumed, strict=True):
            if output is None:
                assert after == []
                continue
            token_ids, logprobs, finish_reasons, prompt_logprobs = whole(before)
            rest = logprobs[length:] if logprobs else []
            scores = [] if length else prompt_logprobs
            assert whole(after) == (token_ids[length:], rest, finish_reasons, scores)
            assert [d.round for d in after] == list(range(1, len(after) + 1))


def test_the_cuts_meet_every_end(make_rig):
    """Else the test above would show less than it says."""
    ends = {}
    for name in CASES:
        choices = drive(make_rig, request_of(make_rig(info=INFO), name), 0)
        ends[name] = [(len(whole(deltas)[0]), whole(deltas)[2][0]) for deltas in choices]
    assert ends["greedy"] == [(16, "length")]
    assert ends["context_end"] == [(8, "length")]
    assert ends["min_tokens"][0][0] >= 8
    assert {ends[name][0][1] for name in ("min_tokens", "stop_ids")} == {"stop"}
    assert len({length for length, _ in ends["choices"]}) == 3, "so that one is left, then two"


class TestChoices:
    def test_a_dead_leader_leaves_the_prompt_to_the_next(self, make_rig):
        rig = make_rig()
        texts = [rig.oracle(PROMPT, 20, seed=1, choice=c) for c in range(4)]
        outputs = (None, tuple(texts[1][:3]), None, tuple(texts[3][:6]))
        request = replace(rig.request(PROMPT, 20, seed=1), n=4, resumption=Resumption(1, outputs))
        ids = rig.submit(request)
        assert rig.scheduler._running == [ids[1], ids[3]]
        assert rig.scheduler.num_free_blocks == 64 - 3 - 1, "two blocks of the prompt are shared"
        plan = rig.step()
        assert list(plan) == [ids[1]], "the other waits for the prompt"
        assert [list(rig.step()), rig.scheduler.stats.num_prefix_tokens] == [[ids[1], ids[3]], 32]
        rig.run()
        assert [rig.out[i] for i in ids] == [[], texts[1][3:], [], texts[3][6:]]
        assert [{d.choice for d in rig.deltas[i]} for i in ids] == [set(), {1}, set(), {3}]
        rig.check_clean()

    def test_the_next_request_has_ids_of_its_own(self, make_rig):
        rig = make_rig()
        request = replace(
            rig.request(max_tokens=4), n=3, resumption=Resumption(1, ((1,), None, None))
        )
        first = rig.submit(request)[0]
        assert rig.add() == first + 3

    def test_cached_tokens_come_with_a_first_token_only(self, make_rig):
        rig = make_rig()
        text = rig.oracle(PROMPT, 20, seed=1)
        rig.add(PROMPT, 20, seed=1)
        rig.run()
        for output, expected in (((), 32), (tuple(text[:1]), 0)):
            request = replace(rig.request(PROMPT, 20, seed=1), resumption=Resumption(1, (output,)))
            [session_id] = rig.submit(request)
            rig.run()
            assert rig.deltas[session_id][0].num_cached_tokens == expected
            assert rig.scheduler.stats.num_prefix_tokens > 0

    def test_only_what_runs_counts_for_the_queue(self, make_rig):
        rig = make_rig(target={"max_num_seqs": 1, "max_queued_seqs": 1})
        request = replace(rig.request(PROMPT, 20, seed=1), n=2)
        two = replace(request, resumption=Resumption(1, (None, (1,))))
        rig.add((1,), 5)
        rig.submit(two)
        with pytest.raises(OverloadedError):
            rig.submit(two)
        rig.run()
        rig.check_clean()

    def test_a_resumed_text_needs_its_whole_length(self, make_rig):
        """4 blocks: the prompt alone would fit beside the other, prompt and output do not."""
        rig = make_rig(info=replace(INFO, num_blocks=4), target={"kv_watermark": 0.0})
        rig.add((1,) * 20, 12)
        output = (2,) * 20
        request = replace(rig.request((3,) * 20, 30), resumption=Resumption(1, (output,)))
        rig.submit(request)
        assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (1, 1)
        rig.run()
        rig.check_clean()

    def test_and_it_is_refused_by_it(self, make_rig):
        """The same without a queue: its prompt alone would have been let in."""
        rig = make_rig(
            info=replace(INFO, num_blocks=4), target={"kv_watermark": 0.0, "max_queued_seqs": 0}
        )
        rig.add((1,) * 20, 12)
        request = rig.request((3,) * 20, 30)
        with pytest.raises(OverloadedError, match="0 sequences are queued"):
            rig.submit(replace(request, resumption=Resumption(1, ((2,) * 20,))))
        rig.submit(replace(request, resumption=Resumption(1, ((2,) * 10,))))
        assert rig.scheduler.num_running == 2


class TestDisturbed:
    @pytest.mark.parametrize("num_draft_passes", [0, 4])
    def test_a_resumed_sequence_is_preempted(self, make_rig, num_draft_passes):
        rig = make_rig(info=replace(INFO, num_blocks=8, eos_token_ids=()))
        rig.add_draft(1, error_rate=0.1)
        prompts = [(start, *range(2, 20)) for start in range(6)]
        texts = [rig.oracle(prompt, 40, seed=1) for prompt in prompts]
        ids = []
        for prompt, text in zip(prompts, texts, strict=True):
            request = rig.request(prompt, 40, seed=1)
            request = replace(request, resumption=Resumption(1, (tuple(text[:2]),)))
            ids += rig.submit(request)
        rig.run(num_draft_passes)
        assert [rig.out[i] for i in ids] == [text[2:] for text in texts]
        assert rig.scheduler.stats.num_preemptions >= 2
        assert bool(rig.scheduler.stats.num_accepted_tokens) == bool(num_draft_passes)
        rig.check_clean()

    def test_prefill_in_chunks(self, make_rig):
        rig = make_rig(target={"max_rows_per_pass": 16, "max_num_seqs": 4})
        text = rig.oracle(PROMPT, 20, seed=1)
        request = replace(rig.request(PROMPT, 20, seed=1), resumption=Resumption(3, (text[:9],)))
        [session_id] = rig.submit(request)
        rig.run()
        assert [entry.max_rows for plan in rig.plans[:4] for entry in plan.entries] == [16] * 3 + [
            1
        ]
        assert rig.out[session_id] == text[9:]

    def test_the_draft_is_opened_with_the_output(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        text = tuple(rig.oracle(PROMPT, 20, seed=1))
        request = replace(rig.request(PROMPT, 20, seed=1), resumption=Resumption(1, (text[:9],)))
        [session_id] = rig.submit(request)
        [(_, opened)] = rig.take_sent()
        assert isinstance(opened, OpenSession)
        assert (opened.prompt_len, opened.token_ids) == (40, PROMPT + text[:9])
        rig.desk.detach(1)
        rig.add_draft(2)
        rig.run(4)
        assert rig.out[session_id] == list(text[9:])
        assert rig.scheduler.stats.num_accepted_tokens > 0


class TestNoise:
    def seeds(self, make_rig, mode, temperature=0.8):
        seeds = []
        for attempt in (None, 1, 2, 3):
            rig = make_rig()
            speculation = replace(rig.request().speculation, mode=mode)
            request = replace(
                rig.request(max_tokens=8),
                sampling=SamplingParams(temperature=temperature, seed=2**64 - 1),
                speculation=speculation,
                resumption=attempt and Resumption(attempt, ((1,),)),
            )
            [session_id] = rig.submit(request)
            seeds.append(rig.scheduler._sequences[session_id].session.sampling.seed)
        return seeds

    @pytest.mark.parametrize("mode", REJECTION_MODES)
    def test_each_attempt_in_a_rejection_mode_has_a_seed_of_its_own(self, make_rig, mode):
        step = 0x9E3779B97F4A7C15
        first = 2**64 - 1
        expected = [first, step - 1, 2 * step - 1 - 2**64, 3 * step - 1 - 2**64]
        assert self.seeds(make_rig, mode) == expected

    def test_matching_modes_need_the_old_one(self, make_rig):
        assert set(self.seeds(make_rig, VerificationMode.COUPLED)) == {2**64 - 1}
        assert set(self.seeds(make_rig, None, temperature=0.0)) == {2**64 - 1}

    @pytest.mark.parametrize("mode", REJECTION_MODES)
    def test_no_noise_is_used_twice_over_all_tries(self, make_rig, mode):
        """Its keys are seed, output index and round, for every row that is verified."""
        keys, outputs = [], ()
        for attempt in range(4):
            rig = make_rig()
            rig.add_draft(1, error_rate=0.3)
            request = rig.request(PROMPT, 60, seed=1, mode=mode)
            if attempt:
                request = replace(request, resumption=Resumption(attempt, (outputs,)))
            [session_id] = rig.submit(request)
            for _ in range(3):
                rig.draft(6)
                rig.step()
            outputs = (*outputs, *rig.out[session_id])
            for plan in rig.plans:
                [entry] = plan.entries
                first, end = entry.item.output_index, entry.item.num_samples
                keys += [
                    (entry.item.sampling.seed, index, entry.item.rule.round)
                    for index in range(first, first + end)
                ]
        assert len(outputs) > 12
        assert len(set(keys)) == len(keys)
        shared = [key[1:] for key in keys]
        assert len(set(shared)) < len(shared), "with one seed they would meet again"


class TestRefused:
    @pytest.mark.parametrize(
        ("attempt", "outputs", "sentence"),
        [
            (0, ((1,), None), "attempt >= 1 and an output for each of the 2 choices"),
            (1, ((1,),), "attempt >= 1 and an output for each of the 2 choices"),
            (1, ((1,), (), ()), "attempt >= 1 and an output for each of the 2 choices"),
            (1, (None, None), "every choice of this request has ended"),
            (1, ((1,) * 5, ()), "output has come to its end"),
            (1, (None, (1,) * 6), "output has come to its end"),
            (1, ((1, 63), ()), "output has come to its end"),
            (1, ((9, 1), ()), "output has come to its end"),
            (1, ((1, 64), ()), r"output token ids must be in \[0, 64\)"),
            (1, ((), (-1,)), r"output token ids must be in \[0, 64\)"),
        ],
    )
    def test_what_cannot_be_resumed(self, make_rig, attempt, outputs, sentence):
        rig = make_rig(info=INFO)
        request = replace(rig.request(max_tokens=5, stop=(9,)), n=2)
        with pytest.raises(RequestError, match=sentence) as caught:
            rig.submit(replace(request, resumption=Resumption(attempt, outputs)))
        assert (caught.value.param, caught.value.status) == ("resumption", 400)
        rig.check_clean()

    def test_the_end_of_the_context(self, make_rig):
        rig = make_rig()
        request = rig.request((1,) * 509, 100)
        with pytest.raises(RequestError, match="has come to its end"):
            rig.submit(replace(request, resumption=Resumption(1, ((1, 1, 1),))))
        [session_id] = rig.submit(replace(request, resumption=Resumption(1, ((1, 1),))))
        rig.run()
        assert [d.finish_reason for d in rig.deltas[session_id]] == ["length"]
