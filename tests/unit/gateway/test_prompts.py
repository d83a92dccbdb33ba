"""Several prompts in one completion: each answered as if alone, in one answer with one end."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import ApiKeyConfig, GatewayConfig
from paceline.errors import RequestError
from paceline.gateway.openai import CompletionBody
from paceline.gateway.plan import Endpoint
from paceline.gateway.service import GatewayService, ServedModel
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import GenerateRequest, RoundDelta
from tests.fuzz.http import LoopbackTargets

RoundOf = Callable[..., RoundDelta]
EventsOf = Callable[[str], list[Any]]
TEXT = "/v1/completions"
PROMPTS = ["once upon", "a", "two words", "once upon"]
IDS = [[1, 2, 3], [200], [7] * 20]
MAX_MODEL_LEN = 64
BODY = {"model": "toy", "prompt": ["a", "bc", "def"], "max_tokens": 20}


@pytest.fixture
def toy(make_harness: Any) -> Any:
    """A gateway over a real toy target with a toy draft."""
    harness = make_harness(max_model_len=MAX_MODEL_LEN)
    model = harness.service.models["toy"]
    targets = LoopbackTargets(has_draft=True, max_model_len=MAX_MODEL_LEN)
    harness.service.models["toy"] = replace(model, targets=targets)
    harness.loopback = targets
    return harness


def assembled(chunks: Sequence[Any], num_choices: int) -> list[dict[str, Any]]:
    """What a client that joins a stream's chunks has of each choice."""
    choices: list[dict[str, Any]] = [
        {"index": index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        for index in range(num_choices)
    ]
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices[part["index"]]
            assert whole["finish_reason"] is None, "a chunk behind the last one"
            whole["text"] += part["text"]
            whole["finish_reason"] = part["finish_reason"]
            whole["stop_reason"] = part.get("stop_reason")
            if part["logprobs"] and whole["logprobs"]:
                for name, values in part["logprobs"].items():
                    whole["logprobs"][name] = whole["logprobs"][name] + values
            elif part["logprobs"]:
                whole["logprobs"] = part["logprobs"]
    return choices


# ------------------------------------------------------------------------------ a real target


@pytest.mark.parametrize("prompts", [PROMPTS, IDS, ["alone"], IDS[:1]], ids=repr)
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 5},
        {"temperature": 1.5, "seed": 5, "n": 3, "max_tokens": 7},
        {"temperature": 0.7, "seed": -1, "echo": True, "logprobs": 2, "n": 2},
        {"temperature": 0, "echo": True, "max_tokens": 0, "logprobs": 1},
        {"temperature": 1, "seed": 3, "guided_choice": ["yes", "no", "perhaps"]},
        {"temperature": 2, "seed": 4, "stop": ["a", "e", "1", "\x05"], "ignore_eos": True},
    ],
    ids=repr,
)
async def test_each_is_what_it_is_alone(
    prompts: Any, fields: dict[str, Any], toy: Any, events_of: EventsOf
) -> None:
    alone = [(await toy.complete(prompt, **fields)).json() for prompt in prompts]
    together = (await toy.complete(prompts, **fields)).json()
    expected = [choice for answer in alone for choice in answer["choices"]]
    for index, choice in enumerate(expected):
        assert together["choices"][index] == choice | {"index": index}
    assert len(together["choices"]) == len(expected) == len(prompts) * fields.get("n", 1)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][name] == sum(answer["usage"][name] for answer in alone)

    answer = await toy.complete(
        prompts, **fields, stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage, done = events_of(answer.text)
    assert done == "[DONE]"
    assert assembled(chunks, len(expected)) == together["choices"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage["usage"][name] == together["usage"][name]
    assert usage["choices"] == []
    assert await toy.is_idle()
    toy.loopback.check_clean()


async def test_they_run_beside_each_other(toy: Any, events_of: EventsOf) -> None:
    fields = {"temperature": 0, "ignore_eos": True, "max_tokens": 40}
    answer = await toy.complete(PROMPTS, **fields, stream=True)
    order = [chunk["choices"][0]["index"] for chunk in events_of(answer.text)[:-1]]
    first_ends = min(len(order) - 1 - order[::-1].index(index) for index in range(4))
    assert {*order[:first_ends]} == {0, 1, 2, 3}


async def test_logprobs_of_each_prompt(toy: Any) -> None:
    fields = {"prompt_logprobs": 2, "temperature": 0, "max_tokens": 2}
    together = (await toy.complete(PROMPTS, **fields)).json()["choices"]
    for prompt, choice in zip(PROMPTS, together, strict=True):
        (alone,) = (await toy.complete(prompt, **fields)).json()["choices"]
        assert choice["prompt_logprobs"] == alone["prompt_logprobs"]
        assert len(choice["prompt_logprobs"]) == len(prompt)


# --------------------------------------------------------------------- one answer, told exactly


async def test_one_answer(harness: Any, round_of: RoundOf, events_of: EventsOf) -> None:
    """Indices, sums and rounds; one id for the client, one for each prompt at the targets."""
    counts = {"num_speculative_tokens": 4, "num_draft_tokens": 3, "num_accepted_tokens": 1}

    def scripts() -> list[list[RoundDelta]]:
        return [
            [
                round_of(f"{name}0", "length", choice=0, num_cached_tokens=1, **counts),
                round_of(f"{name}1", "length", choice=1, **counts),
            ]
            for name in "abc"
        ]

    fields = {"n": 2, "speculation": {"include_rounds": True}, "seed": 9}
    harness.targets.first_scripts = scripts()
    whole = (await harness.complete(BODY["prompt"], **fields)).json()
    assert whole["id"] == "cmpl-0"
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [
        (0, "a0"), (1, "a1"), (2, "b0"), (3, "b1"), (4, "c0"), (5, "c1"),
    ]  # fmt: skip
    assert whole["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 12,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 3},
        "speculation": {
            "rounds": 6,
            "proposed": 18,
            "accepted": 6,
            "acceptance_rate": 0.333333,
            "mean_accepted_length": 2.0,
        },
    }
    pieces = whole["speculation"]["pieces"]
    assert [(piece["choice"], piece["text"]) for piece in pieces] == [
        *enumerate(["a0", "a1", "b0", "b1", "c0", "c1"])
    ]
    assert [item["choice"] for item in whole["speculation"]["rounds"]] == [*range(6)]

    requests = harness.targets.requests
    assert [request.request_id for request in requests] == ["cmpl-0-0", "cmpl-0-1", "cmpl-0-2"]
    assert [bytes(request.prompt_token_ids) for request in requests] == [b"a", b"bc", b"def"]
    assert {(request.n, request.sampling.seed) for request in requests} == {(2, 9)}

    harness.targets.first_scripts = scripts()
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await harness.complete(BODY["prompt"], **fields, stream=True, stream_options=options)
    *chunks, last, done = events_of(answer.text)
    assert (last["usage"], done) == (whole["usage"], "[DONE]")
    told = [chunk["speculation"]["pieces"] for chunk in chunks if "speculation" in chunk]
    assert sorted(itertools.chain(*told), key=lambda piece: piece["choice"]) == pieces
    for before, after in itertools.pairwise([*chunks, last]):
        assert before["usage"]["completion_tokens"] <= after["usage"]["completion_tokens"]
    assert chunks[0]["usage"]["prompt_tokens"] == 6
    assert await harness.is_idle()
    assert harness.targets.aborts == []


async def test_without_a_seed_each_draws_its_own() -> None:
    seeds = itertools.count(5)
    service = GatewayService(
        GatewayConfig(),
        [ServedModel("toy", ToyTokenizer(), LoopbackTargets(has_draft=False), 64)],
        clock=lambda: 0.0,
        random_hex=lambda: "x",
        random_seed=lambda: next(seeds),
    )
    body = CompletionBody(model="toy", prompt=["a", "a", "a"])
    for expected in ((5, 6, 7), (8, 9, 10)):
        plans = await service.plans(Endpoint.COMPLETIONS, body)
        assert tuple(plan.request.sampling.seed for plan in plans) == expected


async def test_counted_as_so_many_choices(harness: Any, round_of: RoundOf) -> None:
    harness.targets.script = [round_of("xy", "length")]
    assert (await harness.complete(BODY["prompt"])).status_code == 200
    shown = (await harness.get("/metrics")).text
    for line in (
        'request_success_total{finished_reason="length",model_name="toy"} 3.0',
        'prompt_tokens_total{model_name="toy"} 6.0',
        'generation_tokens_total{model_name="toy"} 6.0',
        'num_requests_running{model_name="toy"} 0.0',
    ):
        assert f"vllm:{line}" in shown


# ------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_fails_ends_all(
    failing: int, stream: bool, harness: Any, round_of: RoundOf
) -> None:
    harness.targets.first_scripts = [[asyncio.Event()] for _ in range(3)]
    harness.targets.first_scripts[failing] = [RequestError("No.", "prompt", "bad", 400)]
    answer = await harness.complete(BODY["prompt"], stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "No."
    assert await harness.is_idle()
    others = [index for index in range(3) if index != failing]
    assert [harness.targets.streams[index].num_cancels for index in others] == [1, 1]
    assert {f"cmpl-0-{index}" for index in others} <= {*harness.targets.aborts}
    shown = (await harness.get("/metrics")).text
    assert 'request_success_total{finished_reason="error",model_name="toy"} 1.0' in shown
    assert 'request_success_total{finished_reason="abort",model_name="toy"} 2.0' in shown


async def test_a_stream_that_has_begun_ends_in_the_error(
    harness: Any, round_of: RoundOf, events_of: EventsOf
) -> None:
    gate = asyncio.Event()
    harness.targets.first_scripts = [
        [round_of("a", "length")],
        [round_of("b"), asyncio.Event()],
        [round_of("c"), gate, RequestError("No.", None, "bad", 500)],
    ]
    exchange = harness.begin(TEXT, BODY | {"stream": True})
    for _ in range(3):
        stream = await harness.targets.begun.get()
    await stream.is_waiting.wait()
    gate.set()
    await exchange.task
    *chunks, error = events_of(exchange.body.decode())
    assert error["error"]["message"] == "No."
    assert [choice["text"] for choice in assembled(chunks, 3)] == ["a", "b", "c"]
    assert [c["finish_reason"] for c in assembled(chunks, 3)] == ["length", None, None]
    assert await harness.is_idle()
    # Of the one that had ended nothing is left to free.
    assert [stream.num_cancels for stream in harness.targets.streams] == [0, 1, 1]
    assert sorted(harness.targets.aborts) == ["cmpl-0-1", "cmpl-0-2"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_all(stream: bool, harness: Any, round_of: RoundOf) -> None:
    harness.targets.script = [round_of("a"), asyncio.Event()]
    exchange = harness.begin(TEXT, BODY | {"stream": stream})
    streams = [await harness.targets.begun.get() for _ in range(3)]
    for begun in streams:
        await begun.is_waiting.wait()
    assert harness.service.num_in_progress == 3
    exchange.leave.set()
    await exchange.task
    assert await harness.is_idle()
    assert sorted(harness.targets.aborts) == ["cmpl-0-0", "cmpl-0-1", "cmpl-0-2"]
    assert [begun.num_cancels for begun in streams] == [1, 1, 1]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_lost_target_costs_its_prompt_a_try(harness: Any, round_of: RoundOf) -> None:
    lost = RequestError("The target was lost; try again.", None, "target_lost", 503, 1)
    harness.targets.first_scripts = [
        [round_of("a", "length")], [round_of("b"), lost], [round_of("c", "length")],
    ]  # fmt: skip
    harness.targets.script = [round_of("b", "length")]
    answer = (await harness.complete(BODY["prompt"], seed=1)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a", "bb", "c"]
    assert answer["usage"]["completion_tokens"] == 4
    names = [request.request_id for request in harness.targets.requests]
    assert names == ["cmpl-0-0", "cmpl-0-1", "cmpl-0-2", "cmpl-0-1~1"]
    assert harness.targets.requests[-1].resumption.outputs == ((ord("b"),),)
    assert await harness.is_idle()
    assert harness.targets.aborts == ["cmpl-0-1"]


class Talkers:
    """Targets that always have another round; `num_pulled` of each request were taken."""

    def __init__(self, round_of: RoundOf) -> None:
        self._round_of = round_of
        self.num_pulled: dict[str, int] = {}
        self.aborts: list[str] = []

    def generate(self, request: GenerateRequest) -> Talker:
        return Talker(self, request.request_id, self._round_of)

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        self.aborts.append(request_id)

    async def ready(self) -> bool:
        return True


class Talker:
    def __init__(self, owner: Talkers, name: str, round_of: RoundOf) -> None:
        self._owner = owner
        self._name = name
        self._round_of = round_of

    async def __aiter__(self) -> AsyncIterator[RoundDelta]:
        for number in range(50):
            self._owner.num_pulled[self._name] = number + 1
            yield self._round_of("x", "length" if number == 49 else None, number)

    def cancel(self) -> None:
        pass


async def test_nothing_is_read_for_a_client_that_does_not(harness: Any, round_of: RoundOf) -> None:
    talkers = Talkers(round_of)
    model = harness.service.models["toy"]
    harness.service.models["toy"] = replace(model, targets=talkers)
    exchange = harness.begin(TEXT, BODY | {"stream": True, "max_tokens": 50})
    exchange.stops_after = 4  # the head and three rounds
    await exchange.is_stuck.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    # Three were sent, one is stuck, and one of each prompt waits.
    assert sum(talkers.num_pulled.values()) <= 3 + 1 + 3
    assert len(talkers.num_pulled) == 3
    exchange.leave.set()
    await exchange.task
    assert await harness.is_idle()
    assert sorted(talkers.aborts) == ["cmpl-0-0", "cmpl-0-1", "cmpl-0-2"]


# -------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("limits", "num_prompts", "n", "param", "said"),
    [
        ({"max_prompts": 3}, 3, 1, "prompt", "At most 3 prompts are allowed in one request."),
        ({"max_prompts": 1}, 1, 4, "prompt", "At most 1 prompts are allowed in one request."),
        ({"max_concurrent_requests": 6}, 3, 2, "prompt", "is 8, but may be at most 6 here."),
    ],
)
async def test_limits(
    limits: dict[str, int], num_prompts: int, n: int, param: str, said: str,
    make_harness: Any, round_of: RoundOf,
) -> None:  # fmt: skip
    """The limit itself is allowed; one more starts nothing and holds no place."""
    harness = make_harness(**limits)
    harness.targets.script = [round_of("x", "length", choice=choice) for choice in range(n)]
    assert (await harness.complete(["a"] * num_prompts, n=n)).status_code == 200
    refused = await harness.complete(["a"] * (num_prompts + 1), n=n)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, param, "too_many")
    assert error["message"].endswith(said)
    assert len(harness.targets.requests) == num_prompts
    assert await harness.is_idle()


async def test_each_takes_its_places(make_harness: Any, round_of: RoundOf) -> None:
    secret = "sk-paceline-test"
    sha256 = hashlib.sha256(secret.encode()).hexdigest()
    key = ApiKeyConfig(name="a", sha256=sha256, max_concurrent_requests=7)
    headers = {"authorization": f"Bearer {secret}"}
    gate = asyncio.Event()
    harness = make_harness(max_concurrent_requests=8, api_keys=(key,))
    harness.targets.script = [
        gate, round_of("x", "length"), round_of("x", "length", choice=1),
    ]  # fmt: skip
    running = harness.begin(TEXT, BODY | {"n": 2}, headers=headers)
    for _ in range(3):
        await harness.targets.begun.get()
    assert harness.service.num_in_progress == 6
    for prompts, who in ((["a"] * 3, "8 at most"), (["a"] * 2, "API key")):
        refused = await harness.post(TEXT, BODY | {"prompt": prompts}, headers=headers)
        assert refused.status_code == 429
        assert who in refused.text
    gate.set()
    await running.task
    assert running.status == 200
    never = await harness.post(TEXT, BODY | {"prompt": ["a"] * 8}, headers=headers)
    assert never.status_code == 400
    assert never.json()["error"]["message"].startswith("With this API key 'n' may be at most 7")
    assert await harness.is_idle()
