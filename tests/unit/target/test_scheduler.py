"""Continuous batching without drafts: admission, chunked prefill, limits, texts."""

import dataclasses
from dataclasses import replace

import pytest

from paceline.engine.base import EngineInfo
from paceline.errors import ContextLengthError, OverloadedError, RequestError
from paceline.generation import RoundDelta, SpeculationRequest, TokenOrigin
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.target.scheduler import Hold

LONG = tuple(range(1, 41))


def rows(plan):
    return {entry.session_id: entry.max_rows for entry in plan.entries}


class TestOneSequence:
    def test_nothing_to_do(self, make_rig):
        assert make_rig().scheduler.plan(0) == Hold(None)

    @pytest.mark.parametrize("seed", [None, 1, 2])
    @pytest.mark.parametrize("prompt", [(5,), (1, 2, 3), LONG])
    def test_text(self, make_rig, prompt, seed):
        rig = make_rig()
        session_id = rig.add(prompt, 20, seed=seed)
        rig.run()
        assert rig.out[session_id] == rig.oracle(prompt, 20, seed=seed)
        rig.check_clean()

    def test_deltas(self, make_rig):
        rig = make_rig()
        session_id = rig.add((1, 2, 3), 2)
        rig.run()
        first, second = rig.oracle((1, 2, 3), 2)
        assert rig.deltas[session_id] == [
            RoundDelta(
                1,
                (first,),
                (TokenOrigin.PLAIN,),
                num_speculative_tokens=4,
                wall_ms=0.5,
                verify_ms=0.5,
            ),
            RoundDelta(
                2,
                (second,),
                (TokenOrigin.PLAIN,),
                num_speculative_tokens=4,
                wall_ms=0.5,
                verify_ms=0.5,
                finish_reason="length",
            ),
        ]

    @pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 7])
    def test_usage_is_exact(self, make_rig, max_tokens):
        rig = make_rig()
        session_id = rig.add(max_tokens=max_tokens)
        rig.run()
        assert len(rig.out[session_id]) == max_tokens

    def test_stop_ids_of_the_request(self, make_rig):
        rig = make_rig()
        text = rig.oracle((1, 2, 3), 20)
        session_id = rig.add((1, 2, 3), 20, stop=(text[4],))
        rig.run()
        assert rig.out[session_id] == text[: text.index(text[4]) + 1]
        assert rig.deltas[session_id][-1].finish_reason == "stop"

    def test_the_models_own_eos_and_ignoring_it(self, make_rig):
        text = make_rig().oracle((1, 2, 3), 20)
        info = EngineInfo("toy", 64, 512, 16, 64, eos_token_ids=(text[4],))
        rig = make_rig(info=info)
        stopped = rig.add((1, 2, 3), 20)
        ignoring = rig.scheduler.add(replace(rig.request(max_tokens=20), ignore_eos=True), 0)
        rig.out[ignoring], rig.deltas[ignoring] = [], []
        rig.run()
        assert rig.out[stopped] == text[: text.index(text[4]) + 1]
        assert rig.out[ignoring] == text

    def test_counts(self, make_rig):
        rig = make_rig()
        rig.add(LONG, 5)
        rig.run()
        stats = rig.scheduler.stats
        assert (stats.num_passes, stats.num_rows, stats.num_rounds) == (5, 44, 5)
        assert (stats.num_plain_rounds, stats.num_committed_tokens) == (5, 5)
        assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (0, 0)
        assert (stats.num_finished, stats.num_aborted, stats.num_holds) == (1, 0, 0)


class TestChunkedPrefill:
    def test_chunks_and_the_last_one_samples(self, make_rig):
        rig = make_rig(target={"max_rows_per_pass": 16, "max_num_seqs": 4})
        session_id = rig.add(LONG, 3)
        assert [rig.step(), rig.step()] == [{}, {}]
        assert list(rig.step()) == [session_id]
        assert [rows(plan)[session_id] for plan in rig.plans] == [16, 16, 8]
        assert [plan.items[0].start for plan in rig.plans] == [0, 16, 32]
        assert {plan.items[0].num_samples for plan in rig.plans} == {1}, "if it gets to the end"
        assert {plan.items[0].token_ids for plan in rig.plans} == {LONG, LONG[16:], LONG[32:]}
        rig.run()
        assert rig.out[session_id] == rig.oracle(LONG, 3)

    @pytest.mark.parametrize("max_rows", [16, 17, 19, 39, 40, 41])
    def test_the_chunk_size_is_invisible(self, make_rig, max_rows):
        rig = make_rig(target={"max_rows_per_pass": max_rows, "max_num_seqs": 4})
        prompts = [LONG, LONG[:7], LONG[3:30], (9,)]
        added = [(rig.add(p, 12, seed=i), p, i) for i, p in enumerate(prompts, 1)]
        rig.run()
        for session_id, prompt, seed in added:
            assert rig.out[session_id] == rig.oracle(prompt, 12, seed=seed)
        assert max(plan.num_rows for plan in rig.plans) <= max_rows
        rig.check_clean()

    def test_a_new_prompt_never_stops_the_sequences_that_run(self, make_rig):
        rig = make_rig(target={"max_rows_per_pass": 16, "max_num_seqs": 4})
        first = rig.add((1,), 20)
        rig.step()
        second = rig.add(LONG, 5)
        rig.step()
        rig.step()
        assert [rows(p) for p in rig.plans[1:]] == [{first: 1, second: 15}] * 2
        assert len(rig.out[first]) == 3

    def test_prompts_in_order(self, make_rig):
        """What the first prompt leaves, the second gets in the same pass."""
        rig = make_rig(target={"max_rows_per_pass": 16, "max_num_seqs": 4})
        first, second = rig.add(LONG[:20], 5), rig.add(LONG, 5)
        rig.step()
        rig.step()
        assert [rows(p) for p in rig.plans] == [{first: 16}, {first: 4, second: 12}]

    def test_two_last_chunks_in_one_pass(self, make_rig):
        rig = make_rig()
        first, second = rig.add(LONG, 5), rig.add(LONG[:9], 5)
        assert set(rig.step()) == {first, second}


class TestContinuousBatching:
    def test_every_runnable_sequence_is_in_every_pass(self, make_rig):
        rig = make_rig()
        ids = []
        for number in range(6):
            ids.append(rig.add((1, number + 1), 10 - number, seed=number + 1))
            running = set(rig.scheduler._running)
            assert set(rig.step()) == running
        while rig.scheduler.num_running:
            running = set(rig.scheduler._running)
            assert set(rig.step()) == running
        for number, session_id in enumerate(ids):
            expected = rig.oracle((1, number + 1), 10 - number, seed=number + 1)
            assert rig.out[session_id] == expected
        rig.check_clean()

    def test_admitted_between_passes(self, make_rig):
        rig = make_rig(target={"max_num_seqs": 2})
        first, second, third = (rig.add(max_tokens=n) for n in (2, 3, 2))
        assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (2, 1)
        assert [set(rig.step()) for _ in range(4)] == [
            {first, second},
            {first, second},
            {second, third},
            {third},
        ]

    def test_batched_equals_one_at_a_time(self, make_rig):
        batched, single = make_rig(), make_rig()
        ids = [batched.add((1, 2, i), 15, seed=i + 1) for i in range(8)]
        batched.run()
        for number, session_id in enumerate(ids):
            alone = single.add((1, 2, number), 15, seed=number + 1)
            single.run()
            assert single.out[alone] == batched.out[session_id]


class TestAdmission:
    """4 blocks of 16 tokens. A sequence starts when its text fits, whatever it may write."""

    INFO = EngineInfo("toy", 64, 512, 16, 4)

    def test_only_the_text_is_promised(self, make_rig):
        rig = make_rig(info=self.INFO)
        rig.add((1, 2, 3), 61)
        assert rig.scheduler.num_free_blocks == 3
        rig.add(LONG[:17], 40)
        assert rig.scheduler.num_free_blocks == 1
        rig.run()
        rig.check_clean()

    def test_what_the_engine_says_counts(self, make_rig):
        rig = make_rig(info=self.INFO)
        rig.add(LONG[:15], 30)
        rig.step()
        assert rig.scheduler.num_free_blocks == 3
        rig.step()  # the text is 17 tokens long now
        assert rig.scheduler.num_free_blocks == 2
        rig.run()
        assert rig.scheduler.num_free_blocks == 4

    def test_first_in_first_out(self, make_rig):
        """A small request must not overtake the large one that waits for blocks."""
        rig = make_rig(info=self.INFO)
        first = rig.add((1,) * 17, 12)
        large, small = rig.add((2,) * 33, 3), rig.add((3,), 3)
        assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (1, 2)
        order = []
        while rig.scheduler.num_running:
            for session_id, delta in rig.step().items():
                if delta.finish_reason:
                    order.append(session_id)
        assert order == [first, large, small]
        first_of_large = next(i for i, p in enumerate(rig.plans) if large in rows(p))
        assert first_of_large == 12
        rig.check_clean()

    @pytest.mark.parametrize(("watermark", "num_running"), [(0.0, 2), (0.25, 2), (0.5, 1)])
    def test_watermark(self, make_rig, watermark, num_running):
        """Beside the first sequence's 2 blocks the second's 1 must leave 0, 1, or 2 free."""
        rig = make_rig(info=self.INFO, target={"kv_watermark": watermark})
        rig.add((1,) * 17, 3)
        rig.add((2,), 3)
        assert rig.scheduler.num_running == num_running
        rig.run()
        rig.check_clean()

    def test_a_lone_sequence_ignores_the_watermark(self, make_rig):
        rig = make_rig(info=self.INFO, target={"kv_watermark": 0.9})
        session_id = rig.add(LONG, 24)
        rig.run()
        assert len(rig.out[session_id]) == 24
        rig.check_clean()

    def test_what_can_never_fit(self, make_rig):
        rig = make_rig(info=self.INFO)
        rig.add((1, 2, 3), 61)
        with pytest.raises(ContextLengthError) as caught:
            rig.add((1, 2, 3), 62)
        assert "need 65 tokens of KV cache; this deployment holds 64" in str(caught.value)
        assert (caught.value.status, caught.value.param) == (400, "max_tokens")
        assert caught.value.code == "context_length_exceeded"
        # Not the model's limit, which has the same code.
        assert caught.value.limit == "model.num_kv_blocks"

    def test_queue_overflow(self, make_rig):
        rig = make_rig(target={"max_num_seqs": 1, "max_queued_seqs": 2})
        ids = [rig.add(max_tokens=2) for _ in range(3)]
        with pytest.raises(OverloadedError) as caught:
            rig.add(max_tokens=2)
        assert str(caught.value) == "2 sequences are queued (target.max_queued_seqs)"
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert caught.value.retry_after_s == 1
        rig.run()
        assert [len(rig.out[i]) for i in ids] == [2, 2, 2]
        rig.check_clean()

    def test_no_queue_at_all(self, make_rig):
        rig = make_rig(target={"max_num_seqs": 1, "max_queued_seqs": 0})
        rig.add()
        with pytest.raises(OverloadedError, match="0 sequences are queued"):
            rig.add()

    def test_a_small_request_does_not_squeeze_into_a_full_queue(self, make_rig):
        """It would fit the cache at once, but the head of the queue comes first."""
        rig = make_rig(info=self.INFO, target={"max_queued_seqs": 1})
        rig.add((1,) * 17, 20)
        rig.add((2,) * 33, 20)
        with pytest.raises(OverloadedError):
            rig.add((1,), 3)
        assert rig.scheduler.num_waiting == 1

    def test_a_refusal_starts_nothing(self, make_rig):
        rig = make_rig(target={"max_num_seqs": 1, "max_queued_seqs": 0})
        first = rig.add(max_tokens=3)
        with pytest.raises(OverloadedError):
            rig.add()
        rig.run()
        assert rig.add() == first + 1
        rig.run()
        rig.check_clean()


class TestRequestsThatCannotRun:
    @pytest.mark.parametrize(("prompt", "max_tokens"), [((), 5), ((1,), 0), ((1,), -1)])
    def test_empty(self, make_rig, prompt, max_tokens):
        with pytest.raises(RequestError, match="a prompt token and max_tokens >= 1") as caught:
            make_rig().add(prompt, max_tokens)
        assert caught.value.param == "prompt"

    @pytest.mark.parametrize("length", [512, 513])
    def test_prompt_too_long(self, make_rig, length):
        with pytest.raises(ContextLengthError) as caught:
            make_rig().add((1,) * length, 1)
        assert f"the prompt has {length} tokens; this model's context is 512" in str(caught.value)
        assert caught.value.param == "prompt"

    @pytest.mark.parametrize(("length", "num_tokens"), [(511, 1), (510, 2)])
    def test_prompt_just_short_enough(self, make_rig, length, num_tokens):
        """max_tokens beyond the context ends in "length", not in an error."""
        rig = make_rig()
        session_id = rig.add((1,) * length, 100)
        rig.run()
        assert len(rig.out[session_id]) == num_tokens
        assert rig.deltas[session_id][-1].finish_reason == "length"
        rig.check_clean()

    @pytest.mark.parametrize("bad", [-1, 64, 10**9])
    def test_ids_outside_of_the_vocabulary(self, make_rig, bad):
        with pytest.raises(RequestError, match=r"must be in \[0, 64\)"):
            make_rig().add((1, bad, 2), 5)

    def test_last_id_of_the_vocabulary(self, make_rig):
        rig = make_rig()
        session_id = rig.add((0, 63), 2)
        rig.run()
        assert len(rig.out[session_id]) == 2

    @pytest.mark.parametrize("mode", list(VerificationMode))
    def test_mode_must_fit_the_temperature(self, make_rig, mode):
        rig = make_rig()
        asked = SpeculationRequest(mode=mode)
        for temperature, fitting in ((0.0, "greedy"), (0.8, "coupled")):
            sampling = SamplingParams(temperature=temperature)
            request = replace(rig.request(), sampling=sampling, speculation=asked)
            if (mode == "greedy") == (fitting == "greedy"):
                assert rig.scheduler.add(request, 0) > 0
            else:
                with pytest.raises(RequestError, match=f"it would be {fitting}") as caught:
                    rig.scheduler.add(request, 0)
                assert caught.value.param == "speculation.mode"

    def test_nothing_is_left_of_them(self, make_rig):
        rig = make_rig()
        for bad in ((), (64,), (1,) * 512):
            with pytest.raises(RequestError):
                rig.add(bad, 5)
        rig.check_clean()


@pytest.mark.parametrize(("draft_tokens", "ahead"), [(1, 3), (2, 5), (4, 9), (8, 16)])
def test_credit_is_what_two_passes_could_use(make_rig, draft_tokens, ahead):
    """2 K + 1 positions, or `max_draft_ahead` (16) where that is less."""
    rig = make_rig()
    request = rig.request(max_tokens=100)
    asked = SpeculationRequest("model", draft_tokens, lookahead="fixed")
    rig.add_draft(1)
    rig.scheduler.add(dataclasses.replace(request, speculation=asked), 0)
    session = rig.scheduler._sequences[1].session
    assert session.limit_position - session.committed_len == ahead
