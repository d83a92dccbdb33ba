"""Rounds of one request in, text and accounts out.

Pure. The target ends a sequence at an EOS or at max_tokens; a stop string ends it here, at the
token that completes it, whatever else happened in that round. Knows no HTTP and no target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.gateway.text import Segment, TextStream, TokenDecoder
from paceline.generation import FinishReason, RoundDelta


@dataclass(frozen=True, slots=True)
class RoundText:
    """What one round adds to the answer; `finish_reason` is set in the last one."""

    delta: RoundDelta
    segments: tuple[Segment, ...]
    finish_reason: FinishReason | None

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


@dataclass(slots=True)
class Usage:
    """Counts so far. `num_completion_tokens` ends at the token that completed a stop string, and
    includes an EOS; rounds, proposals and acceptances are those of the target, whole rounds."""

    num_prompt_tokens: int
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


class Assembler:
    """One request's answer as it grows."""

    def __init__(self, decoder: TokenDecoder, stops: Sequence[str], num_prompt_tokens: int) -> None:
        self._text = TextStream(decoder, stops)
        self.usage = Usage(num_prompt_tokens)
        self.finish_reason: FinishReason | None = None

    def receive_round(self, delta: RoundDelta) -> RoundText:
        """Call for every round until `finish_reason` is set, never after."""
        self.usage.num_rounds += 1
        self.usage.num_draft_tokens += delta.num_draft_tokens
        self.usage.num_accepted_tokens += delta.num_accepted_tokens
        segments = self._receive_tokens(delta)
        if delta.finish_reason and not self._text.is_stopped:
            segments += self._text.finish()
        self.finish_reason = "stop" if self._text.is_stopped else delta.finish_reason
        return RoundText(delta, tuple(segments), self.finish_reason)

    def _receive_tokens(self, delta: RoundDelta) -> list[Segment]:
        # A sequence that the target ended by "stop" ends in its EOS, which is counted but is no
        # text, even where the tokenizer would print it.
        num_text_tokens = len(delta.token_ids) - (delta.finish_reason == "stop")
        segments: list[Segment] = []
        for index, (token_id, origin) in enumerate(
            zip(delta.token_ids, delta.origins, strict=True)
        ):
            self.usage.num_completion_tokens += 1
            if index < num_text_tokens:
                segments += self._text.push(token_id, origin)
            if self._text.is_stopped:
                break
        return segments
