"""The one configuration tree, every Serve YAML that we ship, and the README's table."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from paceline.cli import config_table, servefile
from paceline.config import AppConfig
from paceline.gateway import field_table

ROOT = Path(__file__).resolve().parents[2]
SERVE_FILES = sorted((ROOT / "deploy" / "serve").glob("*.yaml"))
TABLE_BEGIN, TABLE_END = "<!-- config-table -->\n", "<!-- /config-table -->\n"
CORES = 2


def models_in(model: type[BaseModel]) -> list[type[BaseModel]]:
    kinds = [field.annotation for field in model.model_fields.values()]
    kinds += [inner for kind in kinds for inner in get_args(kind)]
    below = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
    return [model, *(inner for kind in below for inner in models_in(kind))]


def test_there_are_serve_files() -> None:
    assert [path.name for path in SERVE_FILES] == [
        "autoscale.yaml",
        "ngram.yaml",
        "smollm2-tp3.yaml",
        "smollm2.yaml",
        "toy.yaml",
        "two-models.yaml",
    ]


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.name)
def test_serve_file_is_valid_and_has_no_unknown_key(path: Path) -> None:
    file = servefile.load(path)
    assert len(file.apps) == 1
    assert file.schema.http_options.host == "127.0.0.1"


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.name)
def test_serve_file_fits_on_two_cores(path: Path) -> None:
    (application,) = yaml.safe_load(path.read_text())["applications"]
    deployments = application["deployments"]
    (app,) = servefile.load(path).apps
    assert [d["name"] for d in deployments] == list(app.deployments)
    most = {d["name"]: d.get("autoscaling_config", {}).get("max_replicas") for d in deployments}
    cpus = sum(
        (most[d["name"]] or d["num_replicas"]) * d["ray_actor_options"]["num_cpus"]
        for d in deployments
    )
    assert cpus <= CORES


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.name)
def test_serve_admits_more_than_our_own_limits(path: Path) -> None:
    """Else Serve would queue without a word where we answer 429."""
    file = servefile.load(path)
    (application,) = yaml.safe_load(path.read_text())["applications"]
    limit = {d["name"]: d["max_ongoing_requests"] for d in application["deployments"]}
    (app,) = file.apps
    assert limit["Gateway"] > app.gateway.max_concurrent_requests
    for pool in app.pools:
        target = pool.config.target
        num_admitted = target.max_num_seqs + target.max_queued_seqs
        assert limit[f"TargetReplica{pool.suffix}"] > num_admitted


def test_every_field_says_what_it_means() -> None:
    silent = [
        f"{model.__name__}.{name}"
        for model in models_in(AppConfig)
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert silent == []


def test_every_section_is_frozen_and_refuses_unknown_keys() -> None:
    for model in models_in(AppConfig):
        assert model.model_config["frozen"] is True
        assert model.model_config["extra"] == "forbid"


def test_the_defaults_run_the_toy_model() -> None:
    config = AppConfig()
    assert (config.target.model.source, config.draft.model.source) == ("toy", "toy")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"target": {"port_min": 6000, "port_max": 5999}}, "port_max must be >= target.port_min"),
        ({"target": {"max_num_seqs": 64, "max_rows_per_pass": 32}}, "must be >= target.max_num"),
        ({"speculation": {"num_speculative_tokens": 8, "max_draft_ahead": 4}}, "max_draft_ahead"),
        ({"rpc": {"redial_min_s": 6.0}}, "rpc.redial_max_s must be >= rpc.redial_min_s"),
        ({"rpc": {"peer_timeout_s": 0.5}}, "rpc.peer_timeout_s must be > rpc.ping_interval_s"),
        (
            {"controller": {"heartbeat_interval_s": 5.0}},
            "heartbeat_timeout_s must be > controller.heartbeat_interval_s",
        ),
        (
            {"rpc": {"max_tokens_per_item": 2047}},
            r"max_tokens_per_item must be >= target.model.max_model_len \(2048\)",
        ),
        (
            {"rpc": {"max_tokens_per_item": 4095}, "draft": {"model": {"max_model_len": 4096}}},
            r"max_tokens_per_item must be >= draft.model.max_model_len \(4096\)",
        ),
        (
            {"target": {"model": {"max_model_len": 835_585}}},
            "max_message_bytes must be >= 4194309 for target.model.max_model_len",
        ),
        (
            {"draft": {"model": {"max_model_len": 20_000}}, "rpc": {"max_message_bytes": 65536}},
            "max_message_bytes must be >= 116384 for draft.model.max_model_len",
        ),
        ({"gateway": {"body_timeout_s": float("inf")}}, "finite number"),
        ({"rpc": {"peer_timeout_s": float("nan")}}, "finite number"),
        ({"target": {"model": {"toy_step_ms": float("inf")}}}, "finite number"),
        ({"target": {"max_num_seqs": True}}, "no values here"),
        ({"rpc": {"hello_timeout_s": True}}, "no values here"),
        ({"speculation": {"method": False}}, "quote a word"),  # YAML's `off`
        ({"target": {"model": {"device": "gpu"}}}, "'gpu' is no device: write auto, cpu, cuda"),
        ({"target": {"model": {"device": "cuda:"}}}, "'cuda:' is no device"),
        ({"draft": {"model": {"device": "cuda:-1"}}}, "'cuda:-1' is no device"),
        ({"draft": {"model": {"device": "CPU"}}}, "'CPU' is no device"),
        ({"targets": {}}, "Extra inputs are not permitted"),
        ({"speculation": {"method": "magic"}}, "'hybrid', 'auto' or 'off'"),
    ],
)
def test_contradictions_are_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AppConfig.model_validate(data)


@pytest.mark.parametrize(
    "data",
    [
        {"target": {"model": {"max_model_len": 835_584}}},
        {"target": {"model": {"num_kv_blocks": 2, "block_size": 1}}},
        {"rpc": {"redial_min_s": 5, "redial_max_s": 5.0}},
        *({"draft": {"model": {"device": d}}} for d in ("auto", "cpu", "cuda", "cuda:1", "mps")),
    ],
)
def test_what_only_looks_odd_is_accepted(data: dict[str, object]) -> None:
    AppConfig.model_validate(data)


def test_readme_has_the_table_of_the_schema() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split(TABLE_BEGIN)[1].split(TABLE_END)[0]
    assert table == config_table.markdown_table(), "run `paceline config-table` and paste it"


def test_readme_has_the_table_of_request_fields() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("<!-- api-table -->\n")[1].split("<!-- /api-table -->\n")[0]
    assert table == field_table.markdown_table(), "run `paceline api-table` and paste it"


def test_serve_can_see_the_class_of_the_builders_argument() -> None:
    """With postponed annotations Serve would hand `build_app` a plain dict, silently."""
    source = (ROOT / "services" / "paceline" / "app.py").read_text(encoding="utf-8")
    futures = [
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        for alias in node.names
    ]
    assert "annotations" not in futures
    from paceline.app import build_app

    (parameter,) = inspect.signature(build_app).parameters.values()
    assert parameter.annotation is AppConfig


HASH = "ab" * 32


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ([{"name": "a", "sha256": "sk-paceline-abc"}], "never the key itself"),
        ([{"name": "a", "sha256": HASH.upper()}], "not a SHA-256"),
        ("alice", "a list of {name"),
        (["alice"], "a list of {name"),
        ([{"name": "a", "sha256": HASH}, {"name": "b", "sha256": HASH}], "the same sha256: abab"),
        ([{"name": "a", "sha256": HASH}, {"name": "a", "sha256": "cd" * 32}], "same name: a"),
    ],
)
def test_api_keys_that_will_not_do_say_the_fix(keys: object, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        AppConfig.model_validate({"gateway": {"api_keys": keys}})
