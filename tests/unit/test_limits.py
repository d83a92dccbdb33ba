"""The table of every named limit and the test that hits it; nothing may grow without one.

Every field of the configuration is in LIMITS, with a test, or in NOT_A_LIMIT, with a word why.
Limits that are constants (nobody would want another value) are in CONSTANTS. A row whose field,
constant or test no longer exists fails, and so does a new field without a row.
"""

from __future__ import annotations

import ast
import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from paceline import models
from paceline.config import AppConfig, GatewayConfig, PoolConfig
from paceline.errors import ConfigError, RequestError
from paceline.gateway.chat import ChatBody
from paceline.gateway.openai import CompletionBody, GenerationBody
from paceline.gateway.plan import Planner
from paceline.gateway.tokenizer import ToyTokenizer
from tests.unit.bench.limits import BENCH_CONSTANTS
from tests.unit.cli.limits import CLI_CONSTANTS
from tests.unit.engine.medusa_limits import MEDUSA_CONSTANTS
from tests.unit.gateway.audit_limits import AUDIT_CONSTANTS, AUDIT_LIMITS, AUDIT_NO_LIMITS
from tests.unit.methods_limits import METHODS_LIMITS, METHODS_NOT_A_LIMIT
from tests.unit.metrics.limits import METRICS_CONSTANTS
from tests.unit.proposers.limits import PROPOSER_CONSTANTS, PROPOSER_LIMITS
from tests.unit.target.limits import TARGET_CONSTANTS
from tests.unit.tracing.limits import TRACING_CONSTANTS, TRACING_LIMITS, TRACING_NOT_A_LIMIT

TESTS = Path(__file__).resolve().parents[1]
HERE = "unit/test_limits.py"
GATEWAY, TARGET, RPC = "unit/gateway", "unit/target", "unit/rpc"
CONTROLLER, BENCH = "unit/controller", "unit/bench"
BRANCHES = "unit/protocol/test_draft_branches.py"

# field -> file under tests/ and the function in it. `model.*` stands for both models.
LIMITS: dict[str, str] = {
    **TRACING_LIMITS,
    **AUDIT_LIMITS,
    **PROPOSER_LIMITS,
    **METHODS_LIMITS,
    "gateway.max_body_bytes": f"{GATEWAY}/test_malformed.py::test_body_too_large",
    "gateway.max_header_bytes": f"{GATEWAY}/test_http_limits.py::test_header_limit_is_exact",
    "gateway.max_tokens": f"{GATEWAY}/test_http_limits.py::test_max_tokens_at_the_limit",
    "gateway.max_stop_strings": f"{HERE}::test_lists_of_a_body",
    "gateway.max_stop_chars": f"{HERE}::test_lists_of_a_body",
    "gateway.max_messages": f"{HERE}::test_lists_of_a_body",
    "gateway.max_stop_token_ids": f"{GATEWAY}/test_sampling_fields.py::test_limits",
    "gateway.max_logit_biases": f"{GATEWAY}/test_sampling_fields.py::test_limits",
    "gateway.max_logprobs": f"{GATEWAY}/test_sampling_fields.py::test_limits",
    "gateway.max_n": f"{GATEWAY}/test_sampling_fields.py::test_limits",
    "gateway.max_prompts": f"{GATEWAY}/test_prompts.py::test_limits",
    "gateway.max_retries": f"{GATEWAY}/test_retries.py::test_tries_end",
    "gateway.max_concurrent_requests": f"{GATEWAY}/test_lifetime.py::test_too_many_requests",
    "gateway.ready_timeout_s": f"{GATEWAY}/test_lifetime.py::test_ready_and_health",
    "gateway.body_timeout_s": GATEWAY + "/test_lifetime.py::"
    "test_bodies_that_never_come_take_no_place",
    "gateway.target_silence_s": GATEWAY + "/test_retries.py::"
    "test_a_target_without_a_sign_of_life_is_lost",
    "gateway.write_timeout_s": GATEWAY + "/test_connection.py::"
    "test_a_client_that_stops_reading_is_cut",
    "gateway.request_timeout_s": f"{GATEWAY}/test_lifetime.py::test_deadline",
    "gateway.api_keys": f"{HERE}::test_api_keys_are_bounded",
    "gateway.max_grammar_bytes": f"{GATEWAY}/test_tool_limits.py::test_as_large_a_grammar",
    "gateway.cors_allow_origins": f"{GATEWAY}/test_surface.py::test_origins_of_every_kind",
    "gateway.api_keys.max_concurrent_requests": (
        f"{GATEWAY}/test_auth.py::test_concurrency_of_one_key"
    ),
    "gateway.api_keys.max_requests_per_minute": (
        f"{GATEWAY}/test_auth.py::test_bucket_at_its_borders"
    ),
    "models": "unit/test_pools.py::test_models_and_adapters_are_bounded",
    "target.adapters": "unit/test_pools.py::test_models_and_adapters_are_bounded",
    "target.max_num_seqs": f"{TARGET}/test_scheduler.py::test_first_in_first_out",
    "target.max_queued_seqs": f"{TARGET}/test_scheduler.py::test_queue_overflow",
    "target.max_queue_s": f"{TARGET}/test_queue_time.py::test_in_order_and_only_the_overdue",
    "target.max_rows_per_pass": f"{TARGET}/test_scheduler_drafts.py::test_whatever_the_rows",
    "target.max_pass_s": (
        "unit/engine/test_worker_watch.py::test_a_pass_that_hangs_breaks_the_engine"
    ),
    "target.kv_watermark": f"{TARGET}/test_scheduler.py::test_watermark",
    "draft.max_sessions": "unit/protocol/test_draft_table.py::test_busy_when_full",
    "draft.max_rows_per_pass": "unit/protocol/test_draft_table.py::test_rows_are_bounded",
    "draft.session_idle_s": "unit/protocol/test_draft_table.py::test_silence",
    "draft.drain_timeout_s": "rpc/test_drain.py::test_it_leaves_at_the_latest_after_its_time",
    "speculation.max_num_speculative_tokens": (
        f"{TARGET}/test_scheduler_drafts.py::test_k_of_the_request"
    ),
    "speculation.max_fan_out": "unit/protocol/test_draft_branches.py::test_no_more_than_allowed",
    "speculation.max_draft_ahead": (
        f"{TARGET}/test_scheduler.py::test_credit_is_what_two_passes_could_use"
    ),
    "speculation.max_lone_wait_ms": f"{TARGET}/test_lone_hold.py::test_the_cap",
    "rpc.max_message_bytes": f"{RPC}/test_codec.py::test_oversize_is_refused_before_parsing",
    "rpc.max_items_per_message": f"{RPC}/test_codec.py::test_list_lengths_are_checked",
    "rpc.max_tokens_per_item": f"{RPC}/test_codec.py::test_too_many_tokens_are_refused",
    "rpc.max_streams": (
        "rpc/test_handshake.py::test_max_streams_is_enforced_and_a_place_is_given_back"
    ),
    "rpc.max_outbox_messages": f"{RPC}/test_stream.py::test_outbox_overflow_ends_the_stream",
    "rpc.hello_timeout_s": f"{RPC}/test_stream.py::test_no_handshake_in_time",
    "rpc.open_timeout_s": f"{TARGET}/test_draft_desk.py::test_time_is_configured",
    "rpc.stall_timeout_s": (
        f"{TARGET}/test_draft_desk_rules.py::test_taken_away_and_opened_elsewhere"
    ),
    "rpc.max_reopens": f"{TARGET}/test_draft_desk_rules.py::test_bounded",
    "rpc.breaker_failures": f"{TARGET}/test_breaker.py::test_failures_in_a_row",
    "rpc.breaker_max_s": f"{TARGET}/test_breaker.py::test_doubles_up_to_a_limit",
    "rpc.peer_timeout_s": f"{RPC}/test_stream.py::test_silence_is_a_lost_peer",
    "rpc.keepalive_timeout_ms": (
        "rpc/test_silence.py::test_a_dead_wire_is_found_by_keepalive_at_both_ends"
    ),
    "rpc.redial_max_s": f"{RPC}/test_backoff.py::test_pauses_double_up_to_the_limit",
    "rpc.max_remote_errors": (
        f"{RPC}/test_stream.py::test_malformed_messages_are_counted_then_end_the_stream"
    ),
    "controller.heartbeat_timeout_s": (
        "unit/controller/test_registry.py::test_a_silent_target_is_forgotten"
    ),
    "controller.drafts_per_target": (
        "unit/controller/test_assignment.py::test_each_target_gets_its_drafts"
    ),
    "controller.max_draft_utilization": (
        "unit/controller/test_ceilings.py::test_busy_drafts_lower_the_ceiling"
    ),
    "controller.targets_per_draft": (
        "unit/controller/test_registry.py::test_no_more_targets_than_allowed"
    ),
    "model.max_model_len": f"{TARGET}/test_scheduler.py::test_prompt_too_long",
    "model.num_kv_blocks": f"{TARGET}/test_scheduler.py::test_what_can_never_fit",
    "model.tensor_parallel_timeout_s": (
        "unit/engine/test_tensor_parallel.py"
        "::test_a_stopped_rank_breaks_the_engine_after_the_timeout"
    ),
}

NOT_A_LIMIT: dict[str, str] = {
    **TRACING_NOT_A_LIMIT,
    **AUDIT_NO_LIMITS,
    **METHODS_NOT_A_LIMIT,
    "gateway.served_model_name": "name",
    "gateway.max_tokens_default": "default",
    "gateway.isolates_prefix_cache": "switch",
    "gateway.keepalive_interval_s": "pace",
    **dict.fromkeys(("gateway.public_metrics", "gateway.playground"), "switch"),
    **dict.fromkeys(("gateway.api_keys.name", "gateway.api_keys.sha256"), "name"),
    **dict.fromkeys(("logging.format", "logging.level"), "kind"),
    **dict.fromkeys(("gateway.chat_template", "models.chat_template"), "name"),
    **dict.fromkeys(("gateway.tool_call_format", "models.tool_call_format"), "kind"),
    **dict.fromkeys(("gateway.reasoning_format", "models.reasoning_format"), "kind"),
    "target.alive_interval_s": "pace",
    **dict.fromkeys(("target.host", "target.port_min", "target.port_max"), "address"),
    "rpc.breaker_min_s": "pace",
    "rpc.tls_dir": "folder",
    "rpc.ping_interval_s": "pace",
    "rpc.keepalive_time_ms": "pace",
    "rpc.redial_min_s": "pace",
    "controller.heartbeat_interval_s": "pace",
    "model.target_tokenizer": "a name",
    "model.source": "name",
    "model.dtype": "kind",
    "model.device": "kind",
    "model.num_threads": "size",
    "model.block_size": "size",
    "model.tensor_parallel_size": "size",
    "model.quantization": "kind",
    "model.enable_prefix_caching": "switch",
    "model.attention_backend": "kind",
    "model.enforce_eager": "switch",
    "model.reproducible": "switch",
    "target.medusa": "folder",
    **dict.fromkeys((f"model.toy_{n}" for n in ("error_rate", "step_ms", "row_ms")), "toy"),
    "model.toy_head_error_rate": "toy",
}

# module and name -> its test.
CONSTANTS: dict[str, str] = {
    **CLI_CONSTANTS,
    **TRACING_CONSTANTS,
    **METRICS_CONSTANTS,
    **TARGET_CONSTANTS,
    **AUDIT_CONSTANTS,
    **MEDUSA_CONSTANTS,
    **PROPOSER_CONSTANTS,
    **BENCH_CONSTANTS,
    "engine.json_files:MAX_JSON_BYTES": "unit/engine/test_vocabulary.py::test_as_large_a_file",
    "engine.vocabulary:MAX_TOKEN_IDS": "unit/engine/test_vocabulary.py::test_as_large_an_id",
    "protocol.draft_cost:MAX_BRANCH_BATCH": (
        "unit/protocol/test_lookahead.py::test_branches_only_in_small_batches"
    ),
    "protocol.draft_branches:MAX_BRANCHES": f"{BRANCHES}::test_no_more_than_allowed",
    "protocol.draft_table:MAX_BRANCH_ROWS": f"{BRANCHES}::test_no_more_than_allowed",
    "protocol.messages:MAX_BRANCH_TOKENS": f"{BRANCHES}::test_no_more_than_allowed",
    "engine.translation:MIN_COMMON_TOKENS": (
        "unit/engine/test_translation.py::test_too_little_in_common"
    ),
    "engine.checks:MAX_RUNNER_UPS": "unit/engine/test_runner_ups.py::test_refused",
    "engine.lora:MAX_ADAPTERS": "unit/engine/test_lora_folders.py::test_adapters_are_bounded",
    "engine.peft_folder:MAX_RANK": "unit/engine/test_lora_folders.py::test_the_largest_rank",
    "engine.peft_folder:MAX_CONFIG_BYTES": "unit/engine/test_lora_folders.py::test_damaged",
    "controller.registry:MAX_TARGETS": f"{CONTROLLER}/test_registry.py::test_replicas_are_bounded",
    "controller.registry:MAX_DRAFTS": f"{CONTROLLER}/test_registry.py::test_replicas_are_bounded",
    "controller.pool:MAX_POOLED_CLASSES": f"{CONTROLLER}/test_pool.py::test_classes_are_bounded",
    "controller.pool:MAX_PRIOR_CLASSES": f"{CONTROLLER}/test_pool.py::test_classes_are_bounded",
    "controller.pool:MAX_LEFT": f"{CONTROLLER}/test_pool.py::test_the_remembered_are_bounded",
    "controller.pool:MAX_PRIOR_ROUNDS": (
        f"{CONTROLLER}/test_pool.py::test_priors_are_scaled_down_as_a_whole"
    ),
    "controller.fleet:MAX_SHOWN": f"{CONTROLLER}/test_fleet.py::test_status_is_bounded",
    "fleet_reports:MAX_CLASSES": "unit/test_fleet_reports.py::test_long_lists_are_cut",
    "fleet_reports:MAX_POSITIONS": "unit/test_fleet_reports.py::test_long_lists_are_cut",
    "fleet_reports:MAX_INPUTS": "unit/test_fleet_reports.py::test_an_explanation_is_bounded",
    "fleet_reports:MAX_CHOICES": "unit/test_fleet_reports.py::test_an_explanation_is_bounded",
    "fleet_reports:MAX_CONNECTED": "unit/test_fleet_reports.py::test_a_draft_of_too_many_streams",
    "fleet_reports:MAX_NAME_CHARS": "unit/test_fleet_reports.py::test_nonsense_is_refused_by_name",
    "gateway.tools:MAX_TOOLS": f"{GATEWAY}/test_tool_limits.py::test_as_many_tools",
    "gateway.tools:MAX_SCHEMA_DEPTH": f"{GATEWAY}/test_tool_limits.py::test_as_deep_a_schema",
    "gateway.chat:MAX_TEMPLATE_KWARGS": f"{GATEWAY}/test_tool_limits.py::test_as_many_kwargs",
    "gateway.structured:MAX_GUIDED_CHOICES": f"{GATEWAY}/test_tool_limits.py::test_as_many_choices",
    "gateway.templates:MAX_TEMPLATE_BYTES": f"{GATEWAY}/test_templates.py::test_a_file",
    "gateway.trace:MAX_TRACEPARENT_BYTES": f"{GATEWAY}/test_trace.py::test_the_longest_header",
    "logs:MAX_MESSAGE_CHARS": "unit/test_logs.py::test_long_messages_are_cut",
    "gateway.auth:MAX_KEY_BYTES": f"{GATEWAY}/test_auth.py::test_everybody_else_is_refused",
    "gateway.failover:MAX_SUSPECT_RETRIES": (
        f"{GATEWAY}/test_failover.py::test_no_more_than_two_targets_die_of_it"
    ),
    "gateway.failover:MAX_TRIES": f"{GATEWAY}/test_failover.py::test_all_tries_together_end_too",
    "gateway.http:FAIL_TIMEOUT_S": (
        f"{GATEWAY}/test_lifetime.py::test_client_that_stops_reading_is_cut_at_the_deadline"
    ),
    "gateway.http:MAX_REQUEST_ID_CHARS": f"{GATEWAY}/test_malformed.py::test_request_id",
    "gateway.openai:MAX_ECHO_CHARS": (
        f"{GATEWAY}/test_malformed.py::test_echo_is_short_and_printable"
    ),
    "gateway.openai:MAX_SENTENCE_CHARS": (
        f"{GATEWAY}/test_malformed.py::test_echo_is_short_and_printable"
    ),
    "gateway.openai:MAX_NAMES": f"{GATEWAY}/test_http_limits.py::test_many_names",
    "models:SAFETENSORS_HEADER_MAX": f"{HERE}::test_a_header_is_not_read_beyond_its_limit",
    "protocol.draft_session:MAX_LAWS_PER_MESSAGE": (
        "unit/protocol/test_draft_session_laws.py::test_as_many_as_a_message_holds"
    ),
    "rpc.limits:MAX_COUNTER": "properties/test_codec.py"
    "::test_random_fields_are_refused_exactly_when_out_of_range",
    "rpc.limits:MAX_INT": "properties/test_codec.py"
    "::test_random_fields_are_refused_exactly_when_out_of_range",
    "rpc.limits:MAX_MODES": f"{RPC}/test_codec.py::test_list_lengths_are_checked",
    "rpc.limits:MAX_NAME_CHARS": f"{RPC}/test_codec.py::test_draft_offences_are_refused",
    "rpc.limits:MAX_REASON_CHARS": f"{RPC}/test_codec.py::test_a_long_reason_is_shortened",
    "rpc.server:MAX_HANDSHAKES": (
        "rpc/test_handshake.py::test_calls_that_wait_for_a_hello_are_bounded"
    ),
    "grammars:MAX_COMPILED_GRAMMARS": (
        "unit/test_grammars.py::test_compiled_grammars_are_kept_up_to_a_limit"
    ),
    **dict.fromkeys(
        ("grammars:MAX_LEXER_STATES", "grammars:MAX_GRAMMAR_SYMBOLS", "grammars:STEP_MAX_ITEMS"),
        "unit/test_grammars.py::test_a_grammar_may_not_cost_more_than_its_share",
    ),
    "sampling.params:MAX_GRAMMAR_CHARS": (
        f"{RPC}/test_codec_laws.py::test_as_long_a_grammar_as_there_may_be"
    ),
    "sampling.params:MAX_LOGIT_BIASES": f"{RPC}/test_codec_laws.py::test_as_much_as_there_may_be",
    "sampling.params:MAX_STOP_TOKEN_IDS": f"{RPC}/test_codec_laws.py::test_as_much_as_there_may_be",
    "sampling.sparse_probs:MAX_ENTRIES": (
        f"{RPC}/test_codec_laws.py::test_as_many_entries_as_a_law_may_have"
    ),
    "target.breaker:MAX_BREAKERS": f"{TARGET}/test_breaker.py::test_bounded",
    "target.draft_desk:MAX_DRAFT_US": (
        f"{TARGET}/test_draft_desk.py::test_an_absurd_draft_time_is_bounded"
    ),
    "target.draft_pool:ALLOWANCE_FLOOR": (
        "rpc/test_regressions.py::test_a_flood_costs_the_draft_its_stream"
    ),
}


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all fields; the two models' fields once, as `model.*`."""
    for name, info in model.model_fields.items():
        if model is PoolConfig and name in AppConfig.model_fields:
            continue  # the same sections: tests/unit/test_pools.py
        path = f"{prefix}{name}"
        inner = [info.annotation, *get_args(info.annotation)]
        sections = [
            kind for kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if not sections or inner[0] not in sections:
            yield path
        for section in sections:
            yield from fields(section, "model." if name == "model" else f"{path}.")


def test_every_field_is_in_one_of_the_two_tables() -> None:
    known = set(fields(AppConfig))
    assert set(LIMITS) & set(NOT_A_LIMIT) == set()
    assert known - set(LIMITS) - set(NOT_A_LIMIT) == set(), "fields without a row"
    assert (set(LIMITS) | set(NOT_A_LIMIT)) - known == set(), "rows without a field"


def test_what_is_called_a_maximum_is_a_limit() -> None:
    allowed = {"gateway.max_tokens_default", "target.port_max"}
    names = {path for path in NOT_A_LIMIT if "max_" in path or "timeout" in path or "_max" in path}
    assert names <= allowed


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("row", sorted({*LIMITS.values(), *CONSTANTS.values()}))
def test_the_test_of_a_row_exists(row: str) -> None:
    name, function = row.split("::")
    assert function.startswith("test_")
    assert function in functions(TESTS / name), f"tests/{name} has no {function}"


@pytest.mark.parametrize("row", CONSTANTS)
def test_the_constant_of_a_row_exists(row: str) -> None:
    module, name = row.split(":")
    assert getattr(importlib.import_module(f"paceline.{module}"), name) > 0


# ---------------------------------------------------------------------------------- tests of rows


def text(**given: Any) -> GenerationBody:
    return CompletionBody(model="toy", prompt="x", **given)


def chat(num_messages: int) -> GenerationBody:
    messages = [{"role": "user", "content": "x"}] * num_messages
    return ChatBody.model_validate({"model": "toy", "messages": messages})


@pytest.mark.parametrize(
    ("limits", "fits", "more", "said"),
    [
        ({"max_stop_strings": 2}, text(stop=["a", "b"]), text(stop=["a", "b", "c"]), "too_many"),
        ({"max_stop_chars": 3}, text(stop=["abc"]), text(stop=["a", "abcd"]), "too_long"),
        ({"max_messages": 3}, chat(3), chat(4), "too_many"),
    ],
)
def test_lists_of_a_body(
    limits: dict[str, int], fits: GenerationBody, more: GenerationBody, said: str
) -> None:
    """The limit itself is allowed; one more names the field and the limit."""
    planner = Planner(GatewayConfig.model_validate(limits), ToyTokenizer(), 64)
    planner.plans(fits, "id", [0])
    with pytest.raises(RequestError, match=str(*limits.values())) as caught:
        planner.plans(more, "id", [0])
    param = "messages" if isinstance(more, ChatBody) else "stop"
    assert (caught.value.param, caught.value.code) == (param, said)


def test_api_keys_are_bounded() -> None:
    limit = 10_000
    keys = [{"name": f"k{number}", "sha256": f"{number:064x}"} for number in range(limit + 1)]
    assert len(GatewayConfig.model_validate({"api_keys": keys[:limit]}).api_keys) == limit
    with pytest.raises(ValidationError, match=str(limit)):
        GatewayConfig.model_validate({"api_keys": keys})


def test_a_header_is_not_read_beyond_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of the size that its header claims: allocating that much is the attack."""
    header = json.dumps({"w": {"data_offsets": [0, 0]}}).encode().ljust(64)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    models.resolve(str(tmp_path))
    monkeypatch.setattr(models, "SAFETENSORS_HEADER_MAX", len(header) - 1)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        models.resolve(str(tmp_path))
