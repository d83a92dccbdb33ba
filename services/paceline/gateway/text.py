"""Token ids to text, a token at a time, and where the text must end.

Pure. Knows no HTTP, no model and no tokenizer library: a `TokenDecoder` is any object that turns
a list of ids into text. Two stages, both invisible in the result: the concatenation of what is
emitted does not depend on how the tokens were grouped into rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.generation import TokenOrigin
from paceline.methods import ProposalSource

REPLACEMENT = "\ufffd"

# An unfinished UTF-8 character is at most 3 bytes, and every token of a window is at least one
# byte: 4 tokens always hold all of it, with the byte before. A window may grow to twice that
# before it is cut, so that a cut (one more decode) happens only every few tokens.
_TAIL_TOKENS = 4
_MAX_PENDING_TOKENS = 2 * _TAIL_TOKENS


class TokenDecoder(Protocol):
    """What the detokenizer needs from a tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, undecodable bytes as U+FFFD; special ids write nothing."""

    def is_special(self, token_id: int) -> bool:
        """Whether the id never writes text (control tokens, ids without an entry)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text and why its token is what it is; `source` proposed it, where it was accepted.
    Text that several tokens wrote together (an emoji of three) is of the one that completed it."""

    text: str
    origin: TokenOrigin
    source: ProposalSource = ""

    def is_like(self, other: Segment) -> bool:
        return (self.origin, self.source) == (other.origin, other.source)


class IncrementalDetokenizer:
    """Decodes a growing sequence with a bounded window, as vLLM and TGI do.

    A token's text depends on its neighbours (sentencepiece drops a leading space at the start,
    byte-level tokens may hold half a character), so the window always keeps the tokens of the
    previous emission as context: text = decode(window)[_num_emitted:].
    Text that ends in U+FFFD may be an unfinished character and waits; when it has waited longer
    than any character can, it is garbage, and all but the last U+FFFD is final.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        # Invariant: window[:_num_context] wrote the last emission (or precedes the first one).
        self._num_context = 0
        # Invariant: the first _num_emitted characters of decode(window) have been emitted.
        self._num_emitted = 0
        # Whole characters that wait because an unfinished one follows them.
        self.num_waiting = 0

    def push(self, token_id: int) -> str:
        """Text that became final with this token, often none."""
        if self._decoder.is_special(token_id):
            return ""
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        self.num_waiting = 0
        if text.endswith(REPLACEMENT):
            return self._settle_garbage(text)
        emitted = text[self._num_emitted :]
        if emitted:
            self._slide()
        return emitted

    def finish(self) -> str:
        """The rest, an unfinished character as U+FFFD. Push nothing afterwards."""
        text = self._decoder.decode(self._window) if self._window else ""
        return text[self._num_emitted :]

    def _slide(self) -> None:
        """Everything is emitted: the newest tokens become the context, older ones go."""
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        self._num_emitted = len(self._decoder.decode(self._window))

    def _settle_garbage(self, text: str) -> str:
        if len(self._window) - self._num_context <= _MAX_PENDING_TOKENS:
            self.num_waiting = len(text[self._num_emitted :].rstrip(REPLACEMENT))
            return ""
        emitted = text[self._num_emitted : -1]
        del self._window[:-_TAIL_TOKENS]
        self._num_context = 0
        # Both windows end in the same U+FFFD; everything before it is out.
        self._num_emitted = max(len(self._decoder.decode(self._window)) - 1, 0)
        return emitted


class _StopMatcher:
    """Knuth-Morris-Pratt over one stop string, a character at a time.

    Invariant: `num_matched` < len(stop) is the length of the longest suffix of the text so far
    that begins the stop string (and is not all of it).
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._fallback = _failure_table(stop)
        self.num_matched = 0

    def advance(self, char: str) -> bool:
        """True when this character completes the stop string."""
        matched = self.num_matched
        while matched and self.stop[matched] != char:
            matched = self._fallback[matched - 1]
        if self.stop[matched] == char:
            matched += 1
        is_complete = matched == len(self.stop)
        self.num_matched = self._fallback[-1] if is_complete else matched
        return is_complete


def _failure_table(stop: str) -> list[int]:
    """table[i]: length of the longest proper border of stop[: i + 1]."""
    table = [0] * len(stop)
    matched = 0
    for index in range(1, len(stop)):
        while matched and stop[matched] != stop[index]:
            matched = table[matched - 1]
        if stop[matched] == stop[index]:
            matched += 1
        table[index] = matched
    return table


class StopStringFilter:
    """Lets text through up to the first stop string, wherever chunk borders fall.

    The stop that is *completed* first wins, of several completed by one character the longest:
    that rule does not depend on chunking. Held back is exactly the longest suffix that may still
    become a stop string. The stop string itself goes out only with `includes_stop`.
    """

    def __init__(self, stops: Sequence[str], includes_stop: bool = False) -> None:
        self._matchers = [_StopMatcher(stop) for stop in stops]
        self._includes_stop = includes_stop
        self._held: deque[Segment] = deque()
        self._num_held = 0
        self.stop: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    def push(self, segment: Segment, can_stop: bool = True) -> list[Segment]:
        """Segments that may go out now. After a stop: nothing, ever.

        Without `can_stop` no stop string ends in this segment; one that begins in it may end in
        a later one.
        """
        if self.is_stopped or not segment.text:
            return []
        if not self._matchers:
            return [segment]
        num_read = self._scan(segment.text, can_stop)
        self._hold(replace(segment, text=segment.text[:num_read]))
        if self.stop is None:
            keep = max(matcher.num_matched for matcher in self._matchers)
            return self._release(self._num_held - keep)
        released = self._release(self._num_held - len(self.stop) * (not self._includes_stop))
        self._held.clear()
        self._num_held = 0
        return released

    def finish(self) -> list[Segment]:
        """What was held back: the text ended before it became a stop string."""
        return self._release(self._num_held)

    def _scan(self, text: str, can_stop: bool) -> int:
        """Advance over the text; returns how many characters were read (all, or to a stop)."""
        for num_read, char in enumerate(text, start=1):
            completed = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if completed and can_stop:
                self.stop = max(completed, key=len)
                return num_read
        return len(text)

    def _hold(self, segment: Segment) -> None:
        self._held.append(segment)
        self._num_held += len(segment.text)

    def _release(self, num_chars: int) -> list[Segment]:
        """Take the oldest `num_chars` characters out of what is held."""
        self._num_held -= num_chars
        released: list[Segment] = []
        while num_chars > 0:
            segment = self._held.popleft()
            if len(segment.text) > num_chars:
                self._held.appendleft(replace(segment, text=segment.text[num_chars:]))
                segment = replace(segment, text=segment.text[:num_chars])
            released.append(segment)
            num_chars -= len(segment.text)
        return released


class TextStream:
    """Both stages together: tokens with origins in, segments out.

    As in vLLM, a stop string ends nothing as long as it is complete within the text of the first
    `min_tokens` tokens.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        stops: Sequence[str],
        min_tokens: int = 0,
        includes_stop: bool = False,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(decoder)
        self._filter = StopStringFilter(stops, includes_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        # Of the last token; its text is not there yet.
        self._last = Segment("", TokenOrigin.PLAIN)
        self._num_chars = 0

    @property
    def num_chars(self) -> int:
        """Characters written so far, held back or not: where the next token's text begins."""
        return self._num_chars + self._detokenizer.num_waiting

    @property
    def stop(self) -> str | None:
        """The stop string that is complete; all text after it is dropped."""
        return self._filter.stop

    @property
    def is_stopped(self) -> bool:
        return self._filter.is_stopped

    def push(
        self, token_id: int, origin: TokenOrigin, source: ProposalSource = ""
    ) -> list[Segment]:
        """`source`: what made the proposals of the token's round."""
        self._last = Segment("", origin, source if origin is TokenOrigin.ACCEPTED else "")
        self._num_tokens += 1
        return self._filter_text(self._detokenizer.push(token_id))

    def finish(self) -> list[Segment]:
        """The end without a stop string so far; the last bytes may still complete one."""
        return self._filter_text(self._detokenizer.finish()) + self._filter.finish()

    def _filter_text(self, text: str) -> list[Segment]:
        self._num_chars += len(text)
        can_stop = self._num_tokens > self._min_tokens
        return self._filter.push(replace(self._last, text=text), can_stop)
