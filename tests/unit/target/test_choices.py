"""n sequences of one request: the prompt is computed once, the texts are those of n requests."""

from dataclasses import replace

import pytest

from paceline.errors import OverloadedError, RequestError
from paceline.protocol import target_session
from paceline.protocol.token_log import TokenLog
from paceline.target import intake

PROMPT = tuple(range(1, 41))  # 2 blocks of 16 to share, 8 tokens for each


def ask(rig, n, prompt=PROMPT, max_tokens=20, *, seed=1, **changes):
    return rig.submit(replace(rig.request(prompt, max_tokens, seed=seed), n=n, **changes))


def rows(plan):
    return {entry.session_id: entry.max_rows for entry in plan.entries}


class TestTexts:
    @pytest.mark.parametrize("num_draft_passes", [0, 4])
    @pytest.mark.parametrize("prompt", [(5,), PROMPT[:16], PROMPT])
    def test_each_has_noise_of_its_own(self, make_rig, prompt, num_draft_passes):
        rig = make_rig()
        rig.add_draft(1, error_rate=0.1)
        ids = ask(rig, 4, prompt)
        rig.run(num_draft_passes)
        texts = [rig.out[i] for i in ids]
        assert texts == [rig.oracle(prompt, 20, seed=1, choice=c) for c in range(4)]
        assert len({tuple(text) for text in texts}) == 4
        assert [{d.choice for d in rig.deltas[i]} for i in ids] == [{0}, {1}, {2}, {3}]
        assert sum(d.finish_reason == "length" for i in ids for d in rig.deltas[i]) == 4
        rig.check_clean()

    def test_greedy_choices_are_equal(self, make_rig):
        rig = make_rig()
        ids = ask(rig, 3, seed=None)
        rig.run()
        assert [rig.out[i] for i in ids] == [rig.oracle(PROMPT, 20)] * 3

    def test_the_choice_of_the_request_itself_is_not_trusted(self, make_rig):
        rig = make_rig()
        request = rig.request(PROMPT, 20, seed=1)
        request = replace(request, sampling=replace(request.sampling, choice=7), n=2)
        ids = rig.submit(request)
        rig.run()
        assert [rig.out[i] for i in ids] == [
            rig.oracle(PROMPT, 20, seed=1, choice=c) for c in range(2)
        ]

    def test_only_choice_0_scores_the_prompt(self, make_rig):
        rig = make_rig()
        ids = ask(rig, 3, num_prompt_logprobs=1, num_logprobs=0)
        rig.run()
        num_scores = [[len(d.prompt_logprobs) for d in rig.deltas[i]] for i in ids]
        assert num_scores == [[39] + [0] * 19, [0] * 20, [0] * 20]
        for session_id in ids:
            entries = [e for d in rig.deltas[session_id] for e in d.logprobs]
            assert [e.token_id for e in entries] == rig.out[session_id]
            assert not any(e.top for e in entries)


class CountedLog(TokenLog):
    """Counts the tokens that are hashed."""

    num_hashed = 0

    def extend(self, token_ids):
        token_ids = list(token_ids)
        CountedLog.num_hashed += len(token_ids)
        super().extend(token_ids)


@pytest.fixture
def counted_log(monkeypatch):
    """In the place of `TokenLog`, wherever a request's prompt could be hashed."""
    monkeypatch.setattr(CountedLog, "num_hashed", 0)
    monkeypatch.setattr(intake, "TokenLog", CountedLog)
    monkeypatch.setattr(target_session, "TokenLog", CountedLog)
    return CountedLog


class TestHashing:
    """It takes milliseconds of the event loop for a long prompt."""

    def test_once_for_all_choices(self, make_rig, counted_log):
        rig = make_rig()
        ids = ask(rig, 4)
        assert counted_log.num_hashed == len(PROMPT)
        logs = [rig.scheduler._sequences[i].session.log for i in ids]
        assert [log.slice(0) for log in logs] == [PROMPT] * 4
        assert len({id(log) for log in logs}) == 4

    @pytest.mark.parametrize(("n", "error"), [(2, OverloadedError), (3, RequestError)])
    def test_never_for_who_is_refused(self, make_rig, counted_log, n, error):
        rig = make_rig(target={"max_num_seqs": 2, "max_queued_seqs": 0})
        rig.add((1,), 5)
        counted_log.num_hashed = 0
        with pytest.raises(error):
            ask(rig, n)
        assert counted_log.num_hashed == 0


class TestSharedPrompt:
    def test_is_computed_once(self, make_rig):
        """Then each of the others computes the 8 tokens behind the last whole block."""
        rig = make_rig()
        first, second, third = ask(rig, 3)
        assert rig.scheduler.num_running == 3
        rig.step()
        rig.step()
        assert rows(rig.plans[0]) == {first: 40}
        assert rows(rig.plans[1]) == {first: 1, second: 40, third: 40}
        assert rig.scheduler.stats.num_rows == 40 + 1 + 2 * 8
        assert rig.scheduler.stats.num_prefix_tokens == 2 * 32
        cached = [rig.deltas[i][0].num_cached_tokens for i in (first, second, third)]
        assert cached == [0, 32, 32]
        assert rig.engine.stats().num_free_blocks == 64 - 3 - 2

    def test_blocks_are_promised_once(self, make_rig):
        rig = make_rig()
        ask(rig, 3)
        assert rig.scheduler.num_free_blocks == 64 - 3 - 2

    def test_no_wait_for_less_than_a_block(self, make_rig):
        rig = make_rig()
        ids = ask(rig, 3, PROMPT[:16])
        rig.step()
        assert rows(rig.plans[0]) == dict.fromkeys(ids, 16)

    def test_no_wait_without_a_prefix_cache(self, make_rig):
        rig = make_rig(target={"model": {"enable_prefix_caching": False}})
        ids = ask(rig, 2)
        assert rig.scheduler.num_free_blocks == 64 - 3 - 3
        rig.step()
        assert rows(rig.plans[0]) == dict.fromkeys(ids, 40)

    def test_wait_over_several_passes(self, make_rig):
        rig = make_rig(target={"max_rows_per_pass": 16, "max_num_seqs": 4})
        first, second = ask(rig, 2)
        for _ in range(4):
            rig.step()
        assert [rows(plan) for plan in rig.plans] == [
            *[{first: 16}, {first: 16}, {first: 8}],
            {first: 1, second: 15},
        ]
        rig.run()
        assert rig.out[second] == rig.oracle(PROMPT, 20, seed=1, choice=1)

    @pytest.mark.parametrize("num_passes", [0, 1])
    def test_choice_0_is_gone(self, make_rig, num_passes):
        rig = make_rig(target={"max_rows_per_pass": 16, "max_num_seqs": 4})
        first, second = ask(rig, 2)
        for _ in range(num_passes):
            rig.step()
        rig.scheduler.abort(first)
        rig.run()
        assert rig.out[first] == []
        assert rig.out[second] == rig.oracle(PROMPT, 20, seed=1, choice=1)
        rig.check_clean()

    def test_choice_0_goes_in_the_pass(self, make_rig):
        rig = make_rig()
        first, second = ask(rig, 2)
        plan, results = rig.begin()
        rig.scheduler.abort(first)
        assert rig.end(plan, results) == {}
        assert list(rig.step()) == [second]

    def test_choice_0_fails(self, make_rig):
        """The pass was its own: the other choice is left to try."""
        rig = make_rig()
        first, second = ask(rig, 2)
        plan, _ = rig.begin()
        [(failed, error)] = rig.scheduler.fail_pass(plan)
        assert (failed, error.code) == (first, "engine_error")
        rig.run()
        assert rig.out[second] == rig.oracle(PROMPT, 20, seed=1, choice=1)
        rig.check_clean()


class TestPlaces:
    def test_one_place_after_the_other(self, make_rig):
        rig = make_rig(target={"max_num_seqs": 2})
        ids = ask(rig, 5, max_tokens=5)
        assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (2, 3)
        rig.run()
        assert [rig.out[i] for i in ids] == [
            rig.oracle(PROMPT, 5, seed=1, choice=c) for c in range(5)
        ]
        rig.check_clean()

    def test_all_or_none(self, make_rig):
        rig = make_rig(target={"max_num_seqs": 2, "max_queued_seqs": 2})
        rig.add((1,), 5)
        with pytest.raises(OverloadedError, match="0 sequences are queued"):
            ask(rig, 4)
        assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (1, 0)
        ask(rig, 3)
        assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (2, 2)
        with pytest.raises(OverloadedError, match="2 sequences are queued"):
            rig.add((1,), 5)
        rig.run()
        rig.check_clean()

    @pytest.mark.parametrize("n", [-1, 0, 5])
    def test_more_than_there_can_ever_be(self, make_rig, n):
        rig = make_rig(target={"max_num_seqs": 2, "max_queued_seqs": 2})
        with pytest.raises(RequestError, match=r"n must be in \[1, 4\] here") as caught:
            ask(rig, n)
        assert (caught.value.status, caught.value.param) == (400, "n")
        rig.check_clean()

    @pytest.mark.parametrize("is_cached", [True, False])
    def test_more_than_the_cache_lets_in(self, make_rig, is_cached):
        """10 blocks, 2 of them kept free: choice 0 takes 3 and each other 1, or 3 uncached."""
        target = {"max_queued_seqs": 1, "kv_watermark": 0.2}
        target["model"] = {"enable_prefix_caching": is_cached}
        rig = make_rig(info=replace(make_rig().info, num_blocks=10), target=target)
        num_startable = 6 if is_cached else 2
        with pytest.raises(RequestError) as caught:
            ask(rig, num_startable + 2)
        assert (caught.value.status, caught.value.param) == (400, "n")
        assert str(caught.value) == (
            f"n must be at most {num_startable + 1} for this prompt: the KV cache lets"
            f" {num_startable} start at once and 1 may queue (target.max_queued_seqs)"
        )
        rig.check_clean()
        ids = ask(rig, num_startable + 1)
        assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (num_startable, 1)
        with pytest.raises(OverloadedError):  # later it may come in: not a 400
            ask(rig, 2)
        rig.run()
        assert [rig.out[i] for i in ids] == [
            rig.oracle(PROMPT, 20, seed=1, choice=c) for c in range(num_startable + 1)
        ]
        rig.check_clean()

    def test_one_is_never_too_many(self, make_rig):
        """Alone it may use what is kept free for others."""
        info = replace(make_rig().info, num_blocks=4)
        rig = make_rig(info=info, target={"max_queued_seqs": 0, "kv_watermark": 0.5})
        with pytest.raises(RequestError, match="n must be at most 1 for this prompt"):
            ask(rig, 2)
        [session_id] = ask(rig, 1)
        rig.run()
        assert rig.out[session_id] == rig.oracle(PROMPT, 20, seed=1)

    def test_blocks_run_out(self, make_rig):
        """5 blocks: three texts of 4 blocks, of which they share 2."""
        rig = make_rig(info=replace(make_rig().info, num_blocks=5))
        ids = ask(rig, 3)
        rig.run()
        assert [rig.out[i] for i in ids] == [
            rig.oracle(PROMPT, 20, seed=1, choice=c) for c in range(3)
        ]
        assert rig.scheduler.stats.num_preemptions > 0
        rig.check_clean()
