"""What counts as grown, and against what."""

from __future__ import annotations

import pytest

from chaos.samples import ProcessSample, Sample, _role
from chaos.soak_report import baselines, judge, table


def process(role: str = "Gateway", pid: int = 1, **fields: object) -> ProcessSample:
    values: dict[str, object] = {
        "role": role,
        "pid": pid,
        "started": 1,
        "rss_mb": 100.0,
        "num_fds": 50,
        "num_threads": 20,
        "num_tasks": 10,
        "sizes": {"num_in_progress": 0},
    }
    return ProcessSample(**{**values, **fields})  # type: ignore[arg-type]


def sample(at_s: float, *processes: ProcessSample) -> Sample:
    return Sample(at_s, {process.key: process for process in processes})


BASELINE = sample(300, process())


def problems(after: ProcessSample) -> list[str]:
    return judge(BASELINE, sample(3600, after), [], 300)


def test_the_same_and_a_little_more_are_fine() -> None:
    assert problems(process()) == []
    assert problems(process(rss_mb=104.9, num_fds=55, num_tasks=12)) == []


@pytest.mark.parametrize(
    ("grown", "problem"),
    [
        ({"rss_mb": 105.1}, "Gateway 1: RSS grew from 100.0 to 105.1 MB"),
        ({"num_fds": 70}, "Gateway 1: num_fds grew from 50 to 70"),
        ({"num_tasks": 30}, "Gateway 1: num_tasks grew from 10 to 30"),
        ({"num_threads": 40}, "Gateway 1: num_threads grew from 20 to 40"),
        ({"sizes": {"num_in_progress": 1}}, "Gateway 1 still holds {'num_in_progress': 1}"),
    ],
)
def test_what_grew_is_named(grown: dict[str, object], problem: str) -> None:
    assert problems(process(**grown)) == [problem]


def test_rays_own_processes_are_shown_and_not_judged() -> None:
    before, after = process("raylet", rss_mb=100.0), process("raylet", rss_mb=200.0)
    first, last = sample(300, before), sample(3600, after)
    assert judge(first, last, [], 300) == []
    assert "raylet 1" in table(first, last, [], 300)
    assert "+100.0%" in table(first, last, [], 300)


def test_a_replacement_is_compared_with_itself_after_its_own_warm_up() -> None:
    new = [process(pid=2, rss_mb=mb) for mb in (60.0, 100.0, 104.0)]
    between = [sample(t, p) for t, p in zip((1000, 1300, 1330), new, strict=True)]
    end = sample(3600, process(pid=2, rss_mb=120.0))
    ((before, at_s),) = baselines(BASELINE, end, between, 300).values()
    assert (before.rss_mb, at_s) == (100.0, 1300)
    assert judge(BASELINE, end, between, 300) == ["Gateway 2: RSS grew from 100.0 to 120.0 MB"]
    assert baselines(BASELINE, end, between[:1], 300) == {}  # too young


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("ray::ServeReplica:paceline:TargetReplica", "TargetReplica"),
        ("ray::ServeReplica:paceline:DraftReplica.handle_request", "DraftReplica"),
        ("ray::ServeController.listen_for_change", "ServeController"),
        ("ray::ProxyActor", "ProxyActor"),
        ("/usr/lib/raylet/gcs_server --log_dir=/tmp", "gcs_server"),
        ("/usr/bin/python -m chaos.proxy 1", "chaos.proxy"),
    ],
)
def test_roles(command: str, role: str) -> None:
    assert _role(command) == role
