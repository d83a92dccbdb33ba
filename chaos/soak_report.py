"""What a soak's samples say: lines, a table, and what has grown. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from chaos.checks import Findings
from chaos.samples import COUNTED, ProcessSample, Sample

MAX_RSS_GROWTH = 0.05
# Connections to replacements and calls in flight come and go; a leak does not stop at these.
SLACK = {"num_fds": 12, "num_threads": 6, "num_tasks": 6}


def sample_line(sample: Sample, found: Findings, fired: Counter[str], cpu: float) -> str:
    """One line every half minute."""
    ours = [p for p in sample.processes.values() if p.is_ours]
    sizes: Counter[str] = Counter()
    for process in ours:
        sizes.update(process.sizes)
    return (
        f"{sample.at_s:6.0f} s  rss {sum(p.rss_mb for p in ours):7.1f} MB of {len(ours)}, "
        f"fds {sum(p.num_fds for p in ours)}, tasks {sum(p.num_tasks or 0 for p in ours)}, "
        f"blocks {sizes['num_engine_blocks_used']}, sessions {sizes['num_sessions']}, "
        f"waiting {sizes['num_waiting']}; {found.requests} requests, {found.failed} failed, "
        f"{len(found.differing)} differ; {fired.total()} faults; client {cpu:.0%} of a core"
    )


def baselines(
    baseline: Sample, end: Sample, between: Sequence[Sample], warm_up_s: float
) -> dict[str, tuple[ProcessSample, float]]:
    """For each process of the end: what to compare with, and when that was.

    Who was there at the baseline has that one; a replacement has its own, after a warm-up of the
    same length. Who is younger than that has none.
    """
    found: dict[str, tuple[ProcessSample, float]] = {}
    for key in end.processes:
        if key in baseline.processes:
            found[key] = (baseline.processes[key], baseline.at_s)
            continue
        seen = [sample for sample in between if key in sample.processes]
        warm = [sample for sample in seen if sample.at_s >= seen[0].at_s + warm_up_s]
        if warm:
            found[key] = (warm[0].processes[key], warm[0].at_s)
    return found


def table(baseline: Sample, end: Sample, between: Sequence[Sample], warm_up_s: float) -> str:
    """Baseline and end of every process that both have."""
    rows = [
        f"{'process':34}{'since':>8}{'RSS MB':>18}{'growth':>8}{'fds':>12}{'threads':>12}"
        f"{'tasks':>12}  left over"
    ]
    compared = baselines(baseline, end, between, warm_up_s)
    ordered = sorted(compared, key=lambda key: (not end.processes[key].is_ours, key))
    for key in ordered:
        before, at_s = compared[key]
        after = end.processes[key]
        left = {name: size for name, size in after.sizes.items() if size}
        rows.append(
            f"{f'{after.role} {after.pid}':34.34}{at_s:6.0f} s"
            f"{f'{before.rss_mb:.1f} -> {after.rss_mb:.1f}':>18}"
            f"{_growth(before, after):>+8.1%}"
            + "".join(f"{_pair(before, after, name):>12}" for name in COUNTED)
            + f"  {left or '-'}"
        )
    return "\n".join(rows)


def _pair(before: ProcessSample, after: ProcessSample, name: str) -> str:
    first, second = getattr(before, name), getattr(after, name)
    return "-" if second is None else f"{first} -> {second}"


def _growth(before: ProcessSample, after: ProcessSample) -> float:
    return after.rss_mb / before.rss_mb - 1 if before.rss_mb else 0.0


def judge(baseline: Sample, end: Sample, between: Sequence[Sample], warm_up_s: float) -> list[str]:
    """What our own processes have kept. Ray's are shown, not judged."""
    problems = []
    for key, (before, _) in baselines(baseline, end, between, warm_up_s).items():
        after = end.processes[key]
        if not after.is_ours:
            continue
        name = f"{after.role} {after.pid}"
        if _growth(before, after) > MAX_RSS_GROWTH:
            problems.append(f"{name}: RSS grew from {before.rss_mb} to {after.rss_mb} MB")
        for count in COUNTED:
            first, second = getattr(before, count), getattr(after, count)
            if first is not None and second is not None and second > first + SLACK[count]:
                problems.append(f"{name}: {count} grew from {first} to {second}")
    for after in end.processes.values():
        left = {name: size for name, size in after.sizes.items() if size}
        if left:
            problems.append(f"{after.role} {after.pid} still holds {left}")
    return problems
