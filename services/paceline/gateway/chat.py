"""POST /v1/chat/completions: messages, tools and the choice among them, validated.

Pure. Knows no chat template: whether a model can use tools is for its tokenizer to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.gateway import fields
from paceline.gateway.openai import Body, GenerationBody
from paceline.gateway.parameters import (
    CHAT_NEUTRAL,
    MESSAGE_NEUTRAL,
    NeutralParameter,
    drop_neutral,
)
from paceline.gateway.tools import MAX_TOOLS, FunctionSpec, ToolCall, ToolMode, is_too_deep

FUNCTION_NAME = r"^[A-Za-z0-9_-]{1,64}$"
MAX_TEMPLATE_KWARGS = 16
_MAX_ID_CHARS = 256


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn as a chat template gets it; `content` is None only beside tool calls."""

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The functions that the model may call (AUTO) or must call (REQUIRED, NAMED: the one)."""

    functions: tuple[FunctionSpec, ...]
    mode: ToolMode
    is_parallel: bool


class FunctionCallBody(Body):
    name: str = Field(pattern=FUNCTION_NAME)
    arguments: str

    @property
    def parsed_arguments(self) -> dict[str, Any] | None:
        """None where they are no JSON object. Some clients write nothing for none."""
        value = fields.json_or_none(self.arguments) if self.arguments else {}
        return value if isinstance(value, dict) else None

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> Self:
        if self.parsed_arguments is None:
            raise PydanticCustomError(
                "arguments", "'arguments' must be a JSON object, written as a string."
            )
        return self


class ToolCallBody(Body):
    id: str = Field(max_length=_MAX_ID_CHARS)
    type: Literal["function"]
    function: FunctionCallBody
    # The streaming form has it, and clients keep it.
    index: int | None = None


class FunctionBody(Body):
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _shallow(self) -> Self:
        if is_too_deep(self.parameters):
            raise PydanticCustomError("parameters", "'parameters' is nested too deep.")
        return self


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody


class MessageBody(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(fields.content)] = None
    name: str | None = Field(None, max_length=_MAX_ID_CHARS)
    tool_calls: Annotated[list[ToolCallBody], BeforeValidator(fields.null_is_empty)] = Field(
        [], max_length=MAX_TOOLS
    )
    tool_call_id: str | None = Field(None, max_length=_MAX_ID_CHARS)
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _neutral_fields(cls, body: object) -> object:
        return drop_neutral(body, MESSAGE_NEUTRAL)

    @model_validator(mode="after")
    def _fitting_fields(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError(
                "tool_calls", "Only messages of the assistant have 'tool_calls'."
            )
        if (self.tool_call_id is None) is (self.role == "tool"):
            raise PydanticCustomError(
                "tool_call_id", "Messages of role 'tool', and no others, need a 'tool_call_id'."
            )
        if self.reasoning_content is not None and self.role != "assistant":
            raise PydanticCustomError(
                "reasoning_content", "Only messages of the assistant have 'reasoning_content'."
            )
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("content", "It needs a 'content'.")
        return self

    def as_message(self) -> ChatMessage:
        calls = tuple(
            ToolCall(call.id, call.function.name, call.function.parsed_arguments or {})
            for call in self.tool_calls
        )
        return ChatMessage(
            self.role, self.content, self.name, calls, self.tool_call_id, self.reasoning_content
        )


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, NeutralParameter]] = CHAT_NEUTRAL

    # The first bad message is the only one that is reported: do not look for half a million.
    messages: list[MessageBody] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    tools: Annotated[list[ToolBody], BeforeValidator(fields.null_is_empty)] = Field(
        [], max_length=MAX_TOOLS, fail_fast=True
    )
    tool_choice: Annotated[
        tuple[str, tuple[str, ...]] | None, BeforeValidator(fields.tool_choice)
    ] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=MAX_TEMPLATE_KWARGS)

    @model_validator(mode="after")
    def _logprobs_are_asked_for(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true."
            )
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise PydanticCustomError(
                "max_tokens", "'max_tokens' and 'max_completion_tokens' contradict each other."
            )
        return self

    @model_validator(mode="after")
    def _known_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "Two of the 'tools' have the same name.")
        mode, chosen = self.tool_choice or ("auto", ())
        if mode not in ("auto", "none") and not self.tools:
            raise PydanticCustomError("tool_choice", "'tool_choice' needs 'tools'.")
        if not set(chosen) <= set(names):
            raise PydanticCustomError(
                "tool_choice", "'tool_choice' names a function that is not among the 'tools'."
            )
        return self

    @model_validator(mode="after")
    def _calls_can_end(self) -> Self:
        """As `_grammar_can_end`: a call that must come, and a limit of one, are grammars."""
        is_held = any(tool.function.strict for tool in self.tools)
        offer = self.offer
        if offer is None or not self.ignore_eos:
            return self
        if offer.mode is not ToolMode.AUTO or not offer.is_parallel or is_held:
            raise PydanticCustomError(
                "ignore_eos", "'ignore_eos' contradicts these 'tools': calls end by an EOS."
            )
        return self

    @model_validator(mode="after")
    def _answers_of_calls(self) -> Self:
        called: set[str] = set()
        for message in self.messages:
            called.update(call.id for call in message.tool_calls)
            if message.tool_call_id is not None and message.tool_call_id not in called:
                raise PydanticCustomError(
                    "messages", "One of the 'messages', of role 'tool', answers no call before it."
                )
        return self

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_tokens_param(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def turns(self) -> list[ChatMessage]:
        return [message.as_message() for message in self.messages]

    @property
    def offer(self) -> ToolOffer | None:
        """None when the model shall know of no function."""
        mode, chosen = self.tool_choice or ("auto", ())
        if not self.tools or mode == "none":
            return None
        functions = tuple(
            FunctionSpec(
                tool.function.name,
                tool.function.parameters,
                bool(tool.function.strict),
                tool.function.description or "",
            )
            for tool in self.tools
            if not chosen or tool.function.name in chosen
        )
        return ToolOffer(functions, ToolMode(mode), self.parallel_tool_calls is not False)
