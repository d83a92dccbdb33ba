"""From the tokens of a target to those of a draft whose tokenizer is another one.

Two tokens are the same when they write the same bytes, or are control tokens of the same spelling.
Only those that both have can be proposed (token-level intersection, TLI: Timor et al. 2025,
"Accelerating LLM inference with lossless speculative decoding algorithms for heterogeneous
vocabularies"). What the draft reads may be anything, so it reads its own tokenizer's cut of the
same text. Pure; knows no model, no tensor and no sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from paceline.engine.vocabulary import Vocabulary
from paceline.errors import ConfigError

# With fewer common tokens a draft proposes next to nothing; a byte-level pair has its bytes alone.
MIN_COMMON_TOKENS = 300
# A draft announces so much less cache and context than it has: a translation may be longer than its
# text. English and code need 1.05 to 1.15 tokens of SmolLM2 for one of Qwen2.5; other languages may
# need more than this, and such a text goes without a draft where there is no room.
EXPANSION = 1.25


@dataclass(frozen=True, slots=True)
class Overlap:
    """`num_common` tokens of two vocabularies with so many tokens each, control tokens included."""

    num_common: int
    num_draft: int
    num_target: int

    @property
    def draft_share(self) -> float:
        return self.num_common / self.num_draft

    @property
    def target_share(self) -> float:
        return self.num_common / self.num_target


@dataclass(slots=True)
class Translated:
    """`token_ids` of the draft for some tokens of the target, and where both may be cut: the first
    `marks[i]` tokens of the target are the first `places[i]` of the draft. Both ascend; the last
    pair is the whole."""

    token_ids: list[int]
    marks: list[int]
    places: list[int]


class Translation:
    """Between the tokenizers of a draft and a target; `ConfigError` when they share too little.

    `draft_ids[i]` and `target_ids[i]` are the same token; ascending in the target's ids. Ids of the
    draft beyond `allowed_draft_ids` (None: all) and of the target from `target_size` on are none.
    """

    def __init__(
        self,
        draft: Vocabulary,
        target: Vocabulary,
        *,
        target_size: int | None = None,
        allowed_draft_ids: Collection[int] | None = None,
    ) -> None:
        self.target_size = target.size if target_size is None else target_size
        self._draft, self._target = draft, target
        special = {
            target.specials[text]: draft.specials[text]
            for text in target.specials.keys() & draft.specials.keys()
        }
        ordinary = _by_bytes(draft)
        found = {
            token_id: ordinary[data]
            for data, token_id in _by_bytes(target).items()
            if data in ordinary
        }
        pairs = sorted((found | special).items())
        if allowed_draft_ids is not None:
            allowed = frozenset(allowed_draft_ids)
            pairs = [pair for pair in pairs if pair[1] in allowed]
        pairs = [pair for pair in pairs if pair[0] < self.target_size]
        self.target_ids = tuple(pair[0] for pair in pairs)
        self.draft_ids = tuple(pair[1] for pair in pairs)
        self._special = special
        self._one: dict[int, tuple[int, ...]] = {}  # at most one entry for each id of the target
        self.overlap = Overlap(len(pairs), _num_tokens(draft), _num_tokens(target))
        if len(pairs) < MIN_COMMON_TOKENS:
            raise ConfigError(
                f"the tokenizers have {len(pairs)} tokens in common, and a draft needs"
                f" {MIN_COMMON_TOKENS}: name another draft"
            )

    def share_of(self, text: str) -> float:
        """Of the target's tokens of a text, how many could be proposed."""
        token_ids, common = self._target.encode(text.encode()), frozenset(self.target_ids)
        return sum(token_id in common for token_id in token_ids) / max(1, len(token_ids))

    def translate(
        self, token_ids: Sequence[int], *, num_apart: int = 0, is_start: bool = False
    ) -> Translated:
        """What the draft reads for tokens of the target: at least one id for each of them.

        Runs of text are cut as the draft's tokenizer cuts them. Each of the last `num_apart` tokens
        is translated on its own, so that all of them may be cut apart. `is_start`: nothing is
        before them.
        """
        made = Translated([], [], [])
        if is_start:
            begin = self._draft.bos_token_ids
            if self._special.get(token_ids[0], -1) not in begin:
                made.token_ids += begin
        num_together = len(token_ids) - num_apart
        start = 0
        for end in self._ends(token_ids, num_together):
            self._add(made, token_ids, start, end)
            start = end
        for index in range(num_together, len(token_ids)):
            self._add(made, token_ids, index, index + 1)
        return made

    def _ends(self, token_ids: Sequence[int], stop: int) -> Iterator[int]:
        """Where runs of text end, and control tokens, which are runs of their own."""
        for index in range(stop):
            if token_ids[index] in self._special:
                if index and token_ids[index - 1] not in self._special:
                    yield index
                yield index + 1
        if stop and token_ids[stop - 1] not in self._special:
            yield stop

    def _add(self, made: Translated, token_ids: Sequence[int], start: int, end: int) -> None:
        """One run, and every place in it where both tokenizers cut."""
        before = len(made.token_ids)
        if end - start == 1:
            made.token_ids += self._translated(token_ids[start])
        else:
            pieces = [self._bytes(token_id) for token_id in token_ids[start:end]]
            ids = self._draft.encode(b"".join(pieces))
            made.token_ids += ids
            lengths = (len(self._draft.token_bytes[token_id]) for token_id in ids)
            ends = list(accumulate(lengths))
            for offset, end_byte in enumerate(accumulate(map(len, pieces)), 1):
                place = bisect_right(ends, end_byte)
                is_cut = place > 0 and ends[place - 1] == end_byte
                if is_cut and start + offset < end:
                    made.marks.append(start + offset)
                    made.places.append(before + place)
        made.marks.append(end)
        made.places.append(len(made.token_ids))

    def _translated(self, token_id: int) -> tuple[int, ...]:
        found = self._one.get(token_id)
        if found is None:
            special = self._special.get(token_id)
            found = (special,) if special is not None else self._encoded(token_id)
            self._one[token_id] = found
        return found

    def _encoded(self, token_id: int) -> tuple[int, ...]:
        return tuple(self._draft.encode(self._bytes(token_id)))

    def _bytes(self, token_id: int) -> bytes:
        """A control token that the draft has not is text as it is spelt; an id without an entry
        one character that means nothing. So there is something to read at every position."""
        table = self._target.token_bytes
        data = table[token_id] if token_id < len(table) else b""
        return data or "\ufffd".encode()


def _by_bytes(vocabulary: Vocabulary) -> dict[bytes, int]:
    """bytes -> id of each token that is no control token; of several the one that text becomes."""
    specials = frozenset(vocabulary.specials.values())
    found: dict[bytes, int] = {}
    for token_id, data in enumerate(vocabulary.token_bytes):
        if not data or token_id in specials:
            continue
        if data in found and vocabulary.encode(data) != [token_id]:
            continue
        found[data] = token_id
    return found


def _num_tokens(vocabulary: Vocabulary) -> int:
    return sum(map(bool, vocabulary.token_bytes))
