"""What a sampler needs to know about one request. Pure; knows no HTTP field and no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_SEED = 2**64 - 1
# Colder is refused rather than called greedy: 1e-5 already is, but for logits that nearly tie, and
# differences of float32 logits divided by it stay far inside float64.
MIN_TEMPERATURE = 1e-5


class VerificationMode(StrEnum):
    """How a target turns logits and proposals into tokens."""

    GREEDY = "greedy"
    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Processors run in the order temperature, top-k, top-p (vLLM's order).

    `temperature` 0 means greedy: argmax, lowest id on ties, the other fields are ignored. Between
    0 and MIN_TEMPERATURE there is nothing.
    `top_k` 0 keeps all ids; ties with the k-th logit are kept. `top_p` keeps the smallest
    descending set whose probability reaches it. `seed` is u64, `choice` the index of `n > 1`
    completions; both key the noise.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be in [0, 100], got {self.temperature}")
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 or at least {MIN_TEMPERATURE}, got {self.temperature}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be a u64, got {self.seed}")
        if not 0 <= self.choice < 2**24:
            raise ValueError(f"choice must be a u24, got {self.choice}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def mode(self) -> VerificationMode:
        return VerificationMode.GREEDY if self.is_greedy else VerificationMode.COUPLED
