"""The whole protocol keeps the target's law: exact enumeration, 0 means equal.

Every schedule runs under both shipped rules and under one that is harsher than they are. Planted
bugs show that the schedules can tell.
"""

from dataclasses import replace
from fractions import Fraction

import pytest

from paceline.protocol.draft_session import DraftSession
from paceline.protocol.target_session import Disposition, TargetSession
from paceline.testing.enumeration import total_variation
from tests.properties.protocol_world import (
    MAX_EVENTS,
    RULES,
    SCHEDULES,
    Laws,
    Parts,
    law_of_output,
)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_law_of_three_tokens(name, rule):
    laws = Laws(1)
    law, seen = law_of_output(laws, rule, name, Parts())
    assert total_variation(law, laws.output_law()) == 0
    assert Disposition.KEPT in seen


def test_the_schedules_reach_what_they_are_for():
    """On some path a fitting proposal was stale, and one of a replaced draft arrived."""
    seen = set()
    for name in ("ahead_and_late", "another_draft_during_the_pass"):
        seen |= law_of_output(Laws(0), "block", name, Parts())[1]
    assert seen >= {Disposition.KEPT, Disposition.STALE, Disposition.STALE_EPOCH}


# -- planted bugs -----------------------------------------------------------------------------


class KeepsWhatFits(TargetSession):
    """No flush: a rejection is like any other round, at both ends."""

    def _commit(self, token_ids, has_rejection):
        super()._commit(token_ids, has_rejection=False)

    def _verdict(self, *args, **kwargs):
        return replace(super()._verdict(*args, **kwargs), has_rejection=False)


class TakesLateProposals(TargetSession):
    """Context and hash fit, so it must be right."""

    def receive_draft(self, draft):
        return super().receive_draft(replace(draft, last_round=MAX_EVENTS))


class RepeatsOnlyTokens(TargetSession):
    """A repeated verdict does not say that there was a rejection."""

    def receive_nack(self, have_len):
        verdict = super().receive_nack(have_len)
        return verdict and replace(verdict, has_rejection=False)


class DropsTheFirstLaw(TargetSession):
    """Laws and proposals are out of step once a block has left something in the window."""

    def _commit(self, token_ids, has_rejection):
        laws = list(self._laws.probs)
        super()._commit(token_ids, has_rejection)
        self._laws.probs = laws[: self.window_len]


class HearsOnlyTokens(DraftSession):
    """The recovered token is its own, so it goes on as before."""

    def receive_verdict(self, verdict):
        return super().receive_verdict(replace(verdict, has_rejection=False))


class ForgetsTheLaws(TargetSession):
    """The window moves on behind a local pass, its laws do not."""

    def commit(self, acceptance, *path):
        is_local, laws = self._verifying.is_local, list(self._laws.probs)
        delta = super().commit(acceptance, *path)
        if is_local:
            self._laws.probs = laws[: self.window_len]
        return delta


BUGS = {
    "chooses_by_value": ("block", "local_passes_between", Parts(chooses_by_value=True)),
    "forgets_the_laws": ("block", "local_passes_between", Parts(target=ForgetsTheLaws)),
    "keeps_what_fits": ("peeking", "lock_step", Parts(target=KeepsWhatFits)),
    "takes_late_proposals": ("peeking", "twice", Parts(target=TakesLateProposals)),
    "repeats_only_tokens": ("peeking", "gap_after_the_repeat", Parts(target=RepeatsOnlyTokens)),
    "hears_only_tokens": ("peeking", "gap_after_the_verdict", Parts(draft=HearsOnlyTokens)),
    "drops_the_first_law": ("block", "plain_rounds_between", Parts(target=DropsTheFirstLaw)),
    "old_noise": ("block", "lock_step", Parts(is_noise_keyed_by_position=True)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_bias_the_law(bug):
    """Each of them is a difference of laws, not only of states."""
    rule, name, parts = BUGS[bug]
    laws = Laws(1, has_full_support=True)
    law, _ = law_of_output(laws, rule, name, parts)
    assert sum(law.values()) == 1
    assert total_variation(law, laws.output_law()) > Fraction(1, 1000)
