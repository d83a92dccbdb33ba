"""Configurations for the tests of the simulator."""

from __future__ import annotations

from typing import Any

from paceline.simulate.config import SimulateConfig


def raw(
    *,
    batch: int = 1,
    num_targets: int = 1,
    num_drafts: int = 1,
    acceptance: Any = 0.75,
    rtt_ms: float = 0.5,
    k: int | None = None,
    fan_out: int = 0,
    duration_s: float = 10.0,
    output_tokens: Any = None,
    **more: Any,
) -> dict[str, Any]:
    """The bench's costs; answers do not end unless `output_tokens` says so. `k`: a fixed K."""
    speculation: dict[str, Any] = {"max_fan_out": fan_out}
    if k is not None:
        speculation |= {"lookahead": "fixed", "num_speculative_tokens": k}
    target = {
        "base_ms": 25,
        "row_ms": 0.05,
        "overhead_ms": 0,
        "price_per_hour": 4,
        "max_num_seqs": batch,
        "max_rows_per_pass": 8192,
        "kv_tokens": 1 << 26,
    }
    draft = {
        "base_ms": 3,
        "row_ms": 0.01,
        "overhead_ms": 0,
        "price_per_hour": 1,
        "max_sessions": 4096,
        "max_rows_per_pass": 8192,
    }
    lengths = {"mean": 1 << 20, "max": 1 << 20} if output_tokens is None else output_tokens
    data: dict[str, Any] = {
        "hardware": {"targets": {"large": target}, "drafts": {"small": draft}},
        "fleet": {
            "target": "large",
            "draft": "small",
            "num_targets": num_targets,
            "num_drafts": num_drafts,
        },
        "network": {"rtt_ms": rtt_ms},
        "traffic": {
            "arrivals": {"sessions_per_target": batch},
            "classes": [
                {
                    "acceptance": acceptance,
                    "runner_up": [0.5, 0.66],
                    "prompt_tokens": {"mean": 16},
                    "output_tokens": lengths,
                }
            ],
        },
        "speculation": speculation,
        "has_controller": False,
        "duration_s": duration_s,
        "warmup_s": 1,
    }
    return data | more


def config(**options: Any) -> SimulateConfig:
    return SimulateConfig.model_validate(raw(**options))
