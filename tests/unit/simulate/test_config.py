"""The file of `paceline simulate`: strict, described, and wrong in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from paceline.errors import ConfigError
from paceline.simulate.config import MAX_RUNS, SimulateConfig
from paceline.simulate.load import load, read_trace
from tests.unit.simulate.settings import raw

EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "deploy" / "simulate").glob("*.yaml"))


def written(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def changed(dotted: str, value: Any) -> dict[str, Any]:
    data: Any = raw()
    *parents, last = dotted.split(".")
    node = data
    for part in parents:
        node = node[int(part)] if part.isdecimal() else node.setdefault(part, {})
    node[last] = value
    result: dict[str, Any] = data
    return result


def models_in(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    if model in seen:
        return
    seen.add(model)
    yield model
    for field in model.model_fields.values():
        kinds: list[Any] = [field.annotation]
        while kinds:
            kind = kinds.pop()
            kinds += get_args(kind)
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from models_in(kind, seen)


def test_every_field_is_described() -> None:
    found = list(models_in(SimulateConfig, set()))
    assert len(found) > 10
    for model in found:
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load(path: Path) -> None:
    config, runs = load(path)
    assert runs
    assert all(run.config.hardware == config.hardware for run in runs)


def test_there_are_examples() -> None:
    assert {path.name for path in EXAMPLES} >= {"fleet.yaml", "large.yaml", "orchestration.yaml"}


@pytest.mark.parametrize(
    ("dotted", "value", "said"),
    [
        ("fleet.num_target", 1, "unknown key fleet.num_target"),
        ("fleet.target", "other", "hardware.targets has no 'other'"),
        ("fleet.draft", "other", "hardware.drafts has no 'other'"),
        ("fleet.num_targets", 2001, "fleet.num_targets"),
        ("fleet.num_targets", 0, "fleet.num_targets"),
        ("hardware.targets.large.max_num_seqs", 4097, "max_num_seqs"),
        ("hardware.targets.large.kv_tokens", 1024, "kv_tokens of twice that"),
        ("hardware.drafts.small.max_sessions", 0, "max_sessions"),
        ("traffic.arrivals", {"process": "closed"}, "sessions_per_target or sessions"),
        ("traffic.arrivals", {"process": "poisson"}, "requests_per_s > 0"),
        ("traffic.arrivals", {"process": "trace"}, "the name of a file"),
        ("traffic.classes.0.share", 0.5, "add up to 1"),
        ("traffic.classes.0.acceptance", 1.5, "[0, 1]"),
        ("traffic.classes.0.acceptance", [], "1 to 64 values"),
        ("traffic.classes.0.runner_up", [0.7, 0.5], "cumulative"),
        ("network.zones", [{"name": "a", "target_share": 1, "draft_share": 1}], "1 rows of 1"),
        ("speculation.mode", "block", "only greedy and coupled"),
        ("speculation.method", "suffix", "method suffix is not simulated"),
        ("speculation.max_fan_out", 5, "max_fan_out"),
        ("duration_s", 3601, "duration_s"),
        ("sweep", {"fleet.num_drafts": []}, "fleet.num_drafts has no values"),
        ("sweep", {"find.goal": ["cost"]}, "cannot be varied"),
        ("sweep", {"traffic.classes.7.share": [1]}, "there is no traffic.classes.7.share"),
        ("sweep", {"fleet.nothing": [1]}, "unknown key fleet.nothing"),
        ("sweep", {"seed": list(range(MAX_RUNS + 1))}, f"at most {MAX_RUNS}"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, dotted: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, changed(dotted, value)))
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_too_many_places(tmp_path: Path) -> None:
    data = raw(num_targets=2000, batch=1024)
    with pytest.raises(ConfigError, match="num_targets x max_num_seqs is 2048000"):
        load(written(tmp_path, data))


def test_stairs_must_rise(tmp_path: Path) -> None:
    stairs = [{"rows": 8, "ms": 10}, {"rows": 8, "ms": 11}]
    data = changed("hardware.targets.large.staircase", stairs)
    with pytest.raises(ConfigError, match="must rise"):
        load(written(tmp_path, data))


def test_no_file_no_yaml_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "none.yaml")
    path = tmp_path / "bad.yaml"
    path.write_text("a: [", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(path)
    path.write_text("- 1", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected a mapping"):
        load(path)


def test_a_sweep_is_all_combinations(tmp_path: Path) -> None:
    sweep = {"fleet.num_drafts": [0, 1], "traffic.classes.0.acceptance": [0.5, 0.9]}
    _, runs = load(written(tmp_path, raw(sweep=sweep)))
    seen = [(run.config.fleet.num_drafts, run.config.traffic.classes[0].acceptance) for run in runs]
    assert seen == [(0, 0.5), (0, 0.9), (1, 0.5), (1, 0.9)]
    assert runs[1].varied == {"fleet.num_drafts": 0, "traffic.classes.0.acceptance": 0.9}


def trace(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


HEAD = "time_s,prompt_tokens,output_tokens,class"


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    rows = read_trace(trace(tmp_path, HEAD, "2.5,10,20,chat", "1,30,40,code"), {"chat", "code"})
    assert [(row.time_s, row.prompt_tokens, row.class_name) for row in rows] == [
        (1.0, 30, "code"),
        (2.5, 10, "chat"),
    ]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((HEAD,), "has no requests"),
        (("a,b",), "must begin with the line"),
        ((HEAD, "1,2,3"), "line 2"),
        ((HEAD, "1,x,3,chat"), "line 2"),
        ((HEAD, "1,2,3,chat", "-1,2,3,chat"), "line 3"),
        ((HEAD, "1,2,3,other"), "there is no class 'other'"),
    ],
)
def test_a_wrong_trace(tmp_path: Path, lines: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(trace(tmp_path, *lines), {"chat"})
    assert said in str(caught.value)
