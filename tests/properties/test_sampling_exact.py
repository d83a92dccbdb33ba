"""Losslessness proved, not sampled: rational enumeration of the shipped rules.

Every test compares two exact laws; 0 means equal. Rounds are repeated until `LENGTH` tokens are
out, so what a round does to the next one counts too.
"""

import functools
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sampling.acceptance import accept_block, accept_matching, accept_rejection
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import MASKED, adjust_logits
from paceline.sampling.sparse_probs import TOTAL_WEIGHT, SparseProbs
from paceline.testing.enumeration import exact_law, total_variation

RULES = {"rejection": accept_rejection, "block": accept_block}


def rational_law(rng, num_tokens, num_zeros=0):
    weights = [rng.randrange(1, 7) for _ in range(num_tokens)]
    for token_id in rng.sample(range(num_tokens), num_zeros):
        weights[token_id] = 0
    return [Fraction(weight, sum(weights)) for weight in weights]


def dense_row(rng, num_tokens):
    return rational_law(rng, num_tokens)


def sparse_row(rng, num_tokens):
    token_ids = tuple(rng.sample(range(num_tokens), 2))
    first = rng.randrange(1, TOTAL_WEIGHT)
    return SparseProbs(token_ids, (first, TOTAL_WEIGHT - first))


def one_hot_row(rng, num_tokens):
    return SparseProbs((rng.randrange(num_tokens),), (TOTAL_WEIGHT,))


ROWS = {"dense": dense_row, "sparse": sparse_row, "one_hot": one_hot_row}


class ProcessedLaws:
    """Laws whose target counts tokens: the shipped adjustments, then min-p, in exact numbers.

    Logits are whole numbers to the base 2, so that both laws stay rational.
    """

    num_tokens = 3
    params = SamplingParams(
        frequency_penalty=1.0,
        presence_penalty=1.0,
        repetition_penalty=2.0,
        logit_bias=((1, 1.0),),
        min_tokens=2,
        stop_token_ids=(2,),
    )

    def __init__(self, min_p):
        self.min_p = min_p

    def target(self, prefix, num_counted=None):
        history = prefix[:num_counted]
        logits = adjust_logits([2.0, 0.0, 2.0], self.params, (0,), history)
        return self._law(logits, self.min_p)

    def draft(self, prefix):
        return self._law([1.0, 1.0, 2.0 - len(prefix) % 2], Fraction(0))

    draft_dense = draft

    def _law(self, logits, min_p):
        weights = [Fraction(2) ** int(x) if x > MASKED else Fraction(0) for x in logits]
        kept = [weight if weight >= min_p * max(weights) else Fraction(0) for weight in weights]
        return [weight / sum(kept) for weight in kept]


class Laws:
    """Target and draft laws as arbitrary functions of the prefix, drawn from one seed."""

    def __init__(self, seed, num_tokens, draft_row=dense_row, num_zeros=0):
        self.num_tokens = num_tokens

        @functools.cache
        def target(prefix):
            rng = random.Random(f"target {seed} {prefix}")
            return rational_law(rng, num_tokens, num_zeros)

        @functools.cache
        def draft(prefix):
            return draft_row(random.Random(f"draft {seed} {prefix}"), num_tokens)

        self.target, self.draft = target, draft

    def draft_dense(self, prefix):
        row = self.draft(prefix)
        if not isinstance(row, SparseProbs):
            return row
        return [Fraction(row.weight(token_id), TOTAL_WEIGHT) for token_id in range(self.num_tokens)]

    def output_law(self, length):
        """What the target alone writes."""
        return output_law(self, length)


def output_law(laws, length):
    law = {(): Fraction(1)}
    for _ in range(length):
        law = {
            (*prefix, token_id): prob * share
            for prefix, prob in law.items()
            for token_id, share in enumerate(laws.target(prefix))
            if share
        }
    return law


def propose(laws, chance, prefix, num):
    """The draft: `num` tokens and the laws they came from."""
    draft_token_ids = []
    rows = []
    for _ in range(num):
        here = (*prefix, *draft_token_ids)
        rows.append(laws.draft(here))
        draft_token_ids.append(chance.choose(laws.draft_dense(here)))
    return draft_token_ids, rows


def verify(rule, laws, chance, prefix, draft_token_ids, rows, uniforms=None):
    """One target pass; returns the tokens it commits."""
    num = len(draft_token_ids)
    target_rows = [laws.target((*prefix, *draft_token_ids[:i])) for i in range(num + 1)]
    noise = [chance.exponentials(laws.num_tokens) for _ in range(num + 1)]
    uniforms = uniforms or [chance.uniform() for _ in range(num)]
    acceptance = rule(draft_token_ids, rows, target_rows, uniforms, noise)
    accepted = draft_token_ids[: acceptance.num_accepted_tokens]
    return (*accepted, acceptance.next_token_id)


def repeated_rounds(play_round, length):
    """Law of the first `length` tokens when rounds are independent given the prefix."""
    done = {}
    pending = {(): Fraction(1)}
    while pending:
        prefix = min(pending, key=len)  # shortest first: every prefix is expanded once
        prob = pending.pop(prefix)
        for committed, share in exact_law(functools.partial(play_round, prefix=prefix)).items():
            longer = (*prefix, *committed)
            bucket = done if len(longer) >= length else pending
            key = longer[:length]
            bucket[key] = bucket.get(key, 0) + prob * share
    return done


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("seed", range(3))
def test_output_law_equals_the_targets(rule, rows, seed):
    laws = Laws(seed, num_tokens=3, draft_row=ROWS[rows])

    def play_round(chance, prefix):
        return verify(RULES[rule], laws, chance, prefix, *propose(laws, chance, prefix, 2))

    assert total_variation(repeated_rounds(play_round, 4), laws.output_law(4)) == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", ["dense", "sparse"])
def test_output_law_with_four_tokens_and_blocks_of_three(rule, rows):
    laws = Laws(7, num_tokens=4, draft_row=ROWS[rows], num_zeros=1)

    def play_round(chance, prefix):
        return verify(RULES[rule], laws, chance, prefix, *propose(laws, chance, prefix, 3))

    assert total_variation(repeated_rounds(play_round, 3), laws.output_law(3)) == 0


MIN_P = [Fraction(0), Fraction(1, 4), Fraction(1)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("min_p", MIN_P)
def test_output_law_with_counts_that_advance_inside_the_block(rule, min_p):
    """Penalties, bias, min tokens and min-p: each row's law has its own history (2f)."""
    laws = ProcessedLaws(min_p)

    def play_round(chance, prefix):
        return verify(RULES[rule], laws, chance, prefix, *propose(laws, chance, prefix, 2))

    assert total_variation(repeated_rounds(play_round, 4), output_law(laws, 4)) == 0


@pytest.mark.parametrize("rule", RULES)
def test_counts_that_stand_still_inside_the_block_are_caught(rule):
    """SGLang PR 33643: every row of a block is penalized by what was committed before it."""
    laws = ProcessedLaws(Fraction(1, 4))

    class Stale(ProcessedLaws):
        def target(self, prefix):
            return super().target(prefix, num_counted=self.num_counted)

    stale = Stale(Fraction(1, 4))

    def play_round(chance, prefix):
        stale.num_counted = len(prefix)
        return verify(RULES[rule], stale, chance, prefix, *propose(laws, chance, prefix, 2))

    gap = total_variation(repeated_rounds(play_round, 4), output_law(laws, 4))
    assert gap > Fraction(1, 100)


@pytest.mark.parametrize("rows", ROWS)
def test_matching_is_lossless_for_any_proposal(rows):
    laws = Laws(11, num_tokens=3, draft_row=ROWS[rows])

    def play_round(chance, prefix):
        draft_token_ids, _ = propose(laws, chance, prefix, 2)
        contexts = [(*prefix, *draft_token_ids[:i]) for i in range(3)]
        sampled = [chance.choose(laws.target(context)) for context in contexts]
        acceptance = accept_matching(draft_token_ids, sampled)
        return (*draft_token_ids[: acceptance.num_accepted_tokens], acceptance.next_token_id)

    assert total_variation(repeated_rounds(play_round, 4), laws.output_law(4)) == 0


def test_one_hot_rejection_is_sample_and_match():
    """The two rules have the same law of (accepted, token), not just of the text."""
    laws = Laws(5, num_tokens=4, draft_row=one_hot_row)

    def by_rejection(chance):
        draft = propose(laws, chance, (), 2)
        return verify(accept_rejection, laws, chance, (), *draft)

    def by_matching(chance):
        draft_token_ids, _ = propose(laws, chance, (), 2)
        sampled = [chance.choose(laws.target(tuple(draft_token_ids[:i]))) for i in range(3)]
        acceptance = accept_matching(draft_token_ids, sampled)
        return (*draft_token_ids[: acceptance.num_accepted_tokens], acceptance.next_token_id)

    assert exact_law(by_rejection) == exact_law(by_matching)


def mean_accepted(rule, laws, num):
    def play(chance):
        return len(verify(rule, laws, chance, (), *propose(laws, chance, (), num))) - 1

    return sum(num_accepted * prob for num_accepted, prob in exact_law(play).items())


@pytest.mark.parametrize("rows", ROWS)
def test_block_accepts_at_least_as_much_as_the_token_rule(rows):
    gains = []
    for seed in range(6):
        laws = Laws(seed, num_tokens=3, draft_row=ROWS[rows])
        gains.append(
            mean_accepted(accept_block, laws, 3) - mean_accepted(accept_rejection, laws, 3)
        )
    assert min(gains) >= 0
    assert (max(gains) == 0) == (rows == "one_hot")


laws_of_four = st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)


@given(laws_of_four, laws_of_four)
def test_one_position_outputs_the_target_law_whatever_both_laws_are(target, draft):
    target_row = [Fraction(weight, sum(target)) for weight in target]
    draft_row = [Fraction(weight, sum(draft)) for weight in draft]

    def play(chance):
        token_id = chance.choose(draft_row)
        noise = [chance.exponentials(4) for _ in range(2)]
        rows = [target_row, target_row]
        acceptance = accept_rejection([token_id], [draft_row], rows, [chance.uniform()], noise)
        return token_id if acceptance.num_accepted_tokens else acceptance.next_token_id

    expected = {token_id: prob for token_id, prob in enumerate(target_row) if prob}
    assert exact_law(play) == expected
