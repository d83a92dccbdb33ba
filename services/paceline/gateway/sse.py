"""A streamed answer as server-sent events: one per round, as OpenAI's clients expect them.

Pure: bytes are returned, never sent. Order for each choice: role chunk (chat only), the prompt
(an echo), one chunk per round that has text or log-probabilities, finish chunk. Chunks of several
choices, of one prompt or of several, come as their rounds do. Last: usage chunk when asked for,
`[DONE]`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.errors import RequestError
from paceline.gateway.assembler import RoundText, Usage, total
from paceline.gateway.logprobs import TokenEntry
from paceline.gateway.plan import Endpoint, Plan
from paceline.gateway.responses import (
    Json,
    echo_logprobs_body,
    envelope,
    error_body,
    logprobs_body,
    part_delta,
    speculation_body,
    usage_body,
)

DONE = b"data: [DONE]\n\n"


# JSON lets these stand, but some clients split lines at them.
_LINE_BREAKS = str.maketrans({"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"})


def event(body: Json) -> bytes:
    """JSON escapes line feeds itself, so one `data:` line always suffices."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text.translate(_LINE_BREAKS)}\n\n".encode()


def error_event(error: RequestError) -> bytes:
    """How a stream that has begun fails. No `[DONE]` follows: the text is not whole."""
    return event(error_body(error))


class ChunkBuilder:
    """The events of one streamed answer. `usages` are each prompt's counts, which go on growing."""

    def __init__(self, plans: Sequence[Plan], created: int, usages: Sequence[Usage]) -> None:
        self._plan = plans[0]  # for what all prompts share
        self._usages = usages
        self._envelope = envelope(self._plan, created)
        if self._plan.include_usage:
            # OpenAI: then every other chunk says null.
            self._envelope["usage"] = None
        self._prompts = [PromptChunks(plan, self._envelope, usages) for plan in plans]
        self._num_open = self._plan.num_choices

    @property
    def is_whole(self) -> bool:
        """Every choice had its last round."""
        return self._num_open == 0

    def begin(self) -> bytes:
        return b"".join(chunks.begin() for chunks in self._prompts)

    def round(self, prompt: int, item: RoundText) -> bytes:
        """See `PromptChunks.round`."""
        self._num_open -= item.finish_reason is not None
        return self._prompts[prompt].round(item)

    def end(self) -> bytes:
        """When all is whole: usage chunk when asked for, [DONE]."""
        if not self._plan.include_usage:
            return DONE
        usage = usage_body(total(self._usages))
        return event(self._envelope | {"choices": [], "usage": usage}) + DONE


class PromptChunks:
    """The events of one prompt's choices."""

    def __init__(self, plan: Plan, shared: Json, usages: Sequence[Usage]) -> None:
        self._plan = plan
        self._envelope = shared
        self._usages = usages
        self._is_echo_due = [plan.echo is not None] * plan.request.n
        # An echo with log-probabilities waits for the prompt's, and so do the rounds behind it.
        self._scored: tuple[TokenEntry, ...] | None = None
        self._waiting: list[RoundText] = []

    def begin(self) -> bytes:
        """Chat streams open with the role, once for every choice."""
        if self._plan.endpoint is Endpoint.COMPLETIONS:
            return b""
        return b"".join(
            self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
            for index in range(self._plan.request.n)
        )

    def round(self, item: RoundText) -> bytes:
        """One round of one choice: its text, and in the choice's last one its finish chunk.

        A round that has nothing to show is silent, unless rounds are asked for. Slow for a round
        with `prompt_entries`: call it in a thread.
        """
        if item.prompt_entries is not None:
            self._scored = item.prompt_entries()
        self._waiting.append(item)
        needs_scores = self._plan.echo is not None and self._plan.num_logprobs is not None
        if needs_scores and self._scored is None:
            return b""
        ready, self._waiting = self._waiting, []
        return b"".join(self._events(item) for item in ready)

    def _events(self, item: RoundText) -> bytes:
        events = self._echo(item.choice)
        # Text that is not yet taken apart is nothing to show.
        is_told = item.text if item.parts is None else item.parts
        if is_told or item.entries or self._plan.include_rounds:
            extra: Json = {}
            if self._plan.include_rounds:
                extra["speculation"] = speculation_body(self._plan, [item])
            shown = logprobs_body(self._plan, item.entries) if item.entries else None
            extra |= self._usage_so_far()
            first, *others = self._shown(item)
            events += self._chunk(item.choice, first, shown, **extra)
            events += b"".join(
                self._chunk(item.choice, other, **self._usage_so_far()) for other in others
            )
        if item.finish_reason:
            is_chat = self._plan.endpoint is Endpoint.CHAT
            last: Json = {"delta": {}} if is_chat else {"text": ""}
            last |= {"finish_reason": item.finish_reason, "stop_reason": item.stop_reason}
            events += self._chunk(item.choice, last, **self._usage_so_far())
        return events

    def _shown(self, item: RoundText) -> list[Json]:
        """The choices of the round's chunks: one, or one for each part of the text."""
        if item.parts is None:
            return [self._text(item.text)]
        deltas = [part_delta(self._plan, item.choice, part) for part in item.parts]
        return [{"delta": delta} for delta in deltas or [{}]]

    def _usage_so_far(self) -> Json:
        if not self._plan.continuous_usage:
            return {}
        return {"usage": usage_body(total(self._usages))}

    def _echo(self, index: int) -> bytes:
        """The prompt, before anything else of the choice."""
        if not self._is_echo_due[index]:
            return b""
        self._is_echo_due[index] = False
        shown = echo_logprobs_body(self._plan, self._scored or ())
        return self._chunk(index, self._text(self._plan.echo or ""), shown)

    def _text(self, text: str) -> Json:
        if self._plan.endpoint is Endpoint.CHAT:
            return {"delta": {"content": text}}
        return {"text": text}

    def _chunk(self, index: int, choice: Json, logprobs: Json | None = None, **extra: Any) -> bytes:
        index += self._plan.first_choice
        fields = {"index": index, "logprobs": logprobs, "finish_reason": None, **choice}
        return event(self._envelope | {"choices": [fields]} | extra)
