"""How long a request may wait for its first place."""

from dataclasses import replace

from paceline.engine.base import EngineInfo
from paceline.target.scheduler import Hold

US = 1_000_000
ONE_PLACE = {"max_num_seqs": 1, "max_queue_s": 2.5}


def expired(rig, now_us):
    return [(i, e.code, e.status, e.retry_after_s) for i, e in rig.scheduler.expire(now_us)]


def timeout(session_id):
    return (session_id, "queue_timeout", 503, 1)


def test_not_before_its_time(make_rig):
    rig = make_rig(target=ONE_PLACE)
    rig.add()
    rig.now = 7
    waiting = rig.add(max_tokens=5)
    assert expired(rig, 7 + 2_500_000 - 1) == []
    [(session_id, error)] = rig.scheduler.expire(7 + 2_500_000)
    assert session_id == waiting
    assert str(error) == ("no place became free within 2.5 s (target.max_queue_s); try again later")
    assert (error.status, error.code, error.retry_after_s) == (503, "queue_timeout", 1)
    assert rig.scheduler.stats.num_queue_timeouts == 1
    assert rig.scheduler.num_waiting == 0
    assert expired(rig, 10 * US) == []
    rig.run()
    rig.check_clean()


def test_in_order_and_only_the_overdue(make_rig):
    rig = make_rig(target=ONE_PLACE)
    rig.add()
    ids = []
    for rig.now in (0, US, 2 * US):
        ids.append(rig.add(max_tokens=5))
    assert expired(rig, 4 * US) == [timeout(ids[0]), timeout(ids[1])]
    rig.run()
    assert rig.out[ids[2]] == rig.oracle((1, 2, 3), 5)
    rig.check_clean()


def test_who_runs_is_never_overdue(make_rig):
    rig = make_rig(target=ONE_PLACE)
    first = rig.add(max_tokens=3)
    second = rig.add(max_tokens=3)
    for _ in range(4):
        rig.step()
    assert expired(rig, 100 * US) == [], "both have had a place"
    rig.run()
    assert [len(rig.out[i]) for i in (first, second)] == [3, 3]


def test_amid_a_pass(make_rig):
    rig = make_rig(target=ONE_PLACE)
    first, waiting = rig.add(max_tokens=3), rig.add(max_tokens=3)
    plan, results = rig.begin()
    assert expired(rig, 3 * US) == [timeout(waiting)]
    assert list(rig.end(plan, results)) == [first]
    rig.run()
    rig.check_clean()


def test_a_preempted_sequence_has_begun(make_rig):
    info = EngineInfo("toy", 64, 512, 16, 4)
    rig = make_rig(info=info, target={"max_queue_s": 1.0})
    ids = [rig.add((start, *range(2, 20)), 40) for start in (1, 2)]
    while not rig.scheduler.stats.num_preemptions:
        rig.step()
    assert rig.scheduler.num_waiting == 1
    late = rig.add((3,), 5)
    assert expired(rig, rig.now + 100 * US) == [timeout(late)]
    rig.run()
    assert [len(rig.out[i]) for i in ids] == [40, 40]
    rig.check_clean()


class TestChoices:
    def test_all_of_a_request_that_never_began(self, make_rig):
        rig = make_rig(target=ONE_PLACE)
        rig.add()
        ids = rig.submit(replace(rig.request(max_tokens=5, seed=1), n=3))
        assert expired(rig, 3 * US) == [timeout(i) for i in ids]
        rig.run()
        rig.check_clean()

    def test_one_place_is_enough_for_the_others_to_wait_on(self, make_rig):
        rig = make_rig(target=ONE_PLACE)
        ids = rig.submit(replace(rig.request(max_tokens=5, seed=1), n=3))
        other = rig.add((9,), 5)
        rig.step()
        assert rig.scheduler.num_waiting == 3
        assert expired(rig, 3 * US) == [timeout(other)]
        rig.run()
        assert [len(rig.out[i]) for i in ids] == [5, 5, 5]

    def test_a_first_choice_that_left_had_no_place(self, make_rig):
        rig = make_rig(target=ONE_PLACE)
        rig.add()
        ids = rig.submit(replace(rig.request(max_tokens=5, seed=1), n=3))
        rig.scheduler.abort(ids[0])
        assert expired(rig, 3 * US) == [timeout(i) for i in ids[1:]]

    def test_the_next_one_has_it_then(self, make_rig):
        rig = make_rig(target=ONE_PLACE)
        running = rig.add()
        ids = rig.submit(replace(rig.request(max_tokens=5, seed=1), n=3))
        rig.scheduler.abort(ids[0])
        rig.scheduler.abort(running)
        rig.step()
        assert expired(rig, 3 * US) == []
        rig.run()
        assert [len(rig.out[i]) for i in ids] == [0, 5, 5]


def test_nobody_waits_while_a_target_holds(make_rig):
    """So the driver needs no timer for it: it asks before each pass, and while one goes on."""
    rig = make_rig(target=ONE_PLACE, speculation={"max_lone_wait_ms": 50.0})
    rig.add_draft(1)
    rig.add(max_tokens=40)
    rig.add(max_tokens=40)
    num_holds = 0
    while rig.scheduler.num_running:
        rig.draft(3)
        if isinstance(rig.step(), Hold):
            num_holds += 1
            assert rig.scheduler.num_waiting == 0
            rig.now += 60_000
    assert rig.scheduler.stats.num_finished == 2
