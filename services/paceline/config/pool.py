"""A further served model: `models.NAME`, beside the top-level `target`, `draft`, `speculation`.

What holds for one pool is checked here for all of them, under the path that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from paceline.config.gateway import GatewayConfig
from paceline.config.names import TARGETS, deployment_suffix
from paceline.config.offered import check_method, has_drafts
from paceline.config.replicas import DraftConfig, TargetConfig
from paceline.config.rpc import RpcConfig
from paceline.config.section import Section
from paceline.config.speculation import SpeculationConfig

if TYPE_CHECKING:
    from paceline.config import AppConfig

# An OpenSession carries a sequence's whole text: no token id needs more bytes than this on the
# wire, and the rest of the message (1024 logit biases are most of it) fits into the slack.
TOKEN_ID_BYTES = 5
MESSAGE_SLACK_BYTES = 16 << 10


class PoolConfig(Section):
    """Targets and drafts of one more served model; replicas of its own."""

    target: TargetConfig = Field(default_factory=TargetConfig, description="target replicas")
    draft: DraftConfig = Field(default_factory=DraftConfig, description="draft replicas")
    speculation: SpeculationConfig = Field(
        default_factory=SpeculationConfig, description="proposers and lookahead"
    )
    chat_template: str | None = Field(
        None, description="as gateway.chat_template, which is the first model's"
    )
    tool_call_format: Literal["auto", "hermes", "llama3_json"] = Field(
        "auto", description="as gateway.tool_call_format, which is the first model's"
    )
    reasoning_format: Literal["auto", "think", "none"] = Field(
        "auto", description="as gateway.reasoning_format, which is the first model's"
    )


def pool_path(model: str) -> str:
    """Where a further pool's settings are, up to the dot before `target`."""
    return f"models.{model}."


def check_pool(
    where: str, pool: PoolConfig | AppConfig, gateway: GatewayConfig, rpc: RpcConfig
) -> None:
    """Raises ValueError for settings of a pool that contradict what all pools share."""
    target, draft = pool.target, pool.draft
    check_method(where, target, draft, pool.speculation)
    if gateway.target_silence_s <= 2 * target.alive_interval_s:
        raise ValueError(f"gateway.target_silence_s must be > 2 * {where}target.alive_interval_s")
    # One pass queues at most a verdict and an open or close per sequence.
    if rpc.max_outbox_messages < 2 * target.max_num_seqs:
        raise ValueError(f"rpc.max_outbox_messages must be >= 2 * {where}target.max_num_seqs")
    if not has_drafts(draft, pool.speculation):
        return
    lengths = {
        f"{where}target.model.max_model_len": target.model.max_model_len,
        f"{where}draft.model.max_model_len": draft.model.max_model_len,
    }
    name, longest = max(lengths.items(), key=lambda item: item[1])
    if rpc.max_tokens_per_item < longest:
        raise ValueError(
            f"rpc.max_tokens_per_item must be >= {name} ({longest}): the longest text "
            "goes to a draft in one message"
        )
    num_bytes = TOKEN_ID_BYTES * longest + MESSAGE_SLACK_BYTES
    if rpc.max_message_bytes < num_bytes:
        raise ValueError(
            f"rpc.max_message_bytes must be >= {num_bytes} for {name} ({longest}): the "
            "longest text goes to a draft in one message"
        )


def check_names(first: str, target: TargetConfig, models: Mapping[str, PoolConfig]) -> None:
    """Raises ValueError where two served models, or their deployments, have one name."""
    seen: dict[str, str] = {}
    for path, name in _served_names(first, target, models):
        if name in seen:
            raise ValueError(
                f"{seen[name]} and {path} both serve the name {name!r}: every model and adapter "
                "needs a name of its own"
            )
        seen[name] = path
    suffixes: dict[str, str] = {}
    for name in models:
        suffix = deployment_suffix(name)
        if suffix in suffixes:
            raise ValueError(
                f"models: {suffixes[suffix]!r} and {name!r} would both have the deployment "
                f"{TARGETS}{suffix}: rename one"
            )
        suffixes[suffix] = name


def _served_names(
    first: str, target: TargetConfig, models: Mapping[str, PoolConfig]
) -> Iterator[tuple[str, str]]:
    """(the path that gives it, the name)."""
    yield "gateway.served_model_name", first
    yield from (("target.adapters", name) for name in target.adapters)
    for model, pool in models.items():
        yield "models", model
        for name in pool.target.adapters:
            yield f"{pool_path(model)}target.adapters", name
