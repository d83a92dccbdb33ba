"""The Serve application: Gateway -> TargetReplica <- DraftReplica, all known to the Controller.

`build_app` is the import path of every Serve YAML. Serve turns the YAML's `args` into an
`AppConfig` only while the annotation below is a class, so this module must not use
`from __future__ import annotations`. The options here are defaults: the YAML's `deployments:`
block overrides them. Every further served model has a target, draft and controller deployment of
its own, whose names end in the model's.
"""

from ray import serve
from ray.serve import Application

from paceline.config import AppConfig, LoggingConfig, Pool
from paceline.config.names import CONTROLLER, DRAFTS, GATEWAY, TARGETS
from paceline.controller.deployment import Controller
from paceline.draft.deployment import DraftReplica
from paceline.gateway.deployment import Gateway, PoolHandles
from paceline.target.deployment import TargetReplica

# A replica whose pass loop died must be noticed in seconds, not in Serve's default 30.
_HEALTH = {"health_check_period_s": 2, "health_check_timeout_s": 10}
# What a draft may take to end once it has drained; Serve kills what takes longer.
_DRAFT_STOP_S = 10


def build_app(config: AppConfig) -> Application:
    """The whole service. Draft replicas only where the pool has them (`draft.deploy`)."""
    gateway = serve.deployment(
        name=GATEWAY,
        max_ongoing_requests=1024,
        logging_config=_serve_logging(config.logging),
        **_HEALTH,
    )(Gateway)
    pools = [_bind_pool(pool) for pool in config.pools]
    return gateway.bind(config.gateway, pools, config.tracing, config.audit, config.logging)


def _bind_pool(pool: Pool) -> PoolHandles:
    """One served model's deployments."""
    config = pool.config
    logging_config = _serve_logging(config.logging)
    controller = serve.deployment(
        name=f"{CONTROLLER}{pool.suffix}",
        max_ongoing_requests=1000,
        logging_config=logging_config,
    )(Controller).bind(config.controller, pool.name, config.logging)
    target = serve.deployment(
        name=f"{TARGETS}{pool.suffix}",
        max_ongoing_requests=1024,
        graceful_shutdown_timeout_s=30,
        logging_config=logging_config,
        **_HEALTH,
    )(TargetReplica).bind(config, controller)
    draft = None
    if pool.offer.has_drafts:
        draft = serve.deployment(
            name=f"{DRAFTS}{pool.suffix}",
            graceful_shutdown_timeout_s=config.draft.drain_timeout_s + _DRAFT_STOP_S,
            logging_config=logging_config,
            **_HEALTH,
        )(DraftReplica).bind(config, controller)
    return PoolHandles(
        config.gateway,
        config.target,
        target,
        controller,
        draft,
        config.speculation,
        pool.offer,
    )


def _serve_logging(config: LoggingConfig) -> dict[str, str] | None:
    """For what Serve writes into a replica's file before the replica is there to say how."""
    return {"encoding": "JSON"} if config.format == "json" else None
