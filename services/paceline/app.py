"""The Serve application: Gateway -> TargetReplica <- DraftReplica, all known to the Controller.

`build_app` is the import path of every Serve YAML. Serve turns the YAML's `args` into an
`AppConfig` only while the annotation below is a class, so this module must not use
`from __future__ import annotations`. The options here are defaults: the YAML's `deployments:`
block overrides them.
"""

from ray import serve
from ray.serve import Application

from paceline.config import AppConfig
from paceline.controller.deployment import Controller
from paceline.draft.deployment import DraftReplica
from paceline.gateway.deployment import Gateway
from paceline.target.deployment import TargetReplica

# A replica whose pass loop died must be noticed in seconds, not in Serve's default 30.
_HEALTH = {"health_check_period_s": 2, "health_check_timeout_s": 10}
# What a draft may take to end once it has drained; Serve kills what takes longer.
_DRAFT_STOP_S = 10


def build_app(config: AppConfig) -> Application:
    """The whole service. With `speculation.method: off` no draft replica is deployed."""
    controller = serve.deployment(name="Controller", max_ongoing_requests=1000)(Controller).bind(
        config.controller
    )
    target = serve.deployment(
        name="TargetReplica",
        max_ongoing_requests=1024,
        graceful_shutdown_timeout_s=30,
        **_HEALTH,
    )(TargetReplica).bind(config, controller)
    bound = []
    if config.speculation.method != "off":
        # The gateway never calls it: it is bound so that Serve deploys it with the application.
        draft = serve.deployment(
            name="DraftReplica",
            graceful_shutdown_timeout_s=config.draft.drain_timeout_s + _DRAFT_STOP_S,
            **_HEALTH,
        )
        bound.append(draft(DraftReplica).bind(config, controller))
    gateway = serve.deployment(name="Gateway", max_ongoing_requests=1024, **_HEALTH)(Gateway)
    return gateway.bind(
        config.gateway,
        config.target.model.source,
        config.target.model.max_model_len,
        target,
        controller,
        *bound,
    )
