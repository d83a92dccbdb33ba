"""OpenAI's request bodies: bytes in, validated values or a RequestError that names the field out.

Pure. Strict: nothing is coerced, nothing unknown is ignored. Knows no tokenizer, no limits of a
deployment and no HTTP framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from paceline.errors import RequestError
from paceline.gateway import fields
from paceline.gateway.parameters import COMPLETION_NEUTRAL, NeutralParameter, drop_neutral
from paceline.gateway.sentences import reason as reason_of
from paceline.gateway.structured import StructuredFields
from paceline.methods import SpeculationMethod
from paceline.sampling.params import (
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
)

MAX_ECHO_CHARS = 64
MAX_SENTENCE_CHARS = 200
# In one object of a body; the longest that means something is a `logit_bias`.
MAX_NAMES = 4096
_MAX_INT32 = 2**31 - 1


class Body(BaseModel):
    """Extra fields fail, types are strict, NaN and infinities are not numbers."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class StreamOptions(Body):
    include_usage: bool | None = None
    # vLLM's: every chunk has the counts so far.
    continuous_usage_stats: bool | None = None
    # OpenAI pads chunks against traffic analysis when true; we do not.
    include_obfuscation: Literal[False] | None = None


class SpeculationOptions(Body):
    """Our extension: how speculation works for this request, and whether to show it."""

    method: SpeculationMethod | None = None
    max_tokens: int | None = Field(None, ge=0, le=_MAX_INT32)
    mode: Literal["greedy", "coupled", "rejection", "block"] | None = None
    lookahead: Literal["adaptive", "fixed"] | None = None
    include_rounds: bool | None = None


_Penalty = Annotated[float | None, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
_Count = Annotated[int | None, Field(ge=0, le=_MAX_INT32)]


class GenerationBody(Body):
    """What both endpoints share. None is OpenAI's null: the default."""

    neutral: ClassVar[Mapping[str, NeutralParameter]] = {}

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=_MAX_INT32)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    repetition_penalty: float | None = Field(
        None, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY
    )
    logit_bias: Annotated[dict[int, float], BeforeValidator(fields.logit_bias)] = {}
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(None, ge=1, le=_MAX_INT32)
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT32)
    min_tokens: _Count = None
    stop: Annotated[list[str], BeforeValidator(fields.stop_list)] = []
    stop_token_ids: Annotated[list[int], BeforeValidator(fields.token_id_list)] = []
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: _Count = None
    # Read by `structured`, which says what is wrong with them.
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    speculation: SpeculationOptions | None = None

    @field_validator("temperature")
    @classmethod
    def _not_near_zero(cls, temperature: float | None) -> float | None:
        if temperature is not None and 0.0 < temperature < MIN_TEMPERATURE:
            raise PydanticCustomError(
                "temperature",
                "It must be 0, which is greedy, or at least {minimum}.",
                {"minimum": MIN_TEMPERATURE},
            )
        return temperature

    @model_validator(mode="before")
    @classmethod
    def _neutral_parameters(cls, body: object) -> object:
        return drop_neutral(body, cls.neutral)

    @model_validator(mode="after")
    def _stream_rules(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", "'stream_options' is only allowed when 'stream' is true."
            )
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError(
                "prompt_logprobs", "'prompt_logprobs' is only allowed when 'stream' is false."
            )
        return self

    @model_validator(mode="after")
    def _fitting_mode(self) -> Self:
        mode = self.speculation.mode if self.speculation else None
        if mode is None or (mode == "greedy") == (self.effective_temperature == 0.0):
            return self
        raise PydanticCustomError(
            "speculation.mode",
            "'speculation.mode' '{mode}' does not fit the temperature: 0 needs 'greedy', any "
            "other one of the other modes.",
            {"mode": mode},
        )

    @model_validator(mode="after")
    def _grammar_can_end(self) -> Self:
        """Where the grammar allows nothing more, only an EOS can come."""
        wanted = self.structured
        if wanted.response_format == {"type": "text"}:
            wanted = replace(wanted, response_format=None)
        if self.ignore_eos and wanted != StructuredFields():
            raise PydanticCustomError(
                "ignore_eos", "'ignore_eos' contradicts structured output, which ends by an EOS."
            )
        return self

    @property
    def structured(self) -> StructuredFields:
        """What the answer's form must be."""
        return StructuredFields(
            self.response_format,
            self.guided_json,
            self.guided_regex,
            self.guided_choice,
            self.guided_grammar,
            self.structured_outputs,
        )

    @property
    def effective_temperature(self) -> float:
        return 1.0 if self.temperature is None else self.temperature

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def max_tokens_param(self) -> str:
        """Under which name `requested_max_tokens` was given."""
        return "max_tokens"

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to show for each generated one; None for no logprobs at all."""
        raise NotImplementedError


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    neutral: ClassVar[Mapping[str, NeutralParameter]] = COMPLETION_NEUTRAL

    # One or more, each a text or its token ids.
    prompt: Annotated[list[str | list[int]], BeforeValidator(fields.prompts)]
    best_of: int | None = Field(None, ge=1, le=_MAX_INT32)
    echo: bool | None = None
    logprobs: Annotated[_Count, BeforeValidator(fields.false_is_none)] = None
    # 0 scores a prompt: nothing is generated, so something must be echoed.
    max_tokens: _Count = None

    @model_validator(mode="after")
    def _completion_rules(self) -> Self:
        if self.best_of not in (None, self.num_choices):
            raise PydanticCustomError("best_of", "'best_of' must equal 'n'; nothing is ranked.")
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "'max_tokens' 0 needs 'echo' to be true.")
        return self

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


BodyT = TypeVar("BodyT", bound=BaseModel)


def parse_body(raw: bytes, body_type: type[BodyT]) -> BodyT:
    """Raises RequestError (400) with one sentence about the first problem."""
    try:
        value = from_json(raw, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        # The parser's message has a position and never the input itself.
        reason = clip(str(error), MAX_SENTENCE_CHARS)
        raise RequestError(f"The body is not valid JSON: {reason}.", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.", None, "invalid_json")
    _check_names(raw)
    try:
        return body_type.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        raise _request_error(details) from None


def _check_names(raw: bytes) -> None:
    """Refuses objects with one name twice, or with very many: each unknown one costs time.

    RFC 8259 leaves the meaning of duplicates open; taking the last one would ignore the others.
    `raw` is known to be JSON, and not too deep for a parser that recurses. Numbers are not looked
    at: the parser would refuse long ones.
    """

    def unique(pairs: list[tuple[str, Any]]) -> None:
        if len(pairs) > MAX_NAMES:
            raise RequestError(
                f"An object in the body has more than {MAX_NAMES} names.", None, "too_many"
            )
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                name = clip(name, MAX_ECHO_CHARS)
                raise RequestError(
                    f"The body has '{name}' twice in one object.", name, "invalid_json"
                )
            names.add(name)

    json.loads(raw.decode(), object_pairs_hook=unique, parse_int=len, parse_float=len)


def _request_error(details: ErrorDetails) -> RequestError:
    param = clip(_path(details["loc"]), MAX_ECHO_CHARS)
    kind, reason = details["type"], reason_of(details)
    if kind == "extra_forbidden":
        return RequestError(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
    if kind == "missing":
        return RequestError(
            f"Missing required parameter: '{param}'.", param, "missing_required_parameter"
        )
    if kind == "unsupported_value":
        name = str(details["ctx"]["name"])
        param = clip(f"{param}.{name}" if param else name, MAX_ECHO_CHARS)
        return RequestError(clip(f"{reason}.", MAX_SENTENCE_CHARS), param, "unsupported_parameter")
    if not param:
        # A rule about several fields: its own sentence names them; its type is the first one.
        return RequestError(clip(f"{reason}.", MAX_SENTENCE_CHARS), kind, "invalid_value")
    sentence = f"Invalid '{param}': {reason}."
    return RequestError(clip(sentence, MAX_SENTENCE_CHARS), param, "invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    """messages, 0, content -> messages[0].content"""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path


def clip(text: str, max_chars: int) -> str:
    """At most so many characters, printable ones only: what a client sent may be anything."""
    shown = "".join(char if char.isprintable() else "?" for char in text[: max_chars + 1])
    return shown if len(shown) <= max_chars else shown[: max_chars - 3] + "..."
