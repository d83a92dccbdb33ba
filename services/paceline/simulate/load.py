"""The YAML file of `paceline simulate`, its runs, and the requests of a trace.

A wrong file is a `ConfigError` that names it and each wrong key.
"""

from __future__ import annotations

import csv
import itertools
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from paceline.errors import ConfigError
from paceline.simulate.config import MAX_RUNS, SimulateConfig

# Of PyYAML's own, and what its constructors raise for values that do not fit their tags.
YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError)
TRACE_COLUMNS = ("time_s", "prompt_tokens", "output_tokens", "class")
MAX_TRACE_REQUESTS = 5_000_000
UNSWEEPABLE = ("sweep", "find", "has_baseline")


@dataclass(frozen=True, slots=True)
class Run:
    """One combination of a sweep: the varied keys and the whole configuration."""

    varied: dict[str, Any]
    config: SimulateConfig


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace file."""

    time_s: float
    prompt_tokens: int
    output_tokens: int
    class_name: str


def load(path: Path) -> tuple[SimulateConfig, list[Run]]:
    """The file itself and its runs, one where nothing is swept."""
    data = _read_yaml(path)
    config = _validated(path, data, {})
    combinations = _combinations(path, config)
    return config, [Run(varied, _validated(path, data, varied)) for varied in combinations]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except YAML_ERRORS as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping with hardware, fleet and traffic")
    return data


def _validated(path: Path, data: dict[str, Any], varied: dict[str, Any]) -> SimulateConfig:
    where = f"{path} with {varied}" if varied else str(path)
    changed = deepcopy(data)
    for key, value in varied.items():
        _set(changed, key, value, where)
    try:
        return SimulateConfig.model_validate(changed)
    except ValidationError as error:
        raise ConfigError(f"{where}: {'; '.join(_problems(error))}") from error


def _problems(error: ValidationError) -> list[str]:
    problems = []
    for item in error.errors():
        key = ".".join(map(str, item["loc"]))
        said = item["msg"].removeprefix("Value error, ")
        unknown = item["type"] == "extra_forbidden"
        problems.append(f"unknown key {key}" if unknown else f"{key}: {said}" if key else said)
    return problems


def _set(data: dict[str, Any], dotted: str, value: Any, where: str) -> None:
    """Numbers in `dotted` are places in a list."""
    *parents, last = dotted.split(".")
    node: Any = data
    for part in parents:
        if isinstance(node, dict):
            node = node.setdefault(part, {})
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            raise ConfigError(f"{where}: sweep: there is no {dotted}")
    if isinstance(node, list) and last.isdecimal() and int(last) < len(node):
        node[int(last)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"{where}: sweep: there is no {dotted}")


def _combinations(path: Path, config: SimulateConfig) -> list[dict[str, Any]]:
    sweep = config.sweep
    for key, values in sweep.items():
        if key.split(".")[0] in UNSWEEPABLE:
            raise ConfigError(f"{path}: sweep: {key} cannot be varied")
        if not values:
            raise ConfigError(f"{path}: sweep: {key} has no values")
    num_runs = 1
    for values in sweep.values():
        num_runs *= len(values)
    if num_runs > MAX_RUNS:
        raise ConfigError(f"{path}: sweep: {num_runs} combinations; at most {MAX_RUNS}")
    return [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]


def read_trace(path: Path, classes: set[str]) -> list[TraceRow]:
    """Requests in order of time."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return _trace_rows(path, csv.reader(file), classes)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} is not CSV: {error}") from error


def _trace_rows(path: Path, lines: Any, classes: set[str]) -> list[TraceRow]:
    rows: list[TraceRow] = []
    header = tuple(next(lines, ()))
    if header != TRACE_COLUMNS:
        raise ConfigError(f"the trace {path} must begin with the line {','.join(TRACE_COLUMNS)}")
    for number, cells in enumerate(lines, 2):
        if len(rows) == MAX_TRACE_REQUESTS:
            raise ConfigError(f"the trace {path} has more than {MAX_TRACE_REQUESTS} requests")
        try:
            time_s, prompt, output, name = cells
            row = TraceRow(float(time_s), int(prompt), int(output), name)
        except ValueError as error:
            raise ConfigError(f"the trace {path}, line {number}: {error}") from error
        if not (0 <= row.time_s < 1e7 and row.prompt_tokens >= 1 and row.output_tokens >= 1):
            raise ConfigError(
                f"the trace {path}, line {number}: time >= 0 and lengths >= 1, please"
            )
        if name not in classes:
            raise ConfigError(f"the trace {path}, line {number}: there is no class {name!r}")
        rows.append(row)
    if not rows:
        raise ConfigError(f"the trace {path} has no requests")
    return sorted(rows, key=lambda row: row.time_s)
