"""Rounds of one choice in, text, log-probabilities and accounts out.

Pure. The target ends a sequence at an EOS, at a stop token or at max_tokens; a stop string ends it
here, at the token that completes it, whatever else happened in that round. Knows no HTTP, no
target and no other choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from paceline.gateway.logprobs import TokenBytes, TokenEntry, token_entry
from paceline.gateway.output_parser import OutputFormat, OutputParser, Part
from paceline.gateway.text import Segment, TextStream, TokenDecoder
from paceline.generation import FinishReason, RoundDelta


class Vocabulary(TokenDecoder, TokenBytes, Protocol):
    """What an answer needs from a tokenizer."""


# As clients see it: the target knows nothing of calls.
ShownFinishReason = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True, slots=True)
class RoundText:
    """What one round adds to one choice of the answer.

    `finish_reason` is set in the choice's last round, and then `stop_reason` is the stop string
    or the client's stop token id that ended it, None for an EOS or the length. `entries`, when
    log-probabilities were asked for: one for every token that counts, those of a stop string and
    an EOS included. `prompt_entries`, only in the first round of choice 0 of a request that asked
    for the prompt's: makes them (slow for a long prompt; call it in a thread). `parts`: the text
    taken apart, where it may hold more than content; it may lag behind the segments.
    """

    delta: RoundDelta
    segments: tuple[Segment, ...]
    finish_reason: ShownFinishReason | None
    stop_reason: str | int | None = None
    entries: tuple[TokenEntry, ...] = ()
    prompt_entries: Callable[[], tuple[TokenEntry, ...]] | None = None
    parts: tuple[Part, ...] | None = None

    @property
    def choice(self) -> int:
        return self.delta.choice

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


@dataclass(slots=True)
class Usage:
    """Counts so far, each prompt once and all choices together.

    `num_completion_tokens` ends at the token that completed a stop string, and includes an EOS;
    rounds, proposals and acceptances are those of the target, whole rounds.
    """

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted of proposed; 0 when nothing was proposed."""
        if not self.num_draft_tokens:
            return 0.0
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def mean_acceptance_length(self) -> float:
        """Accepted tokens per target pass, plus the one that the target adds itself."""
        if not self.num_rounds:
            return 0.0
        return 1.0 + self.num_accepted_tokens / self.num_rounds


def total(usages: Sequence[Usage]) -> Usage:
    """Of several prompts."""
    return Usage(
        sum(usage.num_prompt_tokens for usage in usages),
        sum(usage.num_cached_tokens for usage in usages),
        sum(usage.num_completion_tokens for usage in usages),
        sum(usage.num_rounds for usage in usages),
        sum(usage.num_draft_tokens for usage in usages),
        sum(usage.num_accepted_tokens for usage in usages),
    )


@dataclass(frozen=True, slots=True)
class EndRules:
    """Besides stop strings: what a choice's end depends on and how it looks.

    No stop string ends a choice within the text of its first `min_tokens` tokens.
    `includes_stop`: the stop string, or the token that ended the choice, is part of the text.
    `stop_token_ids` are the client's; the target obeys them, here they are only recognized.
    `output`: what the text may hold. `names_calls`: a choice that made a call and was not cut off
    ends by "tool_calls" (not where the client chose the call itself).
    """

    min_tokens: int = 0
    includes_stop: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    output: OutputFormat = field(default_factory=OutputFormat)
    names_calls: bool = True


class Assembler:
    """One choice as it grows. `usage` may be shared by the choices of one request."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Sequence[str],
        num_prompt_tokens: int,
        rules: EndRules = EndRules(),
        num_logprobs: int | None = None,
        usage: Usage | None = None,
    ) -> None:
        self._text = TextStream(vocabulary, stops, rules.min_tokens, rules.includes_stop)
        self._vocabulary = vocabulary
        self._rules = rules
        self._num_logprobs = num_logprobs
        self.usage = usage or Usage(num_prompt_tokens)
        self._parser = None if rules.output.is_plain else OutputParser(rules.output)
        self.finish_reason: ShownFinishReason | None = None

    def receive_round(self, delta: RoundDelta) -> RoundText:
        """Call for every round until `finish_reason` is set, never after."""
        self.usage.num_rounds += 1
        self.usage.num_draft_tokens += delta.num_draft_tokens
        self.usage.num_accepted_tokens += delta.num_accepted_tokens
        segments, entries = self._receive_tokens(delta)
        if delta.finish_reason and not self._text.is_stopped:
            segments += self._text.finish()
        self.finish_reason = "stop" if self._text.is_stopped else delta.finish_reason
        parts = self._parts(segments) if self._parser else None
        return RoundText(
            delta,
            tuple(segments),
            self.finish_reason,
            self._stop_reason(delta),
            tuple(entries),
            parts=parts,
        )

    def _parts(self, segments: Sequence[Segment]) -> tuple[Part, ...]:
        assert self._parser is not None
        parts = self._parser.push("".join(segment.text for segment in segments))
        if self.finish_reason:
            parts += self._parser.finish()
            is_called = self._parser.num_calls > 0 and not self._parser.is_call_open
            if is_called and self._rules.names_calls and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        return tuple(parts)

    def _receive_tokens(self, delta: RoundDelta) -> tuple[list[Segment], list[TokenEntry]]:
        # A sequence that the target ended by "stop" ends in its EOS, which is counted but is no
        # text, even where the tokenizer would print it.
        is_silent_end = delta.finish_reason == "stop" and not self._rules.includes_stop
        num_text_tokens = len(delta.token_ids) - is_silent_end
        segments: list[Segment] = []
        entries: list[TokenEntry] = []
        for index, (token_id, origin) in enumerate(
            zip(delta.token_ids, delta.origins, strict=True)
        ):
            self.usage.num_completion_tokens += 1
            if self._num_logprobs is not None:
                entries.append(self._entry(delta, index, self._num_logprobs))
            if index < num_text_tokens:
                segments += self._text.push(token_id, origin, delta.source)
            if self._text.is_stopped:
                break
        return segments, entries

    def _entry(self, delta: RoundDelta, index: int, num_top: int) -> TokenEntry:
        scored = delta.logprobs[index]
        return token_entry(scored, num_top, self._text.num_chars, self._vocabulary)

    def _stop_reason(self, delta: RoundDelta) -> str | int | None:
        if self._text.stop is not None or delta.finish_reason != "stop":
            return self._text.stop
        last = delta.token_ids[-1] if delta.token_ids else None
        return last if last in self._rules.stop_token_ids else None
