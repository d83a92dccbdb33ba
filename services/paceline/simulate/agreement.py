"""Does the simulator agree with `paceline bench orchestration`? Compares row by row.

For each row of the bench that both can run (no draft, ours, fixed K), the same setting is simulated
with what the bench has measured beside it: the round trip, and the time between two passes. A lone
sequence may be held for its draft in that time, so there the overhead is that of the same batch
without a draft. The lock-step schemes are not simulated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.simulate.config import SimulateConfig
from paceline.simulate.fleet import Fleet

NO_DRAFT = "no_draft"
OURS = re.compile(r"ours\w*|adaptive|fixed_(?P<k>\d+)")
TOLERANCE = 0.05
MAX_SETTINGS = 512
_NEEDED = ("scheme", "draft_ms", "verify_ms", "rtt_ms", "acceptance", "batch", "tokens_per_s")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One setting: what the bench measured and what the simulator says."""

    scheme: str
    rtt_ms: float
    acceptance: float
    batch: int
    bench_tokens_per_s: float
    simulated_tokens_per_s: float

    @property
    def difference(self) -> float:
        """Relative to the bench."""
        return self.simulated_tokens_per_s / self.bench_tokens_per_s - 1.0

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= TOLERANCE


def read_bench(path: Path) -> list[dict[str, Any]]:
    """The rows of the bench's JSON that can be simulated."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    rows = data.get("rows") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise ConfigError(f"{path} has no rows of `paceline bench orchestration`")
    usable = [row for row in rows if _is_usable(row)]
    if not usable:
        raise ConfigError(f"{path} has no row of {NO_DRAFT} or ours")
    return usable[:MAX_SETTINGS]


def _is_usable(row: Any) -> bool:
    if not isinstance(row, dict) or row.get("step") is not None:
        return False
    name = row.get("scheme")
    if not isinstance(name, str) or not (name == NO_DRAFT or OURS.fullmatch(name)):
        return False
    values = [row.get(name) for name in _NEEDED[1:]]
    if not all(isinstance(value, int | float) and value >= 0 for value in values):
        return False
    is_count = isinstance(row["batch"], int) and row["batch"] >= 1
    return is_count and row["tokens_per_s"] > 0 and row.get("acceptance", 0) <= 1


def setting(
    config: SimulateConfig, row: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> SimulateConfig:
    """`config` with one row's setting in it."""
    data = config.model_dump(exclude={"sweep", "find"})
    batch = int(row["batch"])
    target = data["hardware"]["targets"][config.fleet.target]
    target |= {"base_ms": row["verify_ms"], "max_num_seqs": batch, "max_rows_per_pass": 8192}
    draft = data["hardware"]["drafts"][config.fleet.draft]
    draft |= {"base_ms": row["draft_ms"], "max_sessions": batch, "max_rows_per_pass": 8192}
    _copy(row, "row_ms", target, "row_ms")
    _copy(row, "draft_row_ms", draft, "row_ms")
    gap_us = _gap_us(row, rows)
    if gap_us is not None:
        target["overhead_ms"] = gap_us / 1e3
    is_alone = row["scheme"] == NO_DRAFT
    data["fleet"] |= {"num_targets": 1, "num_drafts": 0 if is_alone else 1}
    data["has_controller"] = False  # the bench has none
    data["network"] = {"rtt_ms": row["rtt_ms"]}
    _copy(row, "measured_rtt_ms", data["network"], "rtt_ms")
    data["traffic"]["arrivals"] = {"process": "closed", "sessions_per_target": batch}
    item = data["traffic"]["classes"][0]
    item["acceptance"] = float(row["acceptance"])
    if isinstance(row.get("corrections"), list):
        item["runner_up"] = tuple(row["corrections"])
    _copy(row, "fan_out", data["speculation"], "max_fan_out")
    fixed = OURS.fullmatch(row["scheme"])
    if fixed and fixed["k"]:
        more = {"lookahead": "fixed", "num_speculative_tokens": int(fixed["k"])}
        data["speculation"] |= more
    return SimulateConfig.model_validate(data)


def _copy(row: dict[str, Any], name: str, to: dict[str, Any], key: str) -> None:
    if isinstance(row.get(name), int | float):
        to[key] = row[name]


def _gap_us(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """The overhead of a pass, microseconds; None: the bench does not say."""
    source = row
    if int(row["batch"]) == 1:
        alone = (r for r in rows if r["scheme"] == NO_DRAFT and int(r["batch"]) == 1)
        source = next(alone, {})
    gap_us = source.get("gap_us")
    return float(gap_us) if isinstance(gap_us, int | float) else None


def compare(
    config: SimulateConfig,
    rows: Sequence[dict[str, Any]],
    say: Callable[[str], None] = lambda what: None,
) -> Iterator[Comparison]:
    """Simulates each row's setting."""
    for number, row in enumerate(rows, 1):
        say(f"setting {number} of {len(rows)}")
        changed = setting(config, row, rows)
        metrics = Fleet(changed).run().metrics
        yield Comparison(
            str(row["scheme"]),
            float(row["rtt_ms"]),
            float(row["acceptance"]),
            int(row["batch"]),
            float(row["tokens_per_s"]),
            metrics.num_tokens / changed.duration_s,
        )
