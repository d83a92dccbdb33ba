"""All choices of one prompt as their rounds arrive, in whatever order.

Pure. Knows which choices have ended and who ended them; knows no HTTP and starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from paceline.errors import RequestError
from paceline.gateway.assembler import Assembler, EndRules, RoundText, Usage, Vocabulary
from paceline.gateway.logprobs import TokenEntry, prompt_entries
from paceline.gateway.plan import Plan
from paceline.gateway.tools import ToolMode
from paceline.generation import FinishReason, RoundDelta


class Answer:
    """One prompt's part of an answer as it grows."""

    def __init__(self, plan: Plan, vocabulary: Vocabulary) -> None:
        request = plan.request
        self._plan = plan
        self._vocabulary = vocabulary
        self.usage = Usage(plan.num_prompt_tokens)
        rules = EndRules(
            request.sampling.min_tokens,
            plan.includes_stop,
            frozenset(request.stop_token_ids),
            plan.output,
            plan.tool_mode is not ToolMode.NAMED,
        )
        self._choices = [
            Assembler(
                vocabulary, plan.stop, plan.num_prompt_tokens, rules, plan.num_logprobs, self.usage
            )
            for _ in range(request.n)
        ]
        # Choices that the running try's target has not ended by itself; it may still send rounds.
        self._at_target = set(range(request.n))
        self._num_open = request.n
        self.num_retries = 0
        self._is_prompt_known = False

    @property
    def is_whole(self) -> bool:
        """Every choice has its finish reason."""
        return self._num_open == 0

    @property
    def is_over(self) -> bool:
        """The target ended every choice by itself: it has nothing left to let go of."""
        return not self._at_target

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Of the choices that have ended, by index."""
        return tuple(part.finish_reason for part in self._choices if part.finish_reason)

    def is_at_target(self, choice: int) -> bool:
        return choice in self._at_target

    def begin_try(self) -> None:
        """Another target runs what has no finish reason, and nothing else."""
        self.num_retries += 1
        self._at_target = {
            choice for choice, part in enumerate(self._choices) if part.finish_reason is None
        }

    def receive(self, delta: RoundDelta) -> RoundText | None:
        """None for a round that comes after a stop string ended its choice.

        Raises RequestError (500) when the target breaks its contract.
        """
        choice = delta.choice
        if choice not in self._at_target:
            raise RequestError("The target went on after its end.", None, None, 500)
        if delta.finish_reason:
            self._at_target.discard(choice)
        scored = self._prompt_entries(delta)
        assembler = self._choices[choice]
        if assembler.finish_reason:
            return None
        item = assembler.receive_round(_silent(delta) if self._plan.is_prompt_only else delta)
        self._num_open -= item.finish_reason is not None
        return item if scored is None else replace(item, prompt_entries=scored)

    def _prompt_entries(self, delta: RoundDelta) -> Callable[[], tuple[TokenEntry, ...]] | None:
        """Accounts of the prompt come with the first round of choice 0."""
        if delta.choice or self._is_prompt_known:
            return None
        self._is_prompt_known = True
        plan = self._plan
        self.usage.num_cached_tokens = delta.num_cached_tokens
        if plan.request.num_prompt_logprobs is None:
            return None
        if len(delta.prompt_logprobs) != plan.num_prompt_tokens - 1:
            raise RequestError("The target left out the prompt's logprobs.", None, None, 500)
        return partial(
            prompt_entries,
            plan.request.prompt_token_ids[0],
            delta.prompt_logprobs,
            plan.request.num_prompt_logprobs,
            plan.prompt_offsets or (0,) * plan.num_prompt_tokens,
            self._vocabulary,
        )


def _silent(delta: RoundDelta) -> RoundDelta:
    """A round of which only the work counts: the client asked for no token."""
    end: FinishReason | None = "length" if delta.finish_reason else None
    return replace(delta, token_ids=(), origins=(), logprobs=(), finish_reason=end)
