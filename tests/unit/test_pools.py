"""Several served models in one application: what may be configured, and what is deployed of it."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError
from ray.serve._private.build_app import build_app as built
from ray.serve.deployment import Deployment
from ray.serve.handle import DeploymentHandle

from paceline.app import build_app
from paceline.config import AppConfig, LoggingConfig, PoolConfig
from paceline.config.live import check_user_config

OFF = {"speculation": {"method": "off"}}


def app_of(**data: Any) -> AppConfig:
    return AppConfig.model_validate(data)


def lengths(**sides: int) -> dict[str, Any]:
    return {side: {"model": {"max_model_len": length}} for side, length in sides.items()}


def test_a_pool_has_the_sections_of_the_first_one() -> None:
    shared = PoolConfig.model_fields.keys() & AppConfig.model_fields.keys()
    assert shared == {"target", "draft", "speculation"}
    for name in shared:
        kinds = [model.model_fields[name].annotation for model in (AppConfig, PoolConfig)]
        assert kinds[0] is kinds[1]
    assert get_args(AppConfig.model_fields["models"].annotation) == (str, PoolConfig)


def test_each_pool_is_configured_as_if_it_were_alone() -> None:
    template = {"chat_template": "smollm2-tools", "tool_call_format": "hermes"}
    config = app_of(
        gateway={"served_model_name": "first", "max_n": 3},
        controller={"targets_per_draft": 5},
        models={
            "org/second": {**lengths(target=512), **template},
            "third": {**OFF, "target": {"adapters": {"french": "/f"}}},
        },
        target={"adapters": {"german": "/g", "dutch": "/d"}},
    )
    first, second, third = config.pools
    assert [pool.name for pool in config.pools] == ["first", "org/second", "third"]
    assert first.config == config.model_copy(update={"models": {}})
    for pool in config.pools:
        assert pool.config.gateway.served_model_name == pool.name
        assert (pool.config.gateway.max_n, pool.config.controller.targets_per_draft) == (3, 5)
        assert pool.config.models == {}
    assert second.config.target.model.max_model_len == 512
    assert second.config.gateway.chat_template == "smollm2-tools"
    assert second.config.gateway.tool_call_format == "hermes"
    assert third.config.speculation.method == "off"
    assert config.served_model_names == (
        "first", "german", "dutch", "org/second", "third", "french",
    )  # fmt: skip
    assert first.deployments == ("TargetReplica", "DraftReplica", "Controller")
    assert second.deployments == (
        "TargetReplica-org_second", "DraftReplica-org_second", "Controller-org_second",
    )  # fmt: skip
    assert third.deployments == ("TargetReplica-third", "Controller-third")
    assert config.deployments == (
        "Gateway", *first.deployments, *second.deployments, *third.deployments
    )  # fmt: skip


TWICE = "every model and adapter needs a name of its own"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"models": {"toy": {}}}, f"gateway.served_model_name and models .* 'toy': {TWICE}"),
        (
            {"target": {"adapters": {"toy": "/a"}}},
            f"gateway.served_model_name and target.adapters both serve the name 'toy': {TWICE}",
        ),
        (
            {"target": {"adapters": {"x": "/a"}}, "models": {"x": {}}},
            f"target.adapters and models both serve the name 'x': {TWICE}",
        ),
        (
            {"models": {"x": {}, "y": {"target": {"adapters": {"x": "/a"}}}}},
            f"models and models.y.target.adapters both serve the name 'x': {TWICE}",
        ),
        (
            {"models": {"a/b": {}, "a:b": {}}},
            "models: 'a/b' and 'a:b' would both have the deployment TargetReplica-a_b: rename one",
        ),
        ({"models": {"": {}}}, "'' is no model name: a letter or digit, then"),
        ({"models": {"a b": {}}}, "'a b' is no model name"),
        ({"models": {"a#b": {}}}, "'a#b' is no model name"),
        ({"models": {"a\n": {}}}, "is no model name"),
        ({"models": {"ä": {}}}, "is no model name"),
        ({"models": {"x" * 129: {}}}, "is no model name"),
        ({"target": {"adapters": {"../x": "/a"}}}, "'../x' is no model name"),
        ({"target": {"adapters": {"x": ""}}}, "x has no folder: name the one that PEFT saved"),
        ({"models": {"x": {"targets": {}}}}, "Extra inputs are not permitted"),
        ({"models": {"x": {"rpc": {}}}}, "Extra inputs are not permitted"),
        (
            {"models": {"x": {"target": {"alive_interval_s": 2.5}}}},
            r"target_silence_s must be > 2 \* models.x.target.alive_interval_s",
        ),
        (
            {"models": {"x": {"target": {"max_num_seqs": 4096, "max_rows_per_pass": 4096}}}},
            r"max_outbox_messages must be >= 2 \* models.x.target.max_num_seqs",
        ),
        (
            {"models": {"x": lengths(draft=4096)}, "rpc": {"max_tokens_per_item": 4095}},
            r"max_tokens_per_item must be >= models.x.draft.model.max_model_len \(4096\)",
        ),
        (
            {"models": {"x": lengths(target=20_000)}, "rpc": {"max_message_bytes": 65536}},
            "max_message_bytes must be >= 116384 for models.x.target.model.max_model_len",
        ),
    ],
)
def test_what_cannot_be_served_together(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AppConfig.model_validate(data)


@pytest.mark.parametrize("name", ["x" * 128, "0", "meta-llama/Llama-3.2-1B", "ft:a:b::c", "a+b@c"])
def test_names_that_will_do(name: str) -> None:
    config = app_of(models={name: {}})
    assert config.pools[1].name == name
    for deployment in config.pools[1].deployments:
        assert not set("/#: ") & set(deployment)


def test_models_and_adapters_are_bounded() -> None:
    """The limit itself is allowed; one more says the limit."""
    pools = {f"m{number}": {} for number in range(17)}
    folders = {f"a{number}": "/a" for number in range(65)}
    with pytest.raises(ValidationError, match="at most 16 items"):
        app_of(models=pools)
    with pytest.raises(ValidationError, match="at most 64 items"):
        app_of(target={"adapters": folders})
    del pools["m16"], folders["a64"]
    assert len(app_of(models=pools, target={"adapters": folders}).served_model_names) == 81


class TestKnobs:
    CONFIG = app_of(
        models={"a/b": {"speculation": {"num_speculative_tokens": 2}}, "plain": OFF},
    )

    def test_each_pool_is_checked_against_its_own(self) -> None:
        knobs = {"max_num_speculative_tokens": 3}
        check_user_config("TargetReplica-a_b", knobs, self.CONFIG)
        with pytest.raises(ValidationError, match="num_speculative_tokens <="):
            check_user_config("TargetReplica", knobs, self.CONFIG)
        check_user_config("Controller-plain", {"drafts_per_target": 2}, self.CONFIG)

    def test_what_has_no_drafts(self) -> None:
        with pytest.raises(ValueError, match=r"args.models.plain.speculation.method is off"):
            check_user_config("TargetReplica-plain", {"method": "model"}, self.CONFIG)

    @pytest.mark.parametrize("name", ["DraftReplica-a_b", "TargetReplica-c", "TargetReplicas"])
    def test_others_take_none(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} takes no user_config"):
            check_user_config(name, {}, self.CONFIG)


class TestApplication:
    CONFIG = app_of(
        gateway={"served_model_name": "first"},
        draft={"drain_timeout_s": 7},
        models={"org/second": {**lengths(target=512), **OFF}, "third": {"draft": {}}},
    )

    def deployments(self, **logging: str) -> dict[str, Deployment]:
        config = self.CONFIG.model_copy(update={"logging": LoggingConfig.model_validate(logging)})
        application = built(build_app(config), name="paceline")
        return {deployment.name: deployment for deployment in application.deployments}

    def test_every_pool_is_deployed_and_nothing_else(self) -> None:
        assert sorted(self.deployments()) == sorted(self.CONFIG.deployments)

    def test_replicas_know_their_own_pool_and_report_to_its_controller(self) -> None:
        deployments = self.deployments()
        for pool in self.CONFIG.pools:
            kinds = [name for name in pool.deployments if not name.startswith("Controller")]
            for name in kinds:
                config, controller = deployments[name].init_args
                assert config == pool.config
                assert controller.deployment_name == f"Controller{pool.suffix}"
        timeout_s = deployments["DraftReplica"]._deployment_config.graceful_shutdown_timeout_s
        assert timeout_s == 17

    def test_the_gateway_has_the_handles_of_all(self) -> None:
        config, pools, tracing, audit, logging = self.deployments()["Gateway"].init_args
        assert config == self.CONFIG.gateway
        assert (tracing, audit) == (self.CONFIG.tracing, self.CONFIG.audit)
        assert logging == self.CONFIG.logging
        for handles, pool in zip(pools, self.CONFIG.pools, strict=True):
            assert handles.gateway == pool.config.gateway
            assert handles.config == pool.config.target
            named = (handles.target, handles.draft, handles.controller)
            held = [handle.deployment_name for handle in named if handle is not None]
            assert tuple(held) == pool.deployments
            assert isinstance(handles.target, DeploymentHandle)

    def test_serve_writes_json_where_replicas_do(self) -> None:
        for name, deployment in self.deployments(format="json").items():
            assert deployment.logging_config["encoding"] == "JSON"
            given = deployment.init_args[0 if name.startswith(("Target", "Draft")) else -1]
            assert getattr(given, "logging", given).format == "json"
        assert [d for d in self.deployments().values() if d.logging_config is not None] == []
