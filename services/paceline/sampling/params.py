"""What a sampler needs to know about one request. Pure; knows no HTTP field and no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paceline.by_name import by_name

MAX_SEED = 2**64 - 1
# Colder is refused rather than called greedy: 1e-5 already is, but for logits that nearly tie, and
# differences of float32 logits divided by it stay far inside float64.
MIN_TEMPERATURE = 1e-5
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_GRAMMAR_CHARS = 128 << 10


class VerificationMode(StrEnum):
    """How a target turns logits and proposals into tokens."""

    GREEDY = "greedy"
    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"


@by_name
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Processors run in this order: penalties, logit bias, grammar, min tokens (all four on the
    model's own logits), temperature, top-k, top-p, min-p.

    `temperature` 0 means greedy: argmax after the first four, lowest id on ties; top-k, top-p
    and min-p cannot change it. Between 0 and MIN_TEMPERATURE there is nothing.
    `repetition_penalty` divides positive and multiplies other logits of every id in prompt or
    output; `frequency_penalty` is taken off once per occurrence in the output,
    `presence_penalty` once if there is any (vLLM's and OpenAI's definitions).
    `logit_bias` is added: (token id, bias) by ascending id. While fewer than `min_tokens` tokens
    are generated, `stop_token_ids` (whatever would end the sequence) cannot be chosen.
    `top_k` 0 keeps all ids; ties with the k-th logit are kept. `top_p` keeps the smallest
    descending set whose probability reaches it. `min_p` keeps what is at least that share of the
    most likely token. With a `grammar` (as llguidance serializes it; empty: none) only ids that
    it allows after the output so far can be chosen. `seed` is u64, `choice` the index of `n > 1`
    completions; both key the noise.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    grammar: str = ""

    def __post_init__(self) -> None:
        self._check_law()
        self._check_adjustments()

    def _check_law(self) -> None:
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
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")

    def _check_adjustments(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MAX_PENALTY:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(self, name)}")
        if not MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise ValueError(
                f"repetition_penalty must be in [{MIN_REPETITION_PENALTY},"
                f" {MAX_REPETITION_PENALTY}], got {self.repetition_penalty}"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIASES or len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError("too many logit biases or stop token ids")
        ids = [token_id for token_id, _ in self.logit_bias]
        if ids != sorted(set(ids)) or (ids and not 0 <= ids[0] <= ids[-1] < 2**31):
            raise ValueError("logit_bias needs distinct token ids in ascending order")
        if not all(abs(bias) <= MAX_LOGIT_BIAS for _, bias in self.logit_bias):
            raise ValueError(f"a logit bias must be in [-{MAX_LOGIT_BIAS}, {MAX_LOGIT_BIAS}]")
        if len(self.grammar) > MAX_GRAMMAR_CHARS:
            raise ValueError(f"a grammar may have at most {MAX_GRAMMAR_CHARS} characters")
        if not 0 <= self.min_tokens < 2**31:
            raise ValueError(f"min_tokens must be >= 0, got {self.min_tokens}")
        if not all(0 <= token_id < 2**31 for token_id in self.stop_token_ids):
            raise ValueError("stop token ids must be >= 0")

    @property
    def has_penalties(self) -> bool:
        """Whether the law depends on which tokens came before (their counts)."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def needs_history(self) -> bool:
        """Whether the law may depend on the tokens before by more than the logits."""
        return self.has_penalties or self.min_tokens > 0 or bool(self.grammar)

    def is_adjusting(self, num_output_tokens: int) -> bool:
        """Whether penalties, logit bias, a grammar or min tokens can change the logits after so
        many tokens.

        If not, the law does not depend on the history and nobody needs to keep one.
        """
        is_held_back = num_output_tokens < self.min_tokens and bool(self.stop_token_ids)
        return bool(self.has_penalties or self.logit_bias or self.grammar or is_held_back)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def mode(self) -> VerificationMode:
        return VerificationMode.GREEDY if self.is_greedy else VerificationMode.COUPLED
