"""`traffic` of `paceline simulate`: arrivals, lengths, and how well a draft guesses each class."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from paceline.config.section import Section

MAX_CLASSES = 64
MAX_DEPTH = 64  # positions with an acceptance of their own
MAX_TOKENS = 1 << 20
Acceptance = float | tuple[float, ...]


class LengthConfig(Section):
    """A distribution of whole numbers of tokens, at least 1."""

    distribution: Literal["fixed", "uniform", "exponential", "lognormal"] = Field(
        "fixed", description="its shape"
    )
    mean: float = Field(
        128, ge=1, le=MAX_TOKENS, description="mean before it is cut to min and max"
    )
    sigma: float = Field(0.6, ge=0, le=4, description="lognormal: of the logarithm")
    min: int = Field(1, ge=1, le=MAX_TOKENS, description="shortest; uniform: the lower end")
    max: int = Field(32768, ge=1, le=MAX_TOKENS, description="longest; uniform: the upper end")

    @model_validator(mode="after")
    def _order(self) -> LengthConfig:
        if self.max < self.min:
            raise ValueError("max must be >= min")
        return self

    @property
    def longest(self) -> int:
        return max(self.min, min(self.max, round(self.mean))) if self.is_fixed else self.max

    @property
    def is_fixed(self) -> bool:
        return self.distribution == "fixed"


class DriftConfig(Section):
    """Acceptance goes to `acceptance` and back, again and again."""

    acceptance: Acceptance = Field(description="what it is at the far end, as in the class")
    period_s: float = Field(gt=0, le=1e5, description="there and back")
    shape: Literal["triangle", "square"] = Field("triangle", description="slowly or at once")

    @field_validator("acceptance")
    @classmethod
    def _in_range(cls, value: Acceptance) -> Acceptance:
        return _checked(value)


class ClassConfig(Section):
    """Requests that a draft guesses alike."""

    name: str = Field("default", min_length=1, description="what reports and traces call it")
    share: float = Field(1.0, gt=0, le=1, description="share of the requests")
    acceptance: Acceptance = Field(
        0.75,
        description="chance that a proposal is right when all before it are; a list: by how far"
        " it is behind the last correction, the last value holding for all beyond",
    )
    temperature: float = Field(
        0.0, ge=0, le=2, description="a target tells classes apart only by this"
    )
    runner_up: tuple[float, ...] = Field(
        (0.6, 0.75),
        max_length=16,
        description="chance that a missed token was among the draft's 1, 2, ... next guesses",
    )
    drift: DriftConfig | None = Field(None, description="acceptance that changes over time")
    prompt_tokens: LengthConfig = Field(
        default_factory=lambda: LengthConfig(mean=128), description="lengths of prompts"
    )
    output_tokens: LengthConfig = Field(
        default_factory=lambda: LengthConfig(mean=128), description="lengths of answers"
    )

    @field_validator("acceptance")
    @classmethod
    def _in_range(cls, value: Acceptance) -> Acceptance:
        return _checked(value)

    @field_validator("runner_up")
    @classmethod
    def _rising(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        ordered = sorted(value) == list(value)
        if not ordered or any(not 0 <= chance <= 1 for chance in value):
            raise ValueError("cumulative chances: each in [0, 1], none below the one before")
        return value


class ArrivalConfig(Section):
    """When requests come."""

    process: Literal["closed", "poisson", "trace"] = Field(
        "closed",
        description="closed: clients that ask again when answered; poisson; trace: from a file",
    )
    sessions_per_target: int = Field(0, ge=0, le=1 << 16, description="closed: clients per target")
    sessions: int = Field(0, ge=0, le=1 << 20, description="closed: clients in all, in its place")
    think_s: float = Field(0.0, ge=0, le=3600, description="closed: pause before asking again")
    requests_per_s: float = Field(0.0, ge=0, le=1e6, description="poisson: rate over the fleet")
    trace: str = Field(
        "", description="trace: CSV with time_s,prompt_tokens,output_tokens,class; beside this file"
    )

    @model_validator(mode="after")
    def _complete(self) -> ArrivalConfig:
        if self.process == "closed" and bool(self.sessions) == bool(self.sessions_per_target):
            raise ValueError("closed needs sessions_per_target or sessions (> 0), and not both")
        if self.process == "poisson" and not self.requests_per_s:
            raise ValueError("poisson needs requests_per_s > 0")
        if self.process == "trace" and not self.trace:
            raise ValueError("trace needs the name of a file")
        return self


class TrafficConfig(Section):
    """All requests."""

    arrivals: ArrivalConfig = Field(description="when they come")
    classes: tuple[ClassConfig, ...] = Field(
        (ClassConfig(),), min_length=1, max_length=MAX_CLASSES, description="what they are"
    )

    @field_validator("classes")
    @classmethod
    def _names_and_shares(cls, classes: tuple[ClassConfig, ...]) -> tuple[ClassConfig, ...]:
        names = [item.name for item in classes]
        if len(set(names)) < len(names):
            raise ValueError("each class needs a name of its own")
        if abs(sum(item.share for item in classes) - 1) > 1e-6:
            raise ValueError("the shares of the classes must add up to 1")
        return classes

    def longest(self) -> list[tuple[str, int, int]]:
        """(class, longest prompt, longest answer)."""
        return [(c.name, c.prompt_tokens.longest, c.output_tokens.longest) for c in self.classes]


def _checked(value: Acceptance) -> Acceptance:
    values = (value,) if isinstance(value, float | int) else value
    if not 1 <= len(values) <= MAX_DEPTH:
        raise ValueError(f"1 to {MAX_DEPTH} values")
    if any(not 0 <= chance <= 1 for chance in values):
        raise ValueError("chances lie in [0, 1]")
    return value
