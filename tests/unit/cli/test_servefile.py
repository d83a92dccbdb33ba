"""A Serve YAML is checked whole before anything starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli import servefile
from paceline.errors import ConfigError

GOOD: dict[str, Any] = {
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "applications": [
        {
            "name": "paceline",
            "import_path": "paceline.app:build_app",
            "args": {"target": {"model": {"source": "a"}}, "draft": {"model": {"source": "b"}}},
            "deployments": [{"name": "Gateway", "ray_actor_options": {"num_cpus": 0.1}}],
        }
    ],
}


def write(folder: Path, changes: dict[str, Any], application: dict[str, Any]) -> Path:
    data = {**GOOD, "applications": [{**GOOD["applications"][0], **application}], **changes}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def test_sources_and_the_served_name(tmp_path: Path) -> None:
    file = servefile.load(write(tmp_path, {}, {}))
    assert file.sources == ["a", "b"]
    assert file.served_model_name == "toy"


def test_the_same_model_twice_is_one_source(tmp_path: Path) -> None:
    assert servefile.load(write(tmp_path, {}, {"args": {}})).sources == ["toy"]


@pytest.mark.parametrize(
    ("changes", "application", "problem"),
    [
        ({"http_option": {}}, {}, "unknown key http_option (did you mean http_options?)"),
        ({"http_options": {"zzz": 1}}, {}, "unknown key http_options.zzz"),
        (
            {},
            {"deployments": [{"name": "Gateway", "max_ongoing_request": 3}]},
            "unknown key applications.0.deployments.0.max_ongoing_request "
            "(did you mean max_ongoing_requests?)",
        ),
        (
            {},
            {"deployments": [{"name": "Gateway", "ray_actor_options": {"num_cpu": 1}}]},
            "unknown key applications.0.deployments.0.ray_actor_options.num_cpu "
            "(did you mean num_cpus?)",
        ),
        (
            {},
            {"deployments": [{"name": "Gateway", "autoscaling_config": {"min_replica": 1}}]},
            "unknown key applications.0.deployments.0.autoscaling_config.min_replica "
            "(did you mean min_replicas?)",
        ),
        (
            {},
            {"args": {"target": {"modle": {}}}},
            "unknown key applications.0.args.target.modle",
        ),
        (
            {},
            {"args": {"speculation": {"num_speculative_tokens": 0}}},
            "applications.0.args.speculation.num_speculative_tokens: "
            "Input should be greater than or equal to 1",
        ),
        (
            {},
            {"import_path": "other:app"},
            "no application has import_path paceline.app:build_app",
        ),
    ],
)
def test_each_wrong_key_is_named(
    tmp_path: Path, changes: dict[str, Any], application: dict[str, Any], problem: str
) -> None:
    path = write(tmp_path, changes, application)
    with pytest.raises(ConfigError) as caught:
        servefile.load(path)
    assert str(caught.value) == f"{path}: {problem}"


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, {"zzz": 1}, {"args": {"yyy": 1}, "deployments": [{"nam": "x"}]})
    with pytest.raises(ConfigError) as caught:
        servefile.load(path)
    message = str(caught.value)
    assert "unknown key zzz" in message
    assert "unknown key applications.0.deployments.0.nam" in message


def test_free_form_keys_stay_free(tmp_path: Path) -> None:
    options = {"runtime_env": {"env_vars": {"ANYTHING": "1"}}}
    deployment = {"name": "Gateway", "ray_actor_options": options}
    servefile.load(write(tmp_path, {}, {"deployments": [deployment]}))


@pytest.mark.parametrize(
    ("name", "user_config", "message"),
    [
        ("Gateway", {"anything": 1}, "Gateway takes no user_config"),
        ("TargetReplica", {"anything": 1}, "unknown key applications.0.TargetReplica.user_config"),
        ("TargetReplica", {"max_draft_ahead": 1}, "num_speculative_tokens <="),
        ("Controller", {"targets_per_draft": 0}, "Controller.user_config.targets_per_draft: "),
    ],
)
def test_knobs_that_replicas_would_refuse(
    tmp_path: Path, name: str, user_config: dict[str, int], message: str
) -> None:
    file = write(tmp_path, {}, {"deployments": [{"name": name, "user_config": user_config}]})
    with pytest.raises(ConfigError, match=re.escape(message)):
        servefile.load(file)


def test_knobs_that_fit(tmp_path: Path) -> None:
    target = {"name": "TargetReplica", "user_config": {"num_speculative_tokens": 2}}
    servefile.load(write(tmp_path, {}, {"deployments": [target]}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not valid YAML"),
        ("a: !!timestamp x", "is not valid YAML"),
        ("a: 2026-13-01", "is not valid YAML"),
        ("- a", "is not a Serve config"),
        ("", "is not a Serve config"),
    ],
)
def test_what_is_no_serve_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        servefile.load(path)
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file"):
        servefile.load(tmp_path / "none.yaml")


def with_pools(folder: Path, *deployments: str, **models: Any) -> Path:
    named = [{"name": name} for name in deployments]
    args = {**GOOD["applications"][0]["args"], "models": models}
    return write(folder, {}, {"args": args, "deployments": named})


def sides(target: str, draft: str) -> dict[str, Any]:
    return {"target": {"model": {"source": target}}, "draft": {"model": {"source": draft}}}


def test_every_pool_counts(tmp_path: Path) -> None:
    more = {"two": {**sides("c", "b"), "speculation": {"method": "off"}}, "three": sides("a", "d")}
    path = with_pools(tmp_path, "TargetReplica-two", "Controller", "DraftReplica-three", **more)
    file = servefile.load(path)
    assert file.sources == ["a", "c", "b", "d"]
    assert file.served_model_name == "toy"
    assert file.served_model_names == ("toy", "two", "three")
    assert [pool.where for pool in file.pools] == ["", "models.two.", "models.three."]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("TargetReplica-tow", "(did you mean TargetReplica-two?)"),
        ("DraftReplica-two", "(there are no drafts where speculation.method is off: leave it out)"),
        ("Gateway-two", "(did you mean Gateway?)"),
        ("x", "(there are Gateway, TargetReplica, DraftReplica, Controller, TargetReplica-two, "),
    ],
)
def test_a_deployment_that_the_application_does_not_have(
    tmp_path: Path, name: str, said: str
) -> None:
    path = with_pools(tmp_path, name, two={"speculation": {"method": "off"}})
    problem = f"applications.0: no deployment is called {name} {said}"
    with pytest.raises(ConfigError, match=re.escape(problem)):
        servefile.load(path)


def test_a_pool_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path = with_pools(tmp_path, two={"speculation": {"num_speculative_tokens": 0}})
    with pytest.raises(ConfigError) as caught:
        servefile.load(path)
    assert str(caught.value) == (
        f"{path}: applications.0.args.models.two.speculation.num_speculative_tokens: "
        "Input should be greater than or equal to 1"
    )
