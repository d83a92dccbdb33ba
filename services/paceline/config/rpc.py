"""The streams between drafts and targets: `rpc`."""

from __future__ import annotations

from pydantic import Field, model_validator

from paceline.config.section import Section


class RpcConfig(Section):
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
