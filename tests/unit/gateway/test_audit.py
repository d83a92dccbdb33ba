"""What the audit asks of targets, what it makes of the answers, and when it keeps away."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from paceline import logs
from paceline.errors import OverloadedError, RequestError
from paceline.gateway.audit import MAX_TIES, first_difference
from paceline.gateway.audit_metrics import fill_audit
from paceline.gateway.audit_runs import nudge
from paceline.gateway.audit_samples import AuditCounts, Skip
from paceline.gateway.openai import CompletionBody
from paceline.gateway.plan import Endpoint
from paceline.generation import Resumption, RoundDelta, SpeculationRequest
from paceline.metrics import audit_catalog
from paceline.metrics.metric import Role
from paceline.metrics.snapshot import Snapshot
from paceline.sampling.params import MAX_LOGIT_BIASES, SamplingParams, VerificationMode
from paceline.sampling.processors import process_logits
from tests.unit.gateway.audit_tools import ON, TEXT, TRACE, done, errors, reruns
from tests.unit.gateway.test_metrics import scrape

RoundOf = Callable[..., RoundDelta]


async def test_off_unless_asked_for(harness: Any, round_of: RoundOf) -> None:
    harness.targets.script = [round_of("ab", "length")]
    await harness.complete()
    assert await done(harness) == AuditCounts()
    assert len(harness.targets.requests) == 1


async def test_the_same_request_without_a_draft(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON)
    harness.targets.script = [round_of("abcd", number=0), round_of("ef", "length", 1)]
    body = {
        "temperature": 0.7, "seed": 5, "logit_bias": {"97": 2}, "min_tokens": 9, "logprobs": 2,
        "top_p": 0.9, "frequency_penalty": 0.5, "stop_token_ids": [4],
    }  # fmt: skip
    plan_body = CompletionBody.model_validate(
        {"model": "toy", "prompt": "hi", "max_tokens": 20, **body, "logprobs": None}
    )
    (plan,) = await harness.service.plans(Endpoint.COMPLETIONS, plan_body)
    plan = plan.salted(9).traced(TRACE)
    _ = [item async for item in harness.service.rounds(plan, harness.service.answer(plan))]
    counts = await done(harness)
    assert (counts.num_requests, counts.num_tokens, counts.num_mismatches) == (1, 6, 0)
    client, again = harness.targets.requests
    assert client == plan.request
    assert again == replace(
        client,
        request_id="cmpl-0~audit1",
        max_tokens=6,
        sampling=replace(client.sampling, min_tokens=6),
        speculation=SpeculationRequest("off", mode=VerificationMode.COUPLED),
        resumption=Resumption(1, ((),)),
        cache_salt=again.cache_salt,
        traceparent="",
        is_background=True,
    )
    assert again.cache_salt != client.cache_salt, "what drafts had a part in is not reused"


async def test_a_mismatch(
    make_harness: Any, round_of: RoundOf, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, with its place and the two ids, and with no text."""
    harness = make_harness(audit=ON)
    wrong = [round_of("seXret", "length")]
    harness.targets.first_scripts = [
        wrong,
        [round_of("secret", "length")],
        [round_of("c", "length")],
    ]
    body = {"model": "toy", "prompt": "hi", "max_tokens": 20, "temperature": 0}
    answer = await harness.post(TEXT, body, headers={"traceparent": TRACE})
    assert answer.status_code == 200
    counts = await done(harness)
    assert (counts.num_requests, counts.num_mismatches, counts.num_ties) == (1, 1, 0)
    assert counts.num_tokens == 3
    (said,) = errors(caplog)
    assert said == (
        "audit: choice 0 (greedy) parts from the plain target at output token 2: sent 88, plain 99"
    )
    (ids,) = [getattr(record, logs.IDS) for record in caplog.records if record.message == said]
    assert (ids.trace_id, ids.completion_id) == ("ab" * 16, "cmpl-0")
    assert "secret" not in caplog.text
    samples = await scrape(harness)
    assert samples["paceline_audit_mismatches_total"] == 1
    assert samples["paceline_audit_requests_total"] == 1
    # The question whether it is a tie: the same place, with the client's id a bit likelier.
    _, question = reruns(harness)
    assert question.resumption == Resumption(1, (tuple(b"se"),))
    assert question.max_tokens == 3
    assert question.sampling.logit_bias == ((88, 0.25),)


async def test_ties_are_followed_along_the_clients_text(
    make_harness: Any, round_of: RoundOf, caplog: pytest.LogCaptureFixture
) -> None:
    harness = make_harness(audit=ON)
    harness.targets.first_scripts = [
        [round_of("abXdef", "length")],  # the client's
        [round_of("abcxyz", "length")],  # parts at 2
        [round_of("X", "length")],  # and it is a tie
        [round_of("def", "length")],  # so the rest is the same
    ]
    await harness.complete()
    counts = await done(harness)
    assert (counts.num_ties, counts.num_mismatches, counts.num_tokens) == (1, 0, 6)
    assert errors(caplog) == []
    assert reruns(harness)[-1].resumption == Resumption(1, (tuple(b"abX"),))


async def test_ties_end(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON)
    sent = "a" * (MAX_TIES + 3)
    scripts = [[round_of(sent, "length")]]
    for _ in range(MAX_TIES + 3):
        scripts += [[round_of("b", "length")], [round_of("a", "length")]]
    harness.targets.first_scripts = scripts
    await harness.complete()
    counts = await done(harness)
    assert (counts.num_ties, counts.num_tokens) == (MAX_TIES + 1, MAX_TIES + 1)


@pytest.mark.parametrize(("plain", "at"), [("ab", 2), ("abcde", None)])
async def test_texts_of_different_lengths(
    plain: str,
    at: int | None,
    make_harness: Any,
    round_of: RoundOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The plain target ended earlier; it cannot write more than it was asked for."""
    harness = make_harness(audit=ON)
    harness.targets.first_scripts = [[round_of("abcde", "length")], [round_of(plain, "stop")]]
    await harness.complete()
    counts = await done(harness)
    assert counts.num_mismatches == (at is not None)
    assert all("sent 99, plain the end" in said for said in errors(caplog))


async def test_choices_one_by_one(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON)
    harness.targets.first_scripts = [
        [round_of("ab", "length"), round_of("cd", "length", choice=1)],
        [round_of("ab", "length")],
        [round_of("cx", "length", choice=1)],
        [round_of("x", "length", choice=1)],
    ]
    await harness.complete(n=2)
    counts = await done(harness)
    assert (counts.num_mismatches, counts.num_tokens, counts.num_requests) == (1, 4, 1)
    assert [r.resumption.outputs for r in reruns(harness)] == [
        ((), None), (None, ()), (None, (99,))
    ]  # fmt: skip


async def test_only_so_many_tokens(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON | {"max_tokens": 4})
    harness.targets.first_scripts = [[round_of("abc"), round_of("def", "length", 1)]]
    harness.targets.script = [round_of("abcd", "length")]
    await harness.complete()
    counts = await done(harness)
    assert (counts.num_tokens, counts.num_mismatches) == (4, 0)
    assert reruns(harness)[0].max_tokens == 4


async def test_who_leaves_is_audited_as_far_as_it_came(
    make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(audit=ON)
    wait = asyncio.Event()
    harness.targets.first_scripts = [[round_of("ab"), wait]]
    harness.targets.script = [round_of("ab", "length")]
    body = {"model": "toy", "prompt": "hi", "max_tokens": 20, "stream": True}
    exchange = harness.begin(TEXT, body)
    stream = await harness.targets.begun.get()
    await stream.is_waiting.wait()
    exchange.leave.set()
    await exchange.task
    counts = await done(harness)
    assert (counts.num_requests, counts.num_tokens) == (1, 2)


async def test_a_stop_string_is_no_difference(make_harness: Any, round_of: RoundOf) -> None:
    """The target went on in that round, and the plain one does, too."""
    harness = make_harness(audit=ON)
    harness.targets.script = [round_of("abcXyz", "length")]
    await harness.complete(stop="X")
    counts = await done(harness)
    assert (counts.num_tokens, counts.num_mismatches) == (6, 0)


# ---------------------------------------------------------------------------------------- skips


@pytest.mark.parametrize(
    ("reason", "mode", "fields"),
    [
        (Skip.PLAIN, "coupled", {"speculation": {"method": "off"}}),
        (Skip.PLAIN, "coupled", {"speculation": {"max_tokens": 0}}),
        (Skip.SEEDED, "rejection", {"seed": 3}),
        (Skip.SEEDED, "coupled", {"seed": 3, "speculation": {"mode": "block"}}),
        (Skip.LONG_PROMPT, "coupled", {"prompt": "much too long"}),
    ],
)
async def test_what_is_not_audited(
    reason: Skip, mode: str, fields: dict[str, Any], make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(audit=ON | {"max_prompt_tokens": 12}, mode=mode)
    harness.targets.script = [round_of("ab", "length")]
    await harness.complete(**fields)
    counts = await done(harness)
    assert (counts.skipped, counts.num_requests) == ({reason: 1}, 0)
    assert reruns(harness) == []
    samples = await scrape(harness)
    assert samples[f"paceline_audit_skipped_total{{{reason.value}}}"] == 1


async def test_a_prompt_at_the_limit(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON | {"max_prompt_tokens": 2})
    harness.targets.script = [round_of("ab", "length")]
    await harness.complete("hi", seed=3)
    assert (await done(harness)).num_requests == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OverloadedError("x", None, "no_place"), Skip.BUSY),
        (RequestError("x", None, "target_lost", 503), Skip.ERROR),
        (ZeroDivisionError("planted"), Skip.ERROR),
    ],
)
async def test_a_target_that_fails_ends_one_audit(
    error: Exception, reason: Skip, make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(audit=ON)
    harness.targets.script = [round_of("ab", "length")]
    harness.targets.first_scripts = [[round_of("ab", "length")], [error]]
    await harness.complete()
    assert (await done(harness)).skipped == {reason: 1}
    await harness.complete()
    counts = await done(harness)
    assert (counts.num_requests, counts.skipped) == (1, {reason: 1})
    assert await harness.is_idle()


async def test_a_stream_that_breaks_off_is_no_text(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON)
    harness.targets.first_scripts = [[round_of("abcd", "length")], [round_of("ab")]]
    harness.targets.script = []
    await harness.complete()
    counts = await done(harness)
    assert (counts.num_mismatches, counts.skipped) == (0, {Skip.ERROR: 1})


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RequestError("my secret", None, "target_lost", 503), "target_lost"),
        (RequestError("my secret"), "RequestError"),
        (ZeroDivisionError("my secret"), "ZeroDivisionError, message withheld"),
    ],
)
async def test_what_a_target_says_is_not_logged(
    error: Exception,
    shown: str,
    make_harness: Any,
    round_of: RoundOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may quote the client's text."""
    harness = make_harness(audit=ON)
    harness.targets.first_scripts = [[round_of("ab", "length")], [error]]
    await harness.complete()
    await done(harness)
    assert shown in caplog.text
    assert "secret" not in caplog.text


async def test_a_silent_target_ends_one_audit(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON, target_silence_s=0.05)
    harness.targets.first_scripts = [[round_of("ab", "length")], [asyncio.Event()]]
    await harness.complete()
    assert (await done(harness)).skipped == {Skip.ERROR: 1}
    assert harness.targets.aborts == ["cmpl-0~audit1"]


class Growing(Counter[Skip]):
    """The event loop adds a reason while another thread reads."""

    def __iter__(self) -> Iterator[Skip]:
        for skip in super().__iter__():
            self[Skip.BUSY] += 1
            yield skip

    def items(self) -> Any:
        return ((skip, self[skip]) for skip in self)


def test_counts_grow_while_they_are_read() -> None:
    snapshot = Snapshot(Role.GATEWAY)
    fill_audit(snapshot, {"toy": AuditCounts(skipped=Growing({Skip.FULL: 2}))})
    assert snapshot.get(audit_catalog.SKIPPED, "toy", "full") == 2


# ---------------------------------------------------------------------------------------- details


@pytest.mark.parametrize(("ratio", "share"), [(0.25, 0.25), (1.0, 1.0), (0.0, 0.0)])
async def test_the_coin(ratio: float, share: float, make_harness: Any) -> None:
    harness = make_harness(audit={"sample_ratio": ratio, "max_pending": 128})
    body = CompletionBody(model="toy", prompt="hi")
    (plan,) = await harness.service.plans(Endpoint.COMPLETIONS, body)
    audit, numbers = harness.service.audit, range(0, 2**64, 2**64 // 128)
    draws = iter(numbers)
    audit._random_seed = lambda: next(draws)
    sampled = [audit.begin(plan) is not None for _ in range(128)]
    assert sum(sampled) == share * 128


@pytest.mark.parametrize(
    ("sent", "plain", "at"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1], [1, 2], 1),
        ([1, 2], [1], 1),
        ([], [], None),
    ],
)
def test_first_difference(sent: list[int], plain: list[int], at: int | None) -> None:
    assert first_difference(sent, plain) == at


def test_nudges() -> None:
    base = SamplingParams(logit_bias=((5, 1.0),))
    nudged = nudge(base, 5, 0.5)
    assert nudged is not None
    assert nudged.logit_bias == ((5, 1.5),)
    assert nudge(SamplingParams(logit_bias=((5, 100.0),)), 5, 0.5) is None
    many = tuple((i, 1.0) for i in range(MAX_LOGIT_BIASES))
    assert nudge(SamplingParams(logit_bias=many), 5000, 0.5) is None


@pytest.mark.parametrize(("tolerance", "winner"), [(0.25, 12), (0.19, 10)])
def test_a_tie_of_three(tolerance: float, winner: int) -> None:
    """The client's, the last one, is 0.2 behind, and a third one lies between."""
    logits = [0.0] * 10 + [10.0, 9.99, 9.8]
    nudged = nudge(SamplingParams(temperature=0.0), 12, tolerance)
    assert nudged is not None
    raised = process_logits(logits, nudged, (1,), ())
    assert max(range(13), key=lambda i: raised[i]) == winner


async def test_what_cannot_be_asked_is_no_mismatch(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON)
    harness.targets.first_scripts = [[round_of("ab", "length")], [round_of("ax", "length")]]
    await harness.complete(logit_bias={"98": 100})
    counts = await done(harness)
    assert (counts.num_mismatches, counts.skipped) == (0, {Skip.UNDECIDED: 1})
    assert counts.num_requests == 0


async def test_undecided_choices_are_one_undecided_request(
    make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(audit=ON)
    harness.targets.first_scripts = [
        [round_of("ab", "length", choice=i) for i in range(3)],
        [round_of("ax", "length")],
        [round_of("ax", "length", choice=1)],
        [round_of("ab", "length", choice=2)],
    ]
    await harness.complete(logit_bias={"98": 100}, n=3)
    counts = await done(harness)
    assert (counts.num_requests, counts.skipped) == (0, {Skip.UNDECIDED: 1})
    assert len(reruns(harness)) == 3, "all choices are looked at"
