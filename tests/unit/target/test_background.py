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
