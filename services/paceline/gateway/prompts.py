"""The prompts of a body as tokens that fit the model's context. Synchronous, as a tokenizer is.

Knows no sampling field, no target and no HTTP framework.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.errors import ContextLengthError, RequestError
from paceline.gateway import templates
from paceline.gateway.chat import ChatBody
from paceline.gateway.openai import CompletionBody, GenerationBody
from paceline.gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """`param`: what the client calls it; `text`: as the client wrote it, None for token ids and
    for messages."""

    param: str
    token_ids: list[int]
    text: str | None = None

    @property
    def name(self) -> str:
        """At the beginning of a sentence."""
        return f"'{self.param}'" if "[" in self.param else "The prompt"


class PromptReader:
    """For one served model. Every RequestError that it raises is a 400."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, max_messages: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_messages = max_messages

    def read(self, body: GenerationBody) -> Iterator[Prompt]:
        """All of them in order. None is empty, and each leaves room for a token."""
        if isinstance(body, ChatBody):
            yield self._checked(Prompt("messages", self._encode_chat(body)))
        elif isinstance(body, CompletionBody):
            for index, prompt in enumerate(body.prompt):
                param = "prompt" if body.num_prompts == 1 else f"prompt[{index}]"
                yield self._checked(self._encode_prompt(prompt, param))
        else:
            raise TypeError(f"no prompt in a {type(body).__name__}")

    def too_long(self, fact: str, param: str) -> ContextLengthError:
        return ContextLengthError(
            f"{fact}; the model's context is {self._max_model_len} tokens, prompt and answer "
            "together.",
            param,
            "context_length_exceeded",
        )

    def _checked(self, prompt: Prompt) -> Prompt:
        if not prompt.token_ids:
            raise RequestError(f"{prompt.name} must not be empty.", prompt.param, "invalid_value")
        if len(prompt.token_ids) >= self._max_model_len:
            fact = f"{prompt.name} has {len(prompt.token_ids)} tokens"
            raise self.too_long(fact, prompt.param)
        return prompt

    def _encode_chat(self, body: ChatBody) -> list[int]:
        if len(body.messages) > self._max_messages:
            limit = self._max_messages
            raise RequestError(f"At most {limit} messages are allowed.", "messages", "too_many")
        turns = body.turns
        functions = body.offer.functions if body.offer else ()
        written = [
            [turn.content or "", *(call.arguments for call in turn.tool_calls)] for turn in turns
        ]
        self._check_bytes(_num_bytes(written), "messages")
        self._check_bytes(_num_bytes(templates.tools(functions)), "tools")
        return self._tokenizer.encode_chat(turns, functions, body.chat_template_kwargs)

    def _encode_prompt(self, prompt: str | list[int], param: str) -> Prompt:
        if isinstance(prompt, str):
            self._check_bytes(len(prompt.encode()), param)
            return Prompt(param, self._tokenizer.encode(prompt), prompt)
        vocab_size = self._tokenizer.vocab_size
        if not all(0 <= token_id < vocab_size for token_id in prompt):
            raise RequestError(
                f"Token ids of a prompt must be from 0 to {vocab_size - 1}.",
                param,
                "invalid_value",
            )
        return Prompt(param, prompt)

    def _check_bytes(self, num_bytes: int, param: str) -> None:
        """Refuse what surely does not fit before it is tokenized."""
        if num_bytes > self._max_model_len * self._tokenizer.max_token_bytes:
            raise self.too_long(f"The prompt of {num_bytes} bytes is too long", param)


def _num_bytes(tree: list[Any]) -> int:
    """Of all strings in it."""
    return sum(len(text.encode()) for text in templates.strings(tree))
