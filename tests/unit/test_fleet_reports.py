"""Reports and guidance as plain data: nothing lost on the way, everything bounded, nonsense
refused with a sentence."""

import pickle
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.fleet_reports import (
    MAX_BREAKERS,
    MAX_CHOICES,
    MAX_CLASSES,
    MAX_CONNECTED,
    MAX_INPUTS,
    MAX_NAME_CHARS,
    MAX_POSITIONS,
    MAX_SENTENCE_CHARS,
    Ceilings,
    DraftReport,
    ReportError,
    TargetReport,
    guidance,
    plain_guidance,
    read_guidance,
)
from paceline.metrics import draft_catalog, target_catalog
from paceline.metrics.metric import Role
from paceline.metrics.snapshot import Snapshot
from paceline.protocol.lookahead import (
    AcceptanceClass,
    Choice,
    ClassCounts,
    Explanation,
    Guidance,
)
from paceline.sampling.params import VerificationMode


def snapshot(role, metric):
    taken = Snapshot(role)
    taken.put(metric, 7)
    return taken


KIND = AcceptanceClass("toy", VerificationMode.COUPLED, 0.75)
COUNTS = {KIND: ClassCounts((9.5, 4.0), (4.0, 1.0))}
TARGET = TargetReport(
    "t", "boot", "host:1", 7, 3, 2, 1, True, 2.5, 3.5, 16, 12, 2, 10.0, 4.0, 5, COUNTS,
    Ceilings(6, None, 4),
    Explanation({"rtt_us": 500.0, "gain": -0.5}, (Choice(2.0, 6, 2.5, 25e3),), 0, "it pays"),
    "unknown key x", 25.5, 0.5, 0.75, 31.5, 0.625, 2.5, 1.25, "drafting", {"d": "dark"},
    snapshot(Role.TARGET, target_catalog.ROUNDS), {"ngram": 0.25, "model": 0.75},
)  # fmt: skip
DRAFT = DraftReport(
    "d", "boot", 7, 128, 3, ("host:1", "host:2"), True, 0.5, 99, 3.25, 2.5, 12.5,
    snapshot(Role.DRAFT, draft_catalog.TOKENS),
)  # fmt: skip


def travelled(plain):
    """As Ray does it."""
    return pickle.loads(pickle.dumps(plain))  # noqa: S301


def test_nothing_is_lost_on_the_way():
    assert TargetReport.read(travelled(TARGET.plain())) == TARGET
    assert DraftReport.read(travelled(DRAFT.plain())) == DRAFT
    plain = plain_guidance(COUNTS, Ceilings(6, 1, 4))
    assert read_guidance(travelled(plain)) == (COUNTS, Ceilings(6, 1, 4))


def test_names_of_another_release():
    """A newer replica says more than we know, an older one less."""
    more = {**TARGET.plain(), "num_unicorns": 3}
    more["class_counts"] = [*more["class_counts"], {**more["class_counts"][0], "mode": "psychic"}]
    assert TargetReport.read(more) == TARGET
    least = {"replica_id": "t", "boot_id": "b", "address": "a", "pid": 1}
    assert TargetReport.read(least) == TargetReport("t", "b", "a", 1)
    assert DraftReport.read({"replica_id": "d", "boot_id": "b", "pid": 1}).busy_share is None
    assert read_guidance({}) == ({}, Ceilings())


def test_the_policy_hears_all_of_it():
    word = guidance(COUNTS, Ceilings(6, 1, 4))
    assert word == Guidance(COUNTS, max_draft_ahead=6, max_fan_out=1, max_num_speculative_tokens=4)


def test_long_lists_are_cut():
    kinds = [AcceptanceClass("toy", VerificationMode.GREEDY, n) for n in range(MAX_CLASSES + 5)]
    long = (1.0,) * (MAX_POSITIONS + 5)
    many = {kind: ClassCounts((1.0 + kind.temperature, *long), (0.0, *long)) for kind in kinds}
    plain = TargetReport("t", "b", "a", 1, class_counts=many).plain()
    assert len(plain["class_counts"]) == MAX_CLASSES, "by an honest replica"
    once = plain["class_counts"][0]
    plain["class_counts"] = [
        {**once, "temperature": n, "reached": long, "accepted": long}
        for n in range(MAX_CLASSES + 5)
    ]
    read = TargetReport.read(plain).class_counts
    assert len(read) == MAX_CLASSES
    assert {len(each.reached) for each in read.values()} == {MAX_POSITIONS}


def test_the_heaviest_classes_are_kept():
    light = AcceptanceClass("a", VerificationMode.GREEDY, 0.0)
    many = {light: ClassCounts((0.5,), (0.5,))}
    for number in range(MAX_CLASSES):
        many[AcceptanceClass("b", VerificationMode.GREEDY, number)] = ClassCounts((1.0,), (1.0,))
    assert (
        light
        not in TargetReport.read(
            TargetReport("t", "b", "a", 1, class_counts=many).plain()
        ).class_counts
    )


def test_an_explanation_is_bounded():
    huge = Explanation(
        {f"{'x' * 300}{n}": 1.0 for n in range(MAX_INPUTS + 9)},
        (Choice(1.0, 1, 1.0, float("inf")),) * (MAX_CHOICES + 9),
        0,
        "y" * (MAX_SENTENCE_CHARS + 9),
    )
    plain = TargetReport("t", "b", "a", 1, explanation=huge).plain()
    plain["explanation"]["choices"] *= 2
    read = TargetReport.read(plain).explanation
    assert read is not None
    assert len(read.inputs) <= MAX_INPUTS
    assert max(map(len, read.inputs)) <= MAX_NAME_CHARS
    assert (len(read.choices), len(read.reason)) == (MAX_CHOICES, MAX_SENTENCE_CHARS)


def test_a_draft_of_too_many_streams():
    many = tuple(f"host:{n}" for n in range(MAX_CONNECTED + 1))
    report = DraftReport.read({**DRAFT.plain(), "connected": many})
    assert report.connected == many[:MAX_CONNECTED]


def test_breakers_are_bounded():
    many = {f"d{n}": "closed" for n in range(MAX_BREAKERS + 1)}
    report = TargetReport.read({**TARGET.plain(), "breakers": many})
    assert len(report.breakers) == MAX_BREAKERS


def test_metrics_of_another_release_are_left_out_and_the_report_is_taken():
    metrics = {**TARGET.plain()["metrics"], "paceline_unicorns_total": [[[], 3]], "x": "y"}
    assert TargetReport.read({**TARGET.plain(), "metrics": metrics}) == TARGET
    assert TargetReport.read({**TARGET.plain(), "metrics": None}).num_running == 3


def test_sources_of_another_release_are_left_out():
    plain = TARGET.plain()
    report = TargetReport.read({**plain, "sources": {"oracle": 0.5, "suffix": 0.5}})
    assert report.sources == {"suffix": 0.5}
    del plain["sources"]
    assert TargetReport.read(plain).sources == {}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sources": 3}, "sources"),
        ({"sources": {"ngram": "x"}}, "sources"),
        ({"breakers": 3}, "breakers"),
        ({"breakers": {"d": 3}}, "breakers"),
        ({"busy_share": "x"}, "busy_share"),
        ({"replica_id": ""}, "replica_id"),
        ({"replica_id": "x" * (MAX_NAME_CHARS + 1)}, "replica_id"),
        ({"address": 7}, "address"),
        ({"num_running": -1}, "num_running"),
        ({"num_running": "many"}, "num_running"),
        ({"num_running": True}, "num_running"),
        ({"wanted": float("nan")}, "wanted"),
        ({"missing": float("inf")}, "missing"),
        ({"class_counts": "no list"}, "class_counts"),
        ({"class_counts": [7]}, "names and values"),
        ({"class_counts": [{"draft_model": "d", "mode": "greedy", "reached": [1.0]}]}, "length"),
        ({"ceilings": {"max_fan_out": -1}}, "max_fan_out"),
        ({"explanation": {"choices": [{"rows": None}]}}, "rows"),
    ],
)
def test_nonsense_is_refused_by_name(fields, said):
    with pytest.raises(ReportError, match=said):
        TargetReport.read({**TARGET.plain(), **fields})


JUNK = st.one_of(
    st.sampled_from([None, True, -1, 10**30, 0.5, float("nan"), "", "x" * 999]),
    st.lists(st.sampled_from([None, 3, "a", [], {}]), max_size=2),
    st.dictionaries(st.sampled_from(["mode", "choices", "inputs", "rows"]), st.none(), max_size=2),
)
FIELDS = sorted(TARGET.plain().keys() | DRAFT.plain().keys())


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=3))
def test_whatever_comes_is_read_or_refused(fields):
    """And nothing else is raised; what was read can be sent on."""
    for kind, good in ((TargetReport, TARGET), (DraftReport, DRAFT)):
        with suppress(ReportError):
            report = kind.read({**good.plain(), **fields})
            assert kind.read(report.plain()) == report


@given(JUNK)
def test_whatever_is_no_report_is_refused(junk):
    for read in (TargetReport.read, DraftReport.read):
        with pytest.raises(ReportError):
            read(junk)
