"""Requests that no client waits for: they never queue, and leave when somebody has to."""

from dataclasses import replace

import pytest

from paceline.engine.base import EngineInfo
from paceline.errors import OverloadedError

TWO_PLACES = {"max_num_seqs": 2}


def background(rig, max_tokens=8):
    return replace(rig.request(max_tokens=max_tokens, seed=1), is_background=True)


def gone(rig):
    """As the driver: whoever is to leave is aborted."""
    ended = rig.scheduler.expire(rig.now)
    for session_id, _ in ended:
        rig.scheduler.abort(session_id)
    return [(session_id, error.code, error.status) for session_id, error in ended]


def test_it_runs_like_any_other_where_there_is_room(make_rig):
    rig = make_rig(target=TWO_PLACES)
    rig.add()
    (session_id,) = rig.submit(background(rig))
    assert gone(rig) == []
    rig.run()
    assert len(rig.out[session_id]) == 8
    rig.check_clean()


def test_it_does_not_wait_for_a_place(make_rig):
    rig = make_rig(target=TWO_PLACES)
    rig.add()
    rig.add()
    with pytest.raises(OverloadedError) as caught:
        rig.submit(background(rig))
    assert (caught.value.code, caught.value.status) == ("no_place", 429)
    assert rig.scheduler.num_waiting == 0
    rig.run()
    rig.check_clean()


def test_it_leaves_when_a_client_has_to_wait(make_rig):
    rig = make_rig(target=TWO_PLACES)
    rig.add(max_tokens=20)
    (session_id,) = rig.submit(background(rig, 20))
    rig.step()
    late = rig.add(max_tokens=5)
    assert rig.scheduler.num_waiting == 1
    assert gone(rig) == [(session_id, "no_place", 429)]
    assert gone(rig) == []
    rig.step()
    assert rig.scheduler.num_waiting == 0
    rig.run()
    assert len(rig.out[late]) == 5
    rig.check_clean()


def test_amid_a_pass(make_rig):
    rig = make_rig(target=TWO_PLACES)
    rig.add(max_tokens=20)
    (session_id,) = rig.submit(background(rig, 20))
    plan, results = rig.begin()
    rig.add(max_tokens=5)
    assert gone(rig) == [(session_id, "no_place", 429)]
    assert gone(rig) == []
    rig.end(plan, results)
    rig.run()
    rig.check_clean()


def test_it_does_not_come_back_once_its_blocks_were_needed(make_rig):
    """The newest gives its KV back when blocks run out; in the background it then ends."""
    rig = make_rig(info=EngineInfo("toy", 64, 512, 16, 4))
    first = rig.add((1, *range(2, 20)), 40)
    (session_id,) = rig.submit(replace(background(rig, 40), prompt_token_ids=(2, *range(2, 20))))
    while not rig.scheduler.stats.num_preemptions:
        rig.step()
    assert gone(rig) == [(session_id, "no_place", 429)]
    rig.run()
    assert len(rig.out[first]) == 40
    rig.check_clean()


def test_a_client_keeps_its_blocks_when_they_run_out(make_rig):
    """The one in the background gives way, though it is the older."""
    rig = make_rig(info=EngineInfo("toy", 64, 512, 16, 4))
    (session_id,) = rig.submit(replace(background(rig, 40), prompt_token_ids=(2, *range(2, 20))))
    client = rig.add((1, *range(2, 20)), 40)
    assert rig.scheduler.num_running == 2
    while not rig.scheduler.stats.num_preemptions:
        rig.step()
    assert rig.scheduler._sequences[client].num_preemptions == 0
    assert gone(rig) == [(session_id, "no_place", 429)]
    rig.run()
    assert rig.out[client] == rig.oracle((1, *range(2, 20)), 40)
    assert rig.scheduler.stats.num_preemptions == 1
    rig.check_clean()


class TestAtTheDoor:
    """Clients are told what they would be if nobody were in the background."""

    def test_its_place_is_free(self, make_rig):
        rig = make_rig(target={**TWO_PLACES, "max_queued_seqs": 0})
        rig.add(max_tokens=20)
        (session_id,) = rig.submit(background(rig, 20))
        rig.step()
        late = rig.add(max_tokens=5)
        with pytest.raises(OverloadedError, match="1 sequences are queued"):
            rig.add()
        assert gone(rig) == [(session_id, "no_place", 429)]
        rig.run()
        assert len(rig.out[late]) == 5
        rig.check_clean()

    def test_each_of_several_places(self, make_rig):
        rig = make_rig(target={"max_num_seqs": 3, "max_queued_seqs": 0})
        rig.add(max_tokens=20)
        for _ in range(2):
            rig.submit(background(rig, 20))
        late = [rig.add(max_tokens=5) for _ in range(2)]
        with pytest.raises(OverloadedError):
            rig.add()
        assert len(gone(rig)) == 2
        rig.run()
        assert [len(rig.out[i]) for i in late] == [5, 5]
        rig.check_clean()

    def test_its_blocks_are_free(self, make_rig):
        info = EngineInfo("toy", 64, 512, 16, 8)
        rig = make_rig(info=info, target={"max_queued_seqs": 0, "kv_watermark": 0.0})
        rig.add((1,) * 10, 4)
        (session_id,) = rig.submit(replace(background(rig, 20), prompt_token_ids=(2,) * 60))
        rig.step()
        late = rig.add((3,) * 100, 5)
        with pytest.raises(OverloadedError):
            rig.add((4,) * 100, 5)
        assert gone(rig) == [(session_id, "no_place", 429)]
        rig.run()
        assert len(rig.out[late]) == 5
        rig.check_clean()

    def test_what_a_client_holds_is_not(self, make_rig):
        info = EngineInfo("toy", 64, 512, 16, 8)
        rig = make_rig(info=info, target={"max_queued_seqs": 0, "kv_watermark": 0.0})
        rig.add((1,) * 60, 4)
        rig.submit(background(rig, 8))
        rig.step()
        with pytest.raises(OverloadedError):
            rig.add((3,) * 100, 5)
        rig.run()
        rig.check_clean()

    def test_another_in_the_background_finds_it_taken(self, make_rig):
        rig = make_rig(target=TWO_PLACES)
        for _ in range(2):
            rig.submit(background(rig))
        with pytest.raises(OverloadedError) as caught:
            rig.submit(background(rig))
        assert caught.value.code == "no_place"
        rig.run()
        rig.check_clean()


def test_its_prompt_comes_behind_those_of_clients(make_rig):
    rig = make_rig(target={"max_rows_per_pass": 16, "max_num_seqs": 4})
    (session_id,) = rig.submit(replace(background(rig), prompt_token_ids=(2,) * 64))
    clients = [rig.add((start,) * 20, 5) for start in (3, 4)]
    order = []
    while rig.scheduler.num_running:
        order += rig.step()
    assert list(dict.fromkeys(order)) == [*clients, session_id]
    assert len(rig.out[session_id]) == 8
    rig.check_clean()
