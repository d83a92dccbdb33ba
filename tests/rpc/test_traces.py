"""One trace per request over gateway, target and draft, as a real OTLP receiver gets it."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from paceline.engine.base import EngineBroken, StepItem, StepResult
from paceline.engine.toy import ToyEngine
from paceline.protocol.messages import OpenSession, Verdict
from paceline.round_times import Stage, partition, segments
from tests.rpc import fleet
from tests.rpc.traced import DRAFT_SPANS, INFO, Receiver, Seen, intervals, receiver, traced_fleet

CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MS = 1_000_000
SERVER, INTERNAL = 2, 1
# A draft that is slow and often wrong, and a target that waits for it.
WAITING = {"step_ms": 25.0, "draft_ms": 2.0, "error_rate": 0.3, "waits": True}


def rounds_of(collector: Receiver, session: Seen) -> list[Seen]:
    found = [span for span in collector.children(session) if span.name == "round"]
    return sorted(found, key=lambda span: span.begin)


def stages(collector: Receiver, one: Seen) -> dict[str, int]:
    """The partition of a round, from its children's spans."""
    times = partition(one.begin, one.end, intervals(collector.children(one)))
    return times._asdict()


async def one_traced(
    headers: dict[str, str] | None = None,
    tracing: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Receiver, Any, Any]:
    """A request's trace, its answer, and the fleet that made it."""
    with receiver() as collector:
        settings = {"sample_ratio": 1.0, "otlp_endpoint": collector.address} | (tracing or {})
        async with traced_fleet(settings, **kwargs) as made:
            answer = await made.complete(headers=headers)
            made.learn_rtt()
        assert made.close() == 0
    return collector, answer, made


async def test_parent_links_are_complete_over_all_three() -> None:
    headers = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}
    collector, answer, _ = await one_traced(headers, **WAITING)
    assert answer.headers["x-paceline-trace-id"] == CLIENT_TRACE
    request, session = collector.only("text_completion toy"), collector.only("session")
    assert (request.parent_id, request.kind) == (CLIENT_SPAN, SERVER)
    assert (session.parent_id, session.kind) == (request.span_id, INTERNAL)
    rounds = collector.named("round")
    assert rounds == rounds_of(collector, session)
    assert {span.service for span in rounds} == {"paceline-target"}
    ids = {span.span_id for span in rounds}
    children = [span for span in collector.spans if span.name in {s.span_name for s in Stage}]
    assert {span.name for span in children} == {stage.span_name for stage in Stage}
    assert all(span.parent_id in ids for span in children)
    for span in children:
        is_draft = span.name in DRAFT_SPANS
        assert span.service == ("paceline-draft" if is_draft else "paceline-target")
    own = [span for span in collector.spans if span.name != "engine.pass"]
    assert {span.trace_id for span in own} == {CLIENT_TRACE}
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)
    assert {span.name for span in own} == {
        "text_completion toy", "session", "round", *(stage.span_name for stage in Stage)
    }  # fmt: skip


async def test_a_draft_works_for_the_round_that_it_knows_to_be_open() -> None:
    collector, _, _ = await one_traced(**WAITING)
    rounds = {span.span_id: span for span in collector.named("round")}
    for name in DRAFT_SPANS:
        assert len({span.parent_id for span in collector.named(name)}) > 3, name
    for span in collector.named(*DRAFT_SPANS):
        # Two clocks meet here, each known to within a round trip of a ping.
        assert span.begin > rounds[span.parent_id].begin - 5 * MS


async def test_spans_do_not_wait_for_their_requests_end() -> None:
    with receiver() as collector:
        settings = {"sample_ratio": 1.0, "otlp_endpoint": collector.address}
        async with traced_fleet(settings) as made:
            wanted = fleet.request("r", max_tokens=60)
            wanted = replace(wanted, traceparent=f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01")
            async with aclosing(fleet.rounds(made.target, wanted)) as deltas:
                async for delta in deltas:
                    if delta.round == 6:
                        break
                tracer = made.tracers[1]
                assert tracer is not None
                assert tracer.num_emitted > 20
        assert made.close() == 0


async def test_rounds_follow_each_other_and_make_up_the_request() -> None:
    shares = []
    with receiver() as collector:
        settings = {"sample_ratio": 1.0, "otlp_endpoint": collector.address}
        async with traced_fleet(settings, step_ms=25.0) as made:
            for _ in range(3):
                await made.complete()
        assert made.close() == 0
    requests, sessions = collector.named("text_completion toy"), collector.named("session")
    for request, session in zip(requests, sessions, strict=True):
        rounds = rounds_of(collector, session)
        assert len(rounds) > 2
        assert rounds[0].begin == session.begin
        assert rounds[-1].end == session.end
        assert all(a.end == b.begin for a, b in pairwise(rounds))
        assert request.begin <= session.begin < session.end <= request.end
        # What is before the first round is the gateway's, and counts as its queue.
        total = sum(span.end - span.begin for span in rounds) + rounds[0].begin - request.begin
        shares.append(total / (request.end - request.begin))
    assert max(shares) >= 0.95  # once: a busy machine may take its time to answer
    assert sum(len(rounds_of(collector, one)) for one in sessions) == len(made.targets.deltas)


async def test_children_add_up_to_each_round() -> None:
    """No instant of a round but is in some child's span; what the target computed is the same."""
    collector, _, made = await one_traced(**WAITING)
    for one, delta in zip(collector.named("round"), made.targets.deltas, strict=True):
        wall = one.end - one.begin
        children = collector.children(one)
        named = [span for span in children if span.name == "window"]
        explained = sum(
            end - begin
            for stage, begin, end in segments(one.begin, one.end, intervals(children))
            if stage is not Stage.WINDOW
        )
        windows = sum(span.end - span.begin for span in named)
        # The draft's spans are where they are to within half a round trip, at both ends.
        assert abs(explained + windows - wall) < max(0.05 * wall, 1000 * made.rtt_us)
        times = stages(collector, one)
        assert sum(times.values()) == 2 * wall
        for name in ("queue", "verify", "sample", "wire_out"):
            assert times[name] / MS == pytest.approx(getattr(delta, f"{name}_ms"), abs=0.1), name
        assert delta.wall_ms == pytest.approx(wall / MS, abs=0.01)


async def test_a_drafts_time_is_seen_where_the_target_waits_for_it() -> None:
    """After a rejection the lone sequence's next pass is held until new proposals are there."""
    collector, _, made = await one_traced(**WAITING)
    held = [d for d in made.targets.deltas if d.draft_ms]
    assert held
    for name in ("rewind", "wire_back", "wire_out"):
        assert sum(getattr(delta, f"{name}_ms") for delta in held) > 0, name
    pairs = zip(collector.named("round"), made.targets.deltas, strict=True)
    seen = [stages(collector, one)["draft"] > 0 for one, delta in pairs if delta.draft_ms]
    assert sum(seen) > len(seen) / 2


async def test_what_the_spans_say() -> None:
    collector, answer, made = await one_traced()
    request, session = collector.only("text_completion toy"), collector.only("session")
    body = answer.json()
    assert (
        request.attributes.items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": "toy",
            "gen_ai.request.max_tokens": 24,
            "gen_ai.request.temperature": 1.0,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.seed": str(2**64 - 1),
            "gen_ai.usage.input_tokens": body["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": body["usage"]["completion_tokens"],
            "gen_ai.response.id": body["id"],
            "paceline.request_id": body["id"],
        }.items()
    )
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert (
        0
        < request.attributes["gen_ai.response.time_to_first_chunk"] * 1e9
        < (request.end - request.begin)
    )
    assert (
        session.attributes.items()
        >= {
            "gen_ai.request.max_tokens": 24,
            "paceline.choice": 0,
            "paceline.replica_id": "target-7",
            "paceline.mode": "coupled",
        }.items()
    )
    for one, delta in zip(collector.named("round"), made.targets.deltas, strict=True):
        told = one.attributes
        assert told["paceline.round"] == delta.round
        assert told["paceline.k"] == delta.num_speculative_tokens
        assert told["paceline.proposed"] == delta.num_draft_tokens
        assert told["paceline.accepted"] == delta.num_accepted_tokens
        assert told["paceline.num_tokens"] == len(delta.token_ids)
        assert told["paceline.draft_replica_id"] == "draft-9"
        assert told["paceline.batch_size"] == 1
        assert told["paceline.num_rows"] >= 1 + delta.num_draft_tokens
        assert (told["paceline.epoch"], told["paceline.replica_id"]) == (1, "target-7")
    assert collector.named("draft")[0].attributes["paceline.draft_replica_id"] == "draft-9"


async def test_a_pass_is_linked_with_the_rounds_in_it() -> None:
    collector, _, _ = await one_traced()
    passes = {span.span_id: span for span in collector.named("engine.pass")}
    verified = collector.named("verify")
    assert len(verified) == len(passes) > 0
    for verify in verified:
        ((trace_id, span_id),) = verify.links
        pass_ = passes[span_id]
        assert (pass_.trace_id, pass_.parent_id) == (trace_id, "")
        assert pass_.links == [(verify.trace_id, verify.parent_id)]
        assert pass_.begin == verify.begin <= verify.end <= pass_.end


async def test_a_draft_whose_clock_is_hours_ahead_is_put_in_its_place() -> None:
    collector, _, made = await one_traced(draft_clock_us=5 * 3600 * 10**6, step_ms=10.0)
    rounds = {span.span_id: span for span in collector.named("round")}
    drafted = collector.named("draft", "rewind", "wire_back")
    assert drafted
    for span in drafted:
        # It may have begun in the round before, and end in the next; an hour is not a few rounds.
        assert abs(span.begin - rounds[span.parent_id].begin) < 60_000 * MS
    for back in collector.named("wire_back"):
        assert rounds[back.parent_id].begin <= back.begin + 5 * MS
    assert sum(delta.wire_out_ms + delta.draft_ms for delta in made.targets.deltas) < 60_000
    assert collector.named("wire_out")


async def test_every_choice_is_a_session() -> None:
    with receiver() as collector:
        settings = {"sample_ratio": 1.0, "otlp_endpoint": collector.address}
        async with traced_fleet(settings) as made:
            answer = await made.complete(n=2, max_tokens=12)
        assert made.close() == 0
    sessions = collector.named("session")
    assert sorted(span.attributes["paceline.choice"] for span in sessions) == [0, 1]
    request = collector.only("text_completion toy")
    assert {span.parent_id for span in sessions} == {request.span_id}
    assert sum(len(rounds_of(collector, one)) for one in sessions) == len(made.targets.deltas)
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"] * 2
    assert len(answer.json()["choices"]) == 2
    batched = [span for span in collector.named("engine.pass") if len(span.links) == 2]
    assert batched
    assert all(span.attributes["paceline.batch_size"] == 2 for span in batched)


async def test_every_choice_of_every_prompt_is_a_session() -> None:
    with receiver() as collector:
        settings = {"sample_ratio": 1.0, "otlp_endpoint": collector.address}
        async with traced_fleet(settings) as made:
            await made.complete(prompt=["Once upon", "There was"], n=2, max_tokens=8)
        assert made.close() == 0
    sessions = collector.named("session")
    assert sorted(span.attributes["paceline.choice"] for span in sessions) == [0, 1, 2, 3]
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)
    assert {span.parent_id for span in sessions} == {collector.only("text_completion toy").span_id}
    assert sum(len(rounds_of(collector, one)) for one in sessions) == len(made.targets.deltas)


async def test_a_choice_that_is_ended_early_leaves_no_orphans() -> None:
    """The round that was open has a span, too: drafts have already told of it."""
    with receiver() as collector:
        settings = {"sample_ratio": 1.0, "otlp_endpoint": collector.address}
        async with traced_fleet(settings) as made:
            text = (await made.complete(max_tokens=40, temperature=0)).json()["choices"][0]["text"]
            await made.complete(max_tokens=40, temperature=0, stop=[text[6:9]])
        assert made.close() == 0
    ids = {span.span_id for span in collector.spans}
    for span in collector.spans:
        assert not span.parent_id or span.parent_id in ids, span
    assert [s.attributes.get("paceline.aborted") for s in collector.named("round")].count(True) == 1


async def test_what_is_not_sampled_has_no_spans_and_no_contexts() -> None:
    headers = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-00"}
    collector, answer, made = await one_traced(headers, {"sample_ratio": 0.0})
    assert collector.spans == []
    assert answer.headers["x-paceline-trace-id"] == CLIENT_TRACE
    told = [m for m in made.heard if isinstance(m, OpenSession | Verdict)]
    assert {type(m) for m in told} == {OpenSession, Verdict}
    assert {m.trace_context for m in told} == {b""}
    (request,) = made.targets.requests
    assert request.traceparent[:36] == f"00-{CLIENT_TRACE}-"
    assert request.traceparent[36:] not in (f"{CLIENT_SPAN}-00", f"{CLIENT_SPAN}-01")
    assert request.traceparent.endswith("-00")


async def test_the_clients_flag_is_honored() -> None:
    headers = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}
    collector, _, made = await one_traced(headers, {"sample_ratio": 0.0}, **WAITING)
    assert {span.service for span in collector.spans} == {
        "paceline-gateway", "paceline-target", "paceline-draft"
    }  # fmt: skip
    verdicts = [m for m in made.heard if isinstance(m, Verdict)]
    opens = {span.span_id: span.attributes["paceline.round"] for span in collector.named("round")}
    for verdict in verdicts:
        context = verdict.trace_context
        assert (context[:16].hex(), context[24]) == (CLIENT_TRACE, 1)
        assert opens[context[16:24].hex()] == verdict.round + 1
        assert verdict.sent_us > 0


async def test_a_slow_request_is_told_afterwards_by_the_target_alone() -> None:
    tracing = {"sample_ratio": 0.0, "slow_request_s": 0.001}
    collector, _, made = await one_traced(tracing=tracing, **WAITING)
    assert {m.trace_context for m in made.heard if isinstance(m, OpenSession | Verdict)} == {b""}
    assert {span.service for span in collector.spans} == {"paceline-gateway", "paceline-target"}
    rounds = rounds_of(collector, collector.only("session"))
    assert len(rounds) == len(made.targets.deltas)
    told = collector.named(*DRAFT_SPANS)
    assert {span.name for span in told} == DRAFT_SPANS
    assert all(span.attributes["paceline.reconstructed"] is True for span in told)
    parents = {span.span_id: span for span in rounds}
    for span in told:
        one = parents[span.parent_id]
        assert one.begin <= span.begin < span.end <= one.end
    for one, delta in zip(rounds, made.targets.deltas, strict=True):
        assert stages(collector, one)["draft"] / MS == pytest.approx(delta.draft_ms, abs=0.01)


class BreaksLater(ToyEngine):
    def step(self, items: list[StepItem]) -> list[StepResult]:  # type: ignore[override]
        if self._num_passes == 5:
            raise EngineBroken("planted")
        return super().step(items)


async def test_a_failed_request_is_told_afterwards() -> None:
    tracing = {"sample_ratio": 0.0, "slow_request_s": 600.0}
    collector, answer, _ = await one_traced(tracing=tracing, engine=BreaksLater(INFO))
    assert answer.status_code == 503
    request, sessions = collector.only("text_completion toy"), collector.named("session")
    assert request.is_error
    assert request.attributes["error.type"] in ("target_lost", "engine_broken")
    assert request.attributes["http.response.status_code"] == 503
    assert sessions[0].is_error
    assert sessions[0].attributes["error.type"] == "engine_broken"
    assert len(rounds_of(collector, sessions[0])) >= 3
    assert {span.parent_id for span in sessions} == {request.span_id}


async def test_nothing_is_told_of_failures_when_that_is_off() -> None:
    tracing = {"sample_ratio": 0.0, "slow_request_s": 0.0}
    collector, answer, _ = await one_traced(tracing=tracing, engine=BreaksLater(INFO))
    assert answer.status_code == 503
    assert collector.spans == []


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_collector_that_is_down_costs_spans_and_nothing_else(protocol: str) -> None:
    with receiver() as gone:
        pass
    settings = {
        "sample_ratio": 1.0,
        "otlp_endpoint": gone.address,
        "otlp_protocol": protocol,
        "max_queue_size": 64,
    }
    async with traced_fleet({}) as plain:
        wanted = (await plain.complete(max_tokens=60, temperature=0)).json()["choices"]
    async with traced_fleet(settings) as made:
        answers = [await made.complete(max_tokens=60, temperature=0) for _ in range(2)]
    assert [answer.json()["choices"] for answer in answers] == [wanted] * 2
    num_dropped = made.close()
    assert num_dropped > 0
    assert num_dropped <= sum(tracer.num_emitted for tracer in made.tracers if tracer)
