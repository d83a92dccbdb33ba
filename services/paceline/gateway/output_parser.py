"""The text of one choice, taken apart as it grows: reasoning, content and tool calls.

Pure. Whatever a model writes is kept: what is no call of an offered function stays content. How
the text is cut into pieces does not matter: the parts of any two cuts, joined, are the same.
Knows no token, request or HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.gateway.json_scan import ObjectScanner
from paceline.gateway.tools import ToolFormat

THINK_BEGIN, THINK_END = "<think>", "</think>"
_CALL_BEGIN, _CALL_END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
# A call up to the brace that opens its arguments. Other spellings are read when the call is whole.
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
# Longer than any head with sensible whitespace: beyond it nobody looks for one.
_MAX_HEAD_CHARS = 512


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Call number `index` of the choice; its arguments follow in pieces."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """`tool_format` None: calls are not looked for. `has_reasoning`: text up to `</think>` is
    reasoning; it begins with `<think>` or, with `begins_in_reasoning`, at once."""

    tool_format: ToolFormat | None = None
    tool_names: frozenset[str] = frozenset()
    has_reasoning: bool = False
    begins_in_reasoning: bool = False

    @property
    def is_plain(self) -> bool:
        return self.tool_format is None and not self.has_reasoning


class OutputParser:
    """Push text, take parts; `finish` gives what was still undecided."""

    def __init__(self, form: OutputFormat) -> None:
        self._form = form
        self._text = ""  # not yet decided
        self._space = ""  # content's whitespace, which a call behind it makes meaningless
        self._opened = ""  # what stood before a Llama call, content where none follows
        self._has_content = False
        self.num_calls = 0
        self._scanner: ObjectScanner | None = None
        self._step: Callable[[], Iterator[Part] | None] = self._first_step()

    def push(self, text: str) -> list[Part]:
        self._text += text
        return list(self._run())

    def finish(self) -> list[Part]:
        parts = list(self._run())
        left, self._text = self._text, ""
        if self._step == self._thinking_space:
            left = left.lstrip()
        if self._step in (self._thinking_space, self._thinking):
            return parts + ([Reasoning(left.rstrip())] if left.strip() else [])
        if self._step == self._hermes_call:
            whole = self._whole_call(left)
            if whole is not None:
                return parts + whole
            left = _CALL_BEGIN + left
        elif self._step == self._llama_call:
            whole = self._whole_call(left)
            if whole is not None:
                return parts + whole
            left = self._opened + left
        elif self._step in (self._hermes_arguments, self._llama_arguments):
            return parts + self._arguments(left)
        elif self._step in (self._hermes_tail, self._llama_tail) and not left.strip("} \t\r\n;"):
            return parts
        if self._space and (left or not self.num_calls):
            left, self._space = self._space + left, ""
        return parts + ([Content(left)] if left and (left.strip() or not self.num_calls) else [])

    @property
    def is_call_open(self) -> bool:
        """Whether the arguments of the last call are not whole yet."""
        return self._step in (self._hermes_arguments, self._llama_arguments)

    def _run(self) -> Iterator[Part]:
        while (parts := self._step()) is not None:
            yield from parts

    # Each step decides what it can. It returns parts, and maybe sets another step, or None when
    # it needs more text.

    def _first_step(self) -> Callable[[], Iterator[Part] | None]:
        if self._form.begins_in_reasoning:
            return self._thinking_space
        return self._opening if self._form.has_reasoning else self._answer_step()

    def _answer_step(self) -> Callable[[], Iterator[Part] | None]:
        if self._form.tool_format is ToolFormat.HERMES:
            return self._hermes_content
        if self._form.tool_format is ToolFormat.LLAMA3_JSON:
            return self._llama_opening
        return self._content

    def _opening(self) -> Iterator[Part] | None:
        """Whether the text begins with `<think>`."""
        begun = self._text.lstrip()
        if begun.startswith(THINK_BEGIN):
            self._text = begun[len(THINK_BEGIN) :]
            self._step = self._thinking_space
            return iter(())
        if THINK_BEGIN.startswith(begun):
            return None
        self._step = self._answer_step()
        return iter(())

    def _thinking_space(self) -> Iterator[Part] | None:
        """Whitespace before the first thought is no part of it, and a `<think>` is said once."""
        begun = self._text.lstrip()
        if begun.startswith(THINK_BEGIN):
            begun = begun[len(THINK_BEGIN) :].lstrip()
        if not begun or THINK_BEGIN.startswith(begun):
            return None
        self._text, self._step = begun, self._thinking
        return iter(())

    def _thinking(self) -> Iterator[Part] | None:
        before, marker, after = self._text.partition(THINK_END)
        if marker:
            self._text, self._step = after, self._answer_space
            shown = before.rstrip()
            return iter([Reasoning(shown)] if shown else [])
        # What may begin the marker waits, and so does whitespace, which may come right before it.
        shown = before[: len(before) - _num_held(before, THINK_END)].rstrip()
        if not shown:
            return None
        self._text = before[len(shown) :]
        return iter([Reasoning(shown)])

    def _answer_space(self) -> Iterator[Part] | None:
        self._text = self._text.lstrip()
        if not self._text:
            return None
        self._step = self._answer_step()
        return iter(())

    def _content(self) -> Iterator[Part] | None:
        if not self._text:
            return None
        text, self._text = self._text, ""
        return iter([Content(text)])

    def _hermes_content(self) -> Iterator[Part] | None:
        before, marker, after = self._text.partition(_CALL_BEGIN)
        if marker:
            self._text, self._step = after, self._hermes_call
            return self._spaced(before)
        shown = before[: len(before) - _num_held(before, _CALL_BEGIN)]
        if not shown:
            return None
        self._text = before[len(shown) :]
        return self._spaced(shown)

    def _spaced(self, text: str) -> Iterator[Part]:
        """Content, whose whitespace at the end waits for more content."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._has_content = True
            yield Content(shown)

    def _hermes_call(self) -> Iterator[Part] | None:
        if head := self._head():
            self._step = self._hermes_arguments
            return self._begin_call(head)
        body, marker, after = self._text.partition(_CALL_END)
        if not marker:
            return None
        self._text, self._step = after, self._hermes_content
        whole = self._whole_call(body)
        if whole is None:
            return self._spaced(_CALL_BEGIN + body + _CALL_END)
        return iter(whole)

    def _head(self) -> re.Match[str] | None:
        head = _HEAD.match(self._text, 0, _MAX_HEAD_CHARS)
        return head if head and head[1] in self._form.tool_names else None

    def _begin_call(self, head: re.Match[str]) -> Iterator[Part]:
        self._text = self._text[head.end() :]
        self._scanner = ObjectScanner()
        self._space = ""
        index, self.num_calls = self.num_calls, self.num_calls + 1
        return iter([CallBegin(index, head[1])])

    def _whole_call(self, text: str) -> list[Part] | None:
        """The parts of a call that has all its text; None if it is not one."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or call.get("name") not in self._form.tool_names:
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(arguments, dict) or not set(call) <= {"name", "arguments", "parameters"}:
            return None
        self._space = ""
        index, self.num_calls = self.num_calls, self.num_calls + 1
        return [
            CallBegin(index, call["name"]),
            CallArguments(index, json.dumps(arguments, ensure_ascii=False)),
        ]

    def _hermes_arguments(self) -> Iterator[Part] | None:
        return self._next_arguments(self._hermes_tail)

    def _llama_arguments(self) -> Iterator[Part] | None:
        return self._next_arguments(self._llama_tail)

    def _next_arguments(self, then: Callable[[], Iterator[Part] | None]) -> Iterator[Part] | None:
        assert self._scanner is not None
        if not self._text:
            return None
        num_read = self._scanner.read(self._text)
        text, self._text = self._text[:num_read], self._text[num_read:]
        if self._scanner.is_closed:
            self._step = then
        return iter(self._arguments(text))

    def _arguments(self, text: str) -> list[Part]:
        return [CallArguments(self.num_calls - 1, text)] if text else []

    def _hermes_tail(self) -> Iterator[Part] | None:
        """Behind the arguments: a brace and the end marker; anything else is content."""
        before, marker, after = self._text.partition(_CALL_END)
        if not marker:
            return None
        self._text, self._step = after, self._hermes_content
        rest = before.strip()
        return iter(()) if rest == "}" else self._spaced(rest)

    def _llama_opening(self) -> Iterator[Part] | None:
        begun = self._text.lstrip()
        if begun.startswith(_PYTHON_TAG):
            begun = begun[len(_PYTHON_TAG) :].lstrip()
        if not begun or _PYTHON_TAG.startswith(begun):
            return None
        if begun[0] != "{":
            self._step = self._content
            return iter(())
        self._opened = self._text[: len(self._text) - len(begun)]
        self._text, self._step = begun, self._llama_call
        return iter(())

    def _llama_call(self) -> Iterator[Part] | None:
        if head := self._head():
            self._step = self._llama_arguments
            return self._begin_call(head)
        if len(self._text) < _MAX_HEAD_CHARS:
            return None
        self._text, self._step = self._opened + self._text, self._content
        return iter(())

    def _llama_tail(self) -> Iterator[Part] | None:
        """A brace; then nothing, or a semicolon and another call, or content."""
        rest = self._text.lstrip()
        if not rest.startswith("}"):
            if not rest:
                return None
            self._step = self._content
            return iter(())
        after = rest[1:].lstrip()
        if not after or after == ";":
            return None
        following = after.removeprefix(";").lstrip()
        if after[0] == ";" and not following:
            return None
        if after[0] == ";" and following[0] == "{":
            self._opened = after[: len(after) - len(following)]
            self._text, self._step = following, self._llama_call
        else:
            self._text, self._step = after, self._content
        return iter(())


def _num_held(text: str, marker: str) -> int:
    """Length of the longest end of the text that may begin the marker."""
    for num in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-num:]):
            return num
    return 0
