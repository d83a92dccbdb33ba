"""Where each sequence of an engine is in its grammar, and what every sampled row may choose.

Nothing is told to it but the items of the passes: before each it compares a sequence's output with
what it has read of it. So rewinds, failed passes, preemption and forks need no call of their own.
Pure; knows no tensor, no model and no peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.base import StepItem
from paceline.engine.step_rows import prompt_len
from paceline.grammars import GrammarState, TokenGrammars, is_allowed


@dataclass(slots=True)
class _Place:
    grammar: str
    state: GrammarState


class GrammarMasks:
    """Without `grammars` it masks nothing: fine for a draft, and a target refuses such requests.

    Invariant: a place for no sequence that has been freed.
    """

    def __init__(self, grammars: TokenGrammars | None) -> None:
        self._grammars = grammars
        self._places: dict[int, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def rows(self, item: StepItem, cached_token_ids: Sequence[int]) -> tuple[bytes | None, ...]:
        """A bitmask per sampled row (see `GrammarState.bitmask`); None: anything may be chosen.

        `cached_token_ids`: the sequence's tokens before `item.start`, at least. What follows a
        proposal that the grammar forbids has no mask: its own row refuses that proposal. ValueError
        when the text before breaks the grammar or following it costs too much.
        """
        if not item.sampling.grammar or self._grammars is None or item.num_samples == 0:
            return (None,) * item.num_samples
        output, proposals = _output(item, cached_token_ids)
        state = self._state(item, self._grammars)
        try:
            masks = _masks(state, output, proposals)
        except ValueError:
            del self._places[item.sequence_id]
            raise
        return (*masks, *[None] * (item.num_samples - len(masks)))

    def free(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ids are ignored."""
        self._places.pop(sequence_id, None)

    def _state(self, item: StepItem, grammars: TokenGrammars) -> GrammarState:
        grammar = item.sampling.grammar
        place = self._places.get(item.sequence_id)
        if place is not None and place.grammar == grammar:
            return place.state
        # a fork begins in the middle of another's text: so does its state
        parent = None if item.fork_of is None else self._places.get(item.fork_of)
        if parent is not None and parent.grammar == grammar:
            state = parent.state.copy()
        else:
            state = grammars.start(grammar)
        self._places[item.sequence_id] = _Place(grammar, state)
        return state


def _masks(state: GrammarState, output: Sequence[int], proposals: Sequence[int]) -> list[bytes]:
    """Up to the first proposal that is forbidden."""
    if not state.sync(output):
        raise ValueError("an output cannot be followed through its grammar")
    masks = [state.bitmask()]
    for token_id in proposals:
        if not state.advance(token_id):
            # a limit may look like a refusal; what the mask allows could become part of the output
            if is_allowed(masks[-1], token_id):
                raise ValueError("a proposal cannot be followed through its grammar")
            break
        masks.append(state.bitmask())
    return masks


def _output(item: StepItem, cached_token_ids: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    """What was generated before the first sampled row's token, and the item's tokens after."""
    split, start = prompt_len(item), item.start
    first_end = len(item.token_ids) - item.num_samples + 1
    output = [
        *cached_token_ids[split:start],
        *item.token_ids[max(0, split - start) : first_end],
    ]
    return output, item.token_ids[first_end:]
