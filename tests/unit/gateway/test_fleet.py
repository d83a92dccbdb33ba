"""GET /fleet: behind the keys, one question for all who ask, and a 503 without an answer."""

import asyncio
import hashlib

import pytest

from paceline.gateway.fleet import FleetView, add_fleet_route

STATUS = {"num_targets": 1, "targets": [{"replica_id": "t"}]}
SHOWN = {**STATUS, "models": {"toy": STATUS}}


class FakeController:
    """Answers when it is let; None: nobody is there."""

    def __init__(self, answer=STATUS):
        self.answer = answer
        self.num_questions = 0
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def status(self):
        self.num_questions += 1
        self.asked.set()
        await self.gate.wait()
        return self.answer


@pytest.fixture
def controller():
    return FakeController()


@pytest.fixture
def served(make_harness, controller):
    def serve(timeout_s=5.0, **limits):
        harness = make_harness(**limits)
        add_fleet_route(harness.app, FleetView({"toy": controller}, timeout_s))
        return harness

    return serve


async def test_it_says_what_the_controller_knows(served):
    response = await served().get("/fleet")
    assert (response.status_code, response.json()) == (200, SHOWN)


@pytest.mark.parametrize("timeout_s", [5.0, 0.001])
async def test_a_controller_that_is_gone_or_hangs_is_a_503(served, controller, timeout_s):
    if timeout_s == 5.0:
        controller.answer = None
    else:
        controller.gate.clear()
    async with asyncio.timeout(60):
        response = await served(timeout_s).get("/fleet")
    assert response.status_code == 503
    error = response.json()["error"]
    assert error["code"] == "no_controller"
    assert error["message"].startswith("The controller did not answer within")
    assert response.headers["retry-after"] == "1"


async def test_all_who_ask_at_a_time_share_one_question(served, controller):
    controller.gate.clear()
    harness = served()
    asking = [asyncio.ensure_future(harness.get("/fleet")) for _ in range(5)]
    await controller.asked.wait()
    leaving = asking.pop()
    leaving.cancel()  # the others are answered all the same
    await asyncio.wait([leaving])
    controller.gate.set()
    answers = await asyncio.gather(*asking)
    assert [answer.json() for answer in answers] == [SHOWN] * 4
    assert controller.num_questions == 1
    await harness.get("/fleet")
    assert controller.num_questions == 2, "the next one asks anew"


async def test_it_needs_a_key_where_there_are_keys(served, controller):
    keys = [{"name": "me", "sha256": hashlib.sha256(b"secret").hexdigest()}]
    harness = served(api_keys=keys)
    assert (await harness.get("/fleet")).status_code == 401
    assert controller.num_questions == 0
    async with harness.client() as client:
        headers = {"authorization": "Bearer secret"}
        assert (await client.get("/fleet", headers=headers)).json() == SHOWN


async def test_only_get(served):
    response = await served().post("/fleet", {})
    assert response.status_code == 405


async def test_every_model_has_its_own_and_the_first_is_on_top(make_harness):
    others = {"num_targets": 2, "targets": []}
    clients = {"toy": FakeController(), "other": FakeController(others)}
    harness = make_harness()
    add_fleet_route(harness.app, FleetView(clients))
    answer = (await harness.get("/fleet")).json()
    assert answer == {**STATUS, "models": {"toy": STATUS, "other": others}}


@pytest.mark.parametrize("hangs", [False, True])
async def test_one_that_is_silent_says_so_and_hides_nobody(make_harness, hangs):
    clients = {"toy": FakeController(None), "other": FakeController()}
    if hangs:
        clients["toy"].gate.clear()
    harness = make_harness()
    add_fleet_route(harness.app, FleetView(clients, 0.05))
    answer = (await harness.get("/fleet")).json()
    assert answer["models"]["other"] == STATUS
    silent = answer["models"]["toy"]
    assert silent["problem"] == "The controller did not answer within 0.05 s."
    assert silent["targets"] == answer["targets"] == []
    clients["other"].answer = None
    assert (await harness.get("/fleet")).status_code == 503
