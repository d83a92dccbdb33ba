"""The one configuration tree: declared once, frozen, deaf to nothing (unknown keys fail).

`AppConfig()` alone runs the toy model. It arrives as `applications[].args` of a Serve YAML.
Replica counts, CPUs, GPUs and autoscaling live in that YAML's `deployments:` block, never here.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

# An OpenSession carries a sequence's whole text: no token id needs more bytes than this on the
# wire, and the rest of the message (1024 logit biases are most of it) fits into the slack.
TOKEN_ID_BYTES = 5
MESSAGE_SLACK_BYTES = 16 << 10
# What torch calls a device; whether this machine has it is found out when the model loads.
SHA256 = re.compile(r"[0-9a-f]{64}")
DEVICE = re.compile(r"auto|(cpu|cuda|mps|xpu|hpu|npu|mtia)(:(0|[1-9][0-9]{0,2}))?")


class _Section(BaseModel):
    """Frozen; unknown keys, infinities, NaN and booleans in place of numbers are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        hide_input_in_errors=True,  # an API key in place of its hash must not get into logs
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        if (
            isinstance(value, bool)
            and cls.model_fields[str(info.field_name)].annotation is not bool
        ):
            raise ValueError("true, false, yes, no, on and off are no values here (quote a word)")
        return value


class ModelConfig(_Section):
    """Which weights to serve and how to hold them."""

    source: str = Field(
        "toy", description="local folder, Hub id, an alias (smollm2-135m), or toy / timed"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="weights and KV cache element type"
    )
    device: str = Field("auto", description="torch device, or auto: cuda when present, else cpu")
    num_threads: int = Field(
        1, ge=1, le=256, description="torch intra-op threads of this process (CPU)"
    )
    max_model_len: int = Field(2048, ge=8, le=1_048_576, description="context limit in tokens")
    block_size: int = Field(16, ge=1, le=256, description="KV block size in tokens")
    num_kv_blocks: int = Field(
        1024, ge=2, le=1 << 24, description="KV blocks in the pool (capacity = blocks x block size)"
    )
    tensor_parallel_size: int = Field(
        1, ge=1, le=64, description="ranks that share this model, one process and device each"
    )
    tensor_parallel_timeout_s: float = Field(
        10.0, gt=0, le=600, description="a pass that hangs so long on a rank ends the replica"
    )
    quantization: Literal["none", "int8", "int4", "gguf"] = Field(
        "none", description="weights in memory: int8, int4 (CPU kernels; torchao on CUDA), gguf"
    )
    enable_prefix_caching: bool = Field(
        True, description="keep KV blocks of finished texts for later ones that begin alike"
    )
    attention_backend: Literal["auto", "sdpa", "varlen"] = Field(
        "auto", description="sdpa runs anywhere; varlen: torch's paged CUDA kernel (fp16, bf16)"
    )
    enforce_eager: bool = Field(False, description="never use CUDA graphs (CPU never does)")
    reproducible: bool = Field(
        False, description="same bits for any batch, K and draft (CPU, slower): README, The engine"
    )
    toy_error_rate: float = Field(
        0.0, ge=0.0, le=1.0, description="toy model: share of steps whose logits are disturbed"
    )
    toy_step_ms: float = Field(
        0.0, ge=0.0, le=10_000.0, description="timed model: cost of a pass in milliseconds"
    )
    toy_row_ms: float = Field(
        0.0, ge=0.0, le=1_000.0, description="timed model: added cost of each row in milliseconds"
    )

    @field_validator("device")
    @classmethod
    def _device_name(cls, device: str) -> str:
        if not DEVICE.fullmatch(device):
            raise ValueError(f"{device!r} is no device: write auto, cpu, cuda, cuda:0 or mps")
        return device


class ApiKeyConfig(_Section):
    """One API key and what its holder may use; `paceline key` makes one."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="how logs call the key's holder"
    )
    sha256: str = Field(description="SHA-256 of the key: 64 lower-case hexadecimal digits")
    max_concurrent_requests: int = Field(
        64, ge=1, description="choices in progress for this key; beyond it 429"
    )
    max_requests_per_minute: int = Field(
        600, ge=1, description="requests of this key in a minute; beyond it 429"
    )

    @field_validator("sha256")
    @classmethod
    def _hash_not_key(cls, sha256: str) -> str:
        if not SHA256.fullmatch(sha256):
            raise ValueError("not a SHA-256: use `paceline key NAME`, never the key itself")
        return sha256


class GatewayConfig(_Section):
    """The HTTP front door and its limits."""

    served_model_name: str = Field("toy", description="the `model` that requests must name")
    max_body_bytes: int = Field(1 << 20, ge=1024, description="largest HTTP body accepted, bytes")
    max_header_bytes: int = Field(
        16 << 10, ge=1024, description="names and values of an HTTP request's headers, bytes"
    )
    max_tokens: int = Field(
        1 << 20, ge=1, description="most tokens of one choice, whatever the context would hold"
    )
    max_tokens_default: int = Field(
        16, ge=1, description="completions: max_tokens when the request has none (OpenAI: 16)"
    )
    max_stop_strings: int = Field(4, ge=0, le=64, description="stop strings in one request")
    max_stop_token_ids: int = Field(64, ge=0, le=256, description="stop token ids in one request")
    max_logit_biases: int = Field(300, ge=0, le=1024, description="logit biases in one request")
    max_logprobs: int = Field(20, ge=0, le=256, description="top log-probabilities of one token")
    max_n: int = Field(16, ge=1, le=128, description="completions of one prompt in one request")
    max_retries: int = Field(
        2, ge=0, le=10, description="other targets in a row that may be lost without a token"
    )
    max_stop_chars: int = Field(256, ge=1, description="characters in one stop string")
    max_messages: int = Field(256, ge=1, description="messages in one chat request")
    max_concurrent_requests: int = Field(
        256, ge=1, description="choices (n of each request) in progress per gateway; beyond it 429"
    )
    ready_timeout_s: float = Field(5.0, gt=0, description="how long /ready waits for a target")
    body_timeout_s: float = Field(
        10.0, gt=0, description="longest wait for a whole request body; then 408"
    )
    target_silence_s: float = Field(
        5.0, gt=0, description="silence after which a target is lost (> 2 target.alive_interval_s)"
    )
    write_timeout_s: float = Field(
        30.0, gt=0, description="a client that takes nothing for so long is dropped"
    )
    api_keys: tuple[ApiKeyConfig, ...] = Field(
        (), max_length=10_000, description="who may ask (name, sha256, limits); none or []: anybody"
    )
    isolates_prefix_cache: bool = Field(
        True, description="keys do not find each other's prompts in the prefix cache"
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="longest life of one request in seconds; then a clean error"
    )

    @field_validator("api_keys", mode="before")
    @classmethod
    def _a_list_of_keys(cls, keys: Any) -> Any:
        listed = keys if isinstance(keys, list | tuple) else [None]
        if not all(isinstance(key, dict | ApiKeyConfig) for key in listed):
            raise ValueError("a list of {name: ..., sha256: ...}, as `paceline key NAME` prints it")
        return keys

    @field_validator("api_keys")
    @classmethod
    def _distinct_keys(cls, keys: tuple[ApiKeyConfig, ...]) -> tuple[ApiKeyConfig, ...]:
        for what in ("name", "sha256"):
            values = [getattr(key, what) for key in keys]
            if twice := [value for value, count in Counter(values).items() if count > 1]:
                raise ValueError(f"two API keys have the same {what}: {twice[0]}")
        return keys


class TargetConfig(_Section):
    """The replica that owns the truth."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="the large model")
    max_num_seqs: int = Field(32, ge=1, le=4096, description="sequences in one pass")
    max_queued_seqs: int = Field(
        128, ge=0, description="sequences waiting for a place; beyond it 429"
    )
    max_queue_s: float = Field(
        60.0, gt=0, description="longest wait for a place before the first token; then 503"
    )
    max_rows_per_pass: int = Field(
        512, ge=16, description="token rows in one pass: decode + verify + prefill chunks"
    )
    max_pass_s: float = Field(
        60.0, gt=0, le=3600, description="a pass that takes longer hangs: the replica is replaced"
    )
    alive_interval_s: float = Field(
        1.0, gt=0, description="how often a request without news is told that it is not lost"
    )
    kv_watermark: float = Field(
        0.02, ge=0.0, lt=1.0, description="share of KV blocks kept free when a sequence starts"
    )
    host: str = Field("127.0.0.1", description="address the Speculation server binds")
    port_min: int = Field(52000, ge=1024, le=65535, description="first port to try")
    port_max: int = Field(52999, ge=1024, le=65535, description="last port to try")

    @model_validator(mode="after")
    def _ports(self) -> TargetConfig:
        if self.port_max < self.port_min:
            raise ValueError("target.port_max must be >= target.port_min")
        if self.max_rows_per_pass < self.max_num_seqs:
            raise ValueError("target.max_rows_per_pass must be >= target.max_num_seqs")
        return self


class DraftConfig(_Section):
    """A disposable replica that runs ahead."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="the small model")
    max_sessions: int = Field(128, ge=1, description="sequences over all targets; beyond it BUSY")
    max_rows_per_pass: int = Field(512, ge=16, description="token rows in one draft pass")
    session_idle_s: float = Field(
        60.0, gt=0, description="a sequence without any message for so long is dropped"
    )
    drain_timeout_s: float = Field(
        3.0, ge=0, le=600, description="a stopping draft serves on so long while targets move"
    )


class SpeculationConfig(_Section):
    """How far the draft may run and what a request may ask for."""

    method: Literal["model", "off"] = Field("model", description="proposer of the deployment")
    mode: Literal["coupled", "rejection", "block"] = Field(
        "coupled", description="verification at temperature > 0 (at 0 it is always greedy)"
    )
    num_speculative_tokens: int = Field(
        4, ge=1, le=64, description="draft tokens verified per sequence and pass (K) by default"
    )
    max_num_speculative_tokens: int = Field(
        16, ge=1, le=64, description="ceiling of K (<= max_draft_ahead); more is cut to it"
    )
    max_draft_ahead: int = Field(
        16, ge=1, le=256, description="tokens a draft may be ahead (and never more than 2 K + 1)"
    )
    max_lone_wait_ms: float = Field(
        50.0,
        ge=0.0,
        le=1000.0,
        description="cap of a lone sequence's wait for its draft, when that pays; 0 = never",
    )

    @model_validator(mode="after")
    def _ahead(self) -> SpeculationConfig:
        if not (
            self.num_speculative_tokens <= self.max_num_speculative_tokens <= self.max_draft_ahead
        ):
            raise ValueError(
                "speculation needs num_speculative_tokens <= max_num_speculative_tokens"
                " <= max_draft_ahead"
            )
        return self


class RpcConfig(_Section):
    """The gRPC stream between one draft and one target."""

    max_message_bytes: int = Field(
        4 << 20, ge=64 << 10, le=64 << 20, description="largest gRPC message, bytes"
    )
    max_items_per_message: int = Field(1024, ge=1, description="batch entries in one message")
    max_tokens_per_item: int = Field(
        1 << 20, ge=1, description="token ids in one OpenSession, DraftTokens or Verdict"
    )
    max_streams: int = Field(64, ge=1, description="draft streams per target; beyond it refused")
    max_outbox_messages: int = Field(
        1024, ge=8, description="unsent messages per stream; beyond it the stream is dropped"
    )
    hello_timeout_s: float = Field(5.0, gt=0, description="wait for Hello / Welcome")
    open_timeout_s: float = Field(10.0, gt=0, description="wait for Opened before trying again")
    stall_timeout_s: float = Field(
        2.0,
        gt=0,
        description="a draft that may draft and sends nothing of use so long is stalled",
    )
    max_reopens: int = Field(
        64, ge=0, description="drafts that one sequence tries after its first; then it does without"
    )
    breaker_failures: int = Field(
        3, ge=1, description="failures in a row that make a draft dark (no new sequences)"
    )
    breaker_min_s: float = Field(1.0, gt=0, description="how long a draft is dark the first time")
    breaker_max_s: float = Field(30.0, gt=0, description="and at most, doubling each time")
    tls_dir: str = Field(
        "", description="folder of certificates (paceline certs): mutual TLS; empty: plaintext"
    )
    ping_interval_s: float = Field(0.5, gt=0, description="pings for clock offset and liveness")
    peer_timeout_s: float = Field(2.0, gt=0, description="silence after which a peer is lost")
    keepalive_time_ms: int = Field(500, ge=100, description="HTTP/2 keepalive ping interval")
    keepalive_timeout_ms: int = Field(2000, ge=50, description="HTTP/2 keepalive answer timeout")
    redial_min_s: float = Field(0.1, gt=0, description="first pause before dialling again")
    redial_max_s: float = Field(5.0, gt=0, description="longest pause before dialling again")
    max_remote_errors: int = Field(
        8, ge=1, description="malformed messages of a peer before its stream is closed"
    )

    @model_validator(mode="after")
    def _times(self) -> RpcConfig:
        if self.redial_min_s > self.redial_max_s:
            raise ValueError("rpc.redial_max_s must be >= rpc.redial_min_s")
        if self.breaker_min_s > self.breaker_max_s:
            raise ValueError("rpc.breaker_max_s must be >= rpc.breaker_min_s")
        if self.peer_timeout_s <= self.ping_interval_s:
            raise ValueError(
                "rpc.peer_timeout_s must be > rpc.ping_interval_s: a peer is heard only when it "
                "answers a ping"
            )
        return self


class ControllerConfig(_Section):
    """Soft state: registry and assignment."""

    heartbeat_interval_s: float = Field(1.0, gt=0, description="how often replicas report")
    heartbeat_timeout_s: float = Field(5.0, gt=0, description="silence that removes a replica")
    targets_per_draft: int = Field(
        8, ge=1, description="most targets that one draft serves at once"
    )

    @model_validator(mode="after")
    def _silence(self) -> ControllerConfig:
        if self.heartbeat_timeout_s <= self.heartbeat_interval_s:
            raise ValueError(
                "controller.heartbeat_timeout_s must be > controller.heartbeat_interval_s"
            )
        return self


class AppConfig(_Section):
    """Everything; `AppConfig()` runs the toy model on a laptop."""

    gateway: GatewayConfig = Field(default_factory=GatewayConfig, description="HTTP front door")
    target: TargetConfig = Field(default_factory=TargetConfig, description="target replicas")
    draft: DraftConfig = Field(default_factory=DraftConfig, description="draft replicas")
    speculation: SpeculationConfig = Field(
        default_factory=SpeculationConfig, description="proposers and lookahead"
    )
    rpc: RpcConfig = Field(default_factory=RpcConfig, description="draft <-> target streams")
    controller: ControllerConfig = Field(
        default_factory=ControllerConfig, description="registry and assignment"
    )

    @model_validator(mode="after")
    def _silence(self) -> AppConfig:
        if self.gateway.target_silence_s <= 2 * self.target.alive_interval_s:
            raise ValueError("gateway.target_silence_s must be > 2 * target.alive_interval_s")
        return self

    @model_validator(mode="after")
    def _outbox(self) -> AppConfig:
        # One pass queues at most a verdict and an open or close per sequence.
        if self.rpc.max_outbox_messages < 2 * self.target.max_num_seqs:
            raise ValueError("rpc.max_outbox_messages must be >= 2 * target.max_num_seqs")
        return self

    @model_validator(mode="after")
    def _whole_texts_travel(self) -> AppConfig:
        lengths = {
            "target.model.max_model_len": self.target.model.max_model_len,
            "draft.model.max_model_len": self.draft.model.max_model_len,
        }
        name, longest = max(lengths.items(), key=lambda item: item[1])
        if self.rpc.max_tokens_per_item < longest:
            raise ValueError(
                f"rpc.max_tokens_per_item must be >= {name} ({longest}): the longest text "
                "goes to a draft in one message"
            )
        num_bytes = TOKEN_ID_BYTES * longest + MESSAGE_SLACK_BYTES
        if self.rpc.max_message_bytes < num_bytes:
            raise ValueError(
                f"rpc.max_message_bytes must be >= {num_bytes} for {name} ({longest}): the "
                "longest text goes to a draft in one message"
            )
        return self
