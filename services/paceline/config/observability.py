"""What the service tells about itself: `tracing`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.section import Section


class TracingConfig(Section):
    """Spans of requests and rounds. Without an `otlp_endpoint` and a `file_dir` it is off."""

    sample_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of requests that are traced, by trace id; beside them those whose "
        "client's traceparent says sampled",
    )
    slow_request_s: float = Field(
        30.0,
        ge=0,
        le=86_400,
        description="requests that take longer are traced in any case, as failed ones are "
        "(0: neither)",
    )
    otlp_endpoint: str = Field(
        "",
        max_length=2048,
        description="URL of the OpenTelemetry collector, as http://127.0.0.1:4317; empty: none",
    )
    otlp_protocol: Literal["grpc", "http"] = Field(
        "grpc", description="of the endpoint; http posts to its path /v1/traces unless it has one"
    )
    file_dir: str = Field(
        "",
        max_length=4096,
        description="folder for one file of OTLP/JSON lines per process (~ is the home folder); "
        "empty: none",
    )
    max_file_bytes: int = Field(
        64 << 20,
        ge=64 << 10,
        le=16 << 30,
        description="size at which such a file is put aside (one old one is kept)",
    )
    max_queue_size: int = Field(
        8192, ge=64, le=1 << 20, description="spans that wait for each exporter; more are dropped"
    )

    @property
    def is_on(self) -> bool:
        """Whether there is anywhere to put a span."""
        return bool(self.otlp_endpoint or self.file_dir)

    @model_validator(mode="after")
    def _has_somewhere_to_go(self) -> TracingConfig:
        if self.sample_ratio and not self.is_on:
            raise ValueError("tracing.sample_ratio needs tracing.otlp_endpoint or tracing.file_dir")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError("tracing.otlp_endpoint must begin with http:// or https://")
        return self
