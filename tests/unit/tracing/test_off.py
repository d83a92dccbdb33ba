"""While tracing is off there is no tracer, and OpenTelemetry is not even imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from paceline.config import AppConfig, TracingConfig
from paceline.tracing.process import open_tracer

PROGRAM = """
import sys
import paceline.draft.driver, paceline.gateway.api, paceline.target.driver
from paceline.config import TracingConfig
from paceline.tracing.process import open_tracer
assert open_tracer(TracingConfig(**{settings}), "x", {{}}) {expected} None
print(*sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""


def modules(settings: str, expected: str) -> str:
    program = PROGRAM.format(settings=settings, expected=expected)
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_nothing_of_opentelemetry_is_imported() -> None:
    # Libraries may import its API; the rest of it is ours alone.
    assert "opentelemetry.sdk" not in modules("{}", "is")
    assert "opentelemetry.exporter" not in modules("{}", "is")
    assert "opentelemetry.sdk" in modules("{'file_dir': '/proc/nowhere'}", "is not")


def test_off_by_default() -> None:
    assert not AppConfig().tracing.is_on
    assert open_tracer(AppConfig().tracing, "x", {}) is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"sample_ratio": 0.1}, "needs tracing.otlp_endpoint or tracing.file_dir"),
        ({"otlp_endpoint": "localhost:4317"}, "must begin with http:// or https://"),
        ({"sample_ratio": 1.1, "file_dir": "x"}, "sample_ratio"),
        ({"slow_request_s": -1}, "slow_request_s"),
        ({"slow_request_s": 86_401}, "slow_request_s"),
        ({"max_queue_size": 63}, "max_queue_size"),
        ({"max_queue_size": (1 << 20) + 1}, "max_queue_size"),
        ({"max_file_bytes": 1}, "max_file_bytes"),
        ({"max_file_bytes": (16 << 30) + 1}, "max_file_bytes"),
        ({"otlp_protocol": "thrift"}, "otlp_protocol"),
    ],
)
def test_what_the_configuration_refuses(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        TracingConfig.model_validate(settings)
