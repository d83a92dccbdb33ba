"""Snapshots on their way from a replica to the page: nothing is lost, and nonsense does no harm."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.metrics import target_catalog as catalog
from paceline.metrics.buckets import Buckets
from paceline.metrics.catalog import OF_ROLE
from paceline.metrics.exposition import Exposition
from paceline.metrics.metric import Role
from paceline.metrics.snapshot import MAX_LABEL_CHARS, MAX_SERIES, Snapshot, read_snapshot

KNOWN = OF_ROLE[Role.TARGET]
BASE = {"model_name": "toy", "replica": "t"}


def a_snapshot() -> Snapshot:
    snapshot = Snapshot(Role.TARGET)
    snapshot.put(catalog.ROUNDS, 7)
    snapshot.put(catalog.RTT, 0.25, "draft-1")
    snapshot.put_each(catalog.ENDED, {"aborted": 2})
    snapshot.put_state(catalog.BREAKER_STATE, "dark", "draft-1")
    chosen = Buckets(catalog.K_BUCKETS)
    for value in (0, 1, 1, 7, 33, 500):
        chosen.observe(value)
    snapshot.put(catalog.K_CHOSEN, chosen)
    return snapshot


def test_the_plain_form_says_the_same() -> None:
    snapshot = a_snapshot()
    plain = json.loads(json.dumps(snapshot.plain()))
    assert read_snapshot(plain, Role.TARGET, KNOWN) == snapshot


def test_the_page() -> None:
    page = Exposition()
    page.add(a_snapshot(), BASE)
    page.add(a_snapshot(), BASE | {"replica": 'quo"te\\ and\nline'})
    families = {f.name: f for f in text_string_to_metric_families(page.render().decode())}
    (first, second) = families["paceline_rounds"].samples
    assert (first.labels, first.value) == (BASE, 7)
    assert second.labels["replica"] == 'quo"te\\ and\nline'
    ended = {s.labels["reason"]: s.value for s in families["paceline_sequences_ended"].samples}
    assert ended == {"finished": 0, "aborted": 2, "failed": 0, "queue_timeout": 0}
    states = families["paceline_draft_breaker_state"].samples[:3]
    assert {s.labels["state"]: s.value for s in states} == {"closed": 0, "dark": 1, "probing": 0}
    histogram = families["paceline_round_num_speculative_tokens"]
    assert (histogram.type, families["paceline_rounds"].type) == ("histogram", "counter")
    values = {
        s.name.rpartition("_")[2] + s.labels.get("le", ""): s.value
        for s in histogram.samples
        if s.labels["replica"] == "t"
    }
    assert (values["bucket0.0"], values["bucket1.0"], values["bucket6.0"]) == (1, 3, 3)
    assert (values["bucket8.0"], values["bucket32.0"], values["bucket+Inf"]) == (4, 4, 6)
    assert (values["sum"], values["count"]) == (542, 6)
    assert families["paceline_rounds"].documentation.startswith("Passes of a sequence")


def test_a_label_too_many_or_of_another_role_is_our_bug() -> None:
    with pytest.raises(ValueError, match="rounds"):
        Snapshot(Role.TARGET).put(catalog.ROUNDS, 1, "more")
    with pytest.raises(ValueError, match="rounds"):
        Snapshot(Role.DRAFT).put(catalog.ROUNDS, 1)


@pytest.mark.parametrize(
    "data",
    [
        None, 3, "x", [], {1: 2}, {"paceline_rounds_total": None},
        {"paceline_rounds_total": [[], [1], [[], "x"], [[], True], [["more"], 1], [3, 1]]},
        {"paceline_rounds_total": [[[], -1], [[], math.nan], [[], math.inf], [[], 1e30]]},
        {"paceline_draft_link_rtt_seconds": [[["x" * (MAX_LABEL_CHARS + 1)], 1.0], [[7], 1.0]]},
        {"paceline_round_num_speculative_tokens": [[[], 1], [[], [1, 2]], [[], ["x"] * 15]]},
        {"paceline_of_another_release_total": [[[], 1]]},
    ],
)  # fmt: skip
def test_nonsense_is_left_out(data: Any) -> None:
    assert read_snapshot(data, Role.TARGET, KNOWN) == Snapshot(Role.TARGET)


def test_what_is_good_beside_nonsense_is_taken() -> None:
    data = {"paceline_rounds_total": [[["?"], 1], [[], 7]], "other": 1}
    assert list(read_snapshot(data, Role.TARGET, KNOWN)) == [(catalog.ROUNDS, (), 7.0)]


def test_series_are_bounded() -> None:
    rows = [[[f"draft-{number}"], 1.0] for number in range(MAX_SERIES + 9)]
    data = {"paceline_draft_link_rtt_seconds": rows}
    assert len(list(read_snapshot(data, Role.TARGET, KNOWN))) == MAX_SERIES


def test_a_bound_is_in_its_own_bucket() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (1.0, 1.1, 2.0, 2.1):
        buckets.observe(value)
    assert buckets.value == (pytest.approx(6.2), 1, 2, 1)
