"""The HTTP front door: `gateway`."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Literal

from pydantic import Field, field_validator

from paceline.config.section import Section

SHA256 = re.compile(r"[0-9a-f]{64}")
# Scheme and host, as a browser's Origin header has them: no path, no slash at the end.
ORIGIN = re.compile(
    r"\*|https?://[a-z0-9.-]{1,253}(:[0-9]{1,5})?|https?://\[[0-9a-f:]{2,45}\](:[0-9]{1,5})?"
)


class ApiKeyConfig(Section):
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


class GatewayConfig(Section):
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
    max_prompts: int = Field(
        64, ge=1, le=1024, description="completions: prompts in one request, each with its n"
    )
    max_retries: int = Field(
        2, ge=0, le=10, description="other targets in a row that may be lost without a token"
    )
    max_stop_chars: int = Field(256, ge=1, description="characters in one stop string")
    max_messages: int = Field(256, ge=1, description="messages in one chat request")
    max_concurrent_requests: int = Field(
        256, ge=1, description="choices (n of each prompt) in progress per gateway; beyond it 429"
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
    keepalive_interval_s: float = Field(
        10.0, gt=0, description="a stream that has nothing to say for so long sends a comment"
    )
    public_metrics: bool = Field(False, description="/metrics answers without an API key")
    playground: bool = Field(True, description="the page at / that shows speculation at work")
    cors_allow_origins: tuple[str, ...] = Field(
        (), max_length=64, description="web origins that may call from a browser; ['*']: any"
    )

    @field_validator("cors_allow_origins", mode="before")
    @classmethod
    def _origins(cls, origins: Any) -> Any:
        listed = origins if isinstance(origins, list | tuple) else [None]
        if not all(isinstance(item, str) and ORIGIN.fullmatch(item) for item in listed):
            raise ValueError("a list of origins such as https://example.com, or ['*']")
        return origins

    max_grammar_bytes: int = Field(
        16 << 10,
        ge=64,
        le=128 << 10,
        description="form of an answer (schema, tools) as a grammar; more costs more than linearly",
    )
    chat_template: str | None = Field(
        None, description="Jinja file in place of the model's own template, or smollm2-tools"
    )
    tool_call_format: Literal["auto", "hermes", "llama3_json"] = Field(
        "auto", description="how the model writes tool calls; auto: what its template shows"
    )
    reasoning_format: Literal["auto", "think", "none"] = Field(
        "auto", description="whether <think> text is split off; auto: if the template knows it"
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
