"""What goes into Ray's instruments: differences of counters, values of the rest."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray.util.metrics

from paceline.metrics import target_catalog as catalog
from paceline.metrics.buckets import Buckets
from paceline.metrics.metric import Role
from paceline.metrics.snapshot import Snapshot
from paceline.ray_metrics import EXPORT_INTERVAL_S, LOG_INTERVAL_S, RayExporter

BASE = {"model_name": "toy", "replica": "t"}


class Instrument:
    """One of Ray's, as far as it is used."""

    made: list[Instrument]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.name, self.description, self.tag_keys = name, description, tag_keys
        self.calls: list[tuple[float, dict[str, str]]] = []
        Instrument.made.append(self)

    def _write(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self.tag_keys
        assert all(isinstance(tag, str) for tag in tags.values())
        self.calls.append((value, tags))


class Counter(Instrument):
    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses it"
        self._write(value, tags)


class Gauge(Instrument):
    def set(self, value: float, tags: dict[str, str]) -> None:
        self._write(value, tags)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    Instrument.made = []
    monkeypatch.setattr(ray.util.metrics, "Counter", Counter)
    monkeypatch.setattr(ray.util.metrics, "Gauge", Gauge)
    return Instrument.made


def snapshot(rounds: float, running: float) -> Snapshot:
    made = Snapshot(Role.TARGET)
    made.put(catalog.ROUNDS, rounds)
    made.put(catalog.RUNNING, running)
    return made


def test_counters_grow_and_gauges_are_set(made: list[Any]) -> None:
    exporter = RayExporter(BASE)
    for rounds, running in ((0, 2), (5, 2), (5, 3), (9, 0)):
        exporter.export(snapshot(rounds, running))
    counter, gauge = made
    assert (counter.name, gauge.name) == ("paceline_rounds_total", "paceline_num_requests_running")
    assert [value for value, _ in counter.calls] == [5, 4]
    assert [value for value, _ in gauge.calls] == [2, 2, 3, 0], "Ray forgets one that is not set"
    assert counter.calls[0][1] == BASE
    assert counter.description == catalog.ROUNDS.help_text


def test_no_more_often_than_is_of_use(made: list[Any]) -> None:
    exporter = RayExporter(BASE)
    for now_s in (10.0, 10.0 + EXPORT_INTERVAL_S / 2, 10.0 + EXPORT_INTERVAL_S):
        exporter.offer(lambda: snapshot(now_s, 1), now_s)  # noqa: B023 - called at once
    counter, _ = made
    assert [value for value, _ in counter.calls] == [10.0, EXPORT_INTERVAL_S]


def test_a_histogram_is_series_that_promql_reads(made: list[Any]) -> None:
    buckets = Buckets(catalog.QUEUE_S_BUCKETS)
    buckets.observe(0.002)
    buckets.observe(99.0)
    taken = Snapshot(Role.TARGET)
    taken.put(catalog.QUEUE_TIME, buckets)
    RayExporter(BASE).export(taken)
    bucket, total, count = made
    name = "paceline_request_queue_time_seconds"
    assert [each.name for each in made] == [f"{name}_{end}" for end in ("bucket", "sum", "count")]
    found = {tags["le"]: value for value, tags in bucket.calls}
    assert (found["0.001"], found["0.005"], found["60.0"], found["+Inf"]) == (0, 1, 1, 2)
    assert (total.calls[0][0], count.calls[0][0]) == (99.002, 2)


async def test_it_goes_on_where_ray_does_not_take_it(made: list[Any]) -> None:
    """A failed export is logged; the task and its owner live on."""
    exporter = RayExporter(BASE)
    was_taken = asyncio.Event()

    def take() -> Snapshot:
        was_taken.set()
        raise ConnectionError("no agent")

    async with exporter.running(take):
        await was_taken.wait()
    assert made == []


def test_an_offer_never_fails(made: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """A heartbeat comes behind it. What is wrong is said once a minute."""
    exporter = RayExporter(BASE)

    def take() -> Snapshot:
        raise ConnectionError("no agent")

    steps = int(2 * LOG_INTERVAL_S / EXPORT_INTERVAL_S)
    for step in range(steps):
        exporter.offer(take, 10.0 + step * EXPORT_INTERVAL_S)
    assert [r.message for r in caplog.records] == ["Ray did not take the metrics"] * 2
    exporter.offer(lambda: snapshot(1, 1), 10.0 + steps * EXPORT_INTERVAL_S)
    assert len(made) == 2, "and it goes on"
