"""Planted bugs: each must show up as a wrong output law.

A losslessness proof that no bug can fail proves nothing. Where the bug can be enumerated, the
error is an exact rational; the one about shared noise is a chi-square test with fixed seeds.
Beside every bug stands its harmless neighbour, which must stay exact.
"""

from fractions import Fraction

import pytest

from paceline.sampling.acceptance import (
    Acceptance,
    accept_block,
    accept_rejection,
    race,
)
from paceline.sampling.noise import Purpose, exponential, noise_word, noise_words, unit
from paceline.testing.enumeration import exact_law, total_variation

from .test_sampling_exact import RULES, Laws, propose, repeated_rounds, verify

KEEP_SHARE = Fraction(35, 100)


def lossless_gap(play_round, laws, length=3):
    return total_variation(repeated_rounds(play_round, length), laws.output_law(length))


# -- C1: the stated law is the law that was sampled ------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_stating_another_law_than_the_sampled_one_is_caught(rule):
    """transformers #47932: raw logits are reported, top-k-processed ones are sampled."""
    laws = Laws(1, num_tokens=3)

    def play_round(chance, prefix):
        stated = laws.draft(prefix)
        lowest = min(range(3), key=stated.__getitem__)
        top = [Fraction(0) if i == lowest else prob for i, prob in enumerate(stated)]
        token_id = chance.choose([prob / sum(top) for prob in top])
        return verify(RULES[rule], laws, chance, prefix, [token_id], [stated])

    assert lossless_gap(play_round, laws) > Fraction(1, 100)


# -- C2: what is submitted may not depend on what was sampled --------------------------------


def drop_unlikely_token(laws, chance, prefix):
    draft_token_ids, rows = propose(laws, chance, prefix, 2)
    for i, token_id in enumerate(draft_token_ids):
        if rows[i][token_id] < KEEP_SHARE:
            return draft_token_ids[:i], rows[:i]
    return draft_token_ids, rows


def drop_unlikely_block(laws, chance, prefix):
    draft_token_ids, rows = propose(laws, chance, prefix, 2)
    joint = rows[0][draft_token_ids[0]] * rows[1][draft_token_ids[1]]
    return (draft_token_ids, rows) if joint >= KEEP_SHARE**2 else ([], [])


def keep_then_stop(laws, chance, prefix):
    draft_token_ids, rows = propose(laws, chance, prefix, 2)
    num = 1 if rows[0][draft_token_ids[0]] < KEEP_SHARE else 2
    return draft_token_ids[:num], rows[:num]


def stop_before_sampling(laws, chance, prefix):
    num = 2 if max(laws.draft(prefix)) > Fraction(1, 2) else 1
    return propose(laws, chance, prefix, num)


def gap_of_policy(rule, policy, seed):
    laws = Laws(seed, num_tokens=3)

    def play_round(chance, prefix):
        return verify(RULES[rule], laws, chance, prefix, *policy(laws, chance, prefix))

    return lossless_gap(play_round, laws)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", [drop_unlikely_token, drop_unlikely_block])
def test_an_anticipating_drop_is_caught(rule, policy):
    gaps = [gap_of_policy(rule, policy, seed) for seed in range(4)]
    assert min(gaps) > Fraction(1, 100)
    assert max(gaps) > Fraction(1, 10)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", [keep_then_stop, stop_before_sampling])
def test_a_stop_that_keeps_what_it_looked_at_is_exact(rule, policy):
    """Also for blocks: a length that looks at no token behind the cut is no anticipation."""
    assert [gap_of_policy(rule, policy, seed) for seed in range(4)] == [0, 0, 0, 0]


# -- block rule: the port that stops at the first failure ------------------------------------


def accept_block_until_failure(draft_token_ids, draft_probs, target_probs, uniforms, noise):
    """What reviewers of other engines insisted on: break at the first failed position."""
    best = Acceptance(0, 0)
    for num in range(1, len(draft_token_ids) + 1):
        certain = [Fraction(1)] * (num - 1)  # earlier positions cannot be rescued by themselves
        probe = accept_block(
            draft_token_ids,
            draft_probs,
            target_probs,
            [*certain, uniforms[num - 1], *[Fraction(1)] * (len(draft_token_ids) - num)],
            [[Fraction(1)] * len(row) for row in noise],
        )
        if probe.num_accepted_tokens < num:
            break
        best = probe
    num = best.num_accepted_tokens
    decided = [Fraction(0) if i == num - 1 else Fraction(1) for i in range(len(draft_token_ids))]
    return accept_block(draft_token_ids, draft_probs, target_probs, decided, noise)


def test_block_rule_that_stops_at_a_failure_is_caught():
    laws = Laws(3, num_tokens=3)

    def play_round(chance, prefix):
        draft = propose(laws, chance, prefix, 2)
        return verify(accept_block_until_failure, laws, chance, prefix, *draft)

    assert lossless_gap(play_round, laws) > Fraction(1, 1000)


# -- B2: noise that is keyed by position alone ------------------------------------------------


def law_with_position_keys(rule, laws, length, *, is_draft_keyed, is_verifier_keyed):
    """All rounds as one program, in which a position keeps its random number between rounds."""

    def program(chance):
        draft_noise = [chance.uniform() for _ in range(length + 2)]
        verifier_noise = [chance.uniform() for _ in range(length + 2)]
        prefix = ()
        while len(prefix) < length:
            draft_token_ids, rows = [], []
            for i in range(2):
                row = laws.draft((*prefix, *draft_token_ids))
                position = len(prefix) + i
                source = draft_noise[position] if is_draft_keyed else chance.uniform()
                rows.append(row)
                draft_token_ids.append(source.choose(row))
            uniforms = None
            if is_verifier_keyed:
                uniforms = verifier_noise[len(prefix) : len(prefix) + 2]
            committed = verify(rule, laws, chance, prefix, draft_token_ids, rows, uniforms)
            prefix = (*prefix, *committed)
        return prefix[:length]

    return exact_law(program)


KEYED = [(True, False), (False, True)]


@pytest.mark.parametrize(("is_draft_keyed", "is_verifier_keyed"), KEYED)
def test_block_rule_with_position_keyed_noise_is_caught(is_draft_keyed, is_verifier_keyed):
    laws = Laws(1, num_tokens=3)
    law = law_with_position_keys(
        accept_block,
        laws,
        3,
        is_draft_keyed=is_draft_keyed,
        is_verifier_keyed=is_verifier_keyed,
    )
    assert total_variation(law, laws.output_law(3)) > Fraction(5, 1000)


@pytest.mark.parametrize(("is_draft_keyed", "is_verifier_keyed"), KEYED)
def test_token_rule_with_position_keyed_noise_is_exact(is_draft_keyed, is_verifier_keyed):
    """Positions behind a rejection were never looked at, so their numbers are still fresh."""
    laws = Laws(1, num_tokens=3)
    law = law_with_position_keys(
        accept_rejection,
        laws,
        3,
        is_draft_keyed=is_draft_keyed,
        is_verifier_keyed=is_verifier_keyed,
    )
    assert total_variation(law, laws.output_law(3)) == 0


def test_block_rule_with_fresh_noise_is_exact_in_the_same_harness():
    laws = Laws(1, num_tokens=3)
    law = law_with_position_keys(
        accept_block, laws, 3, is_draft_keyed=False, is_verifier_keyed=False
    )
    assert total_variation(law, laws.output_law(3)) == 0


# -- C3: the verifier's noise is its own ------------------------------------------------------

# Tokens 1 and 2 share the residual evenly; but a draft that liked token 1 and did not draw it has
# seen a late arrival of token 1, so with the same noise token 2 recovers too often.
DRAFT = [0.5, 0.4, 0.1]
TARGET = [0.1, 0.6, 0.3]
NUM_DRAWS = 8000
CHI_SQUARE_LIMIT = 18.4  # 2 degrees of freedom, one in ten thousand


def chi_square_of_output(seed, residual_purpose):
    """One-token blocks whose residual noise is drawn for the given purpose."""

    def noise(output_index, purpose):
        return [exponential(w) for w in noise_words(seed, output_index, range(3), purpose=purpose)]

    counts = [0] * 3
    for t in range(NUM_DRAWS):
        token_id = race(DRAFT, noise(t, Purpose.DRAFT_PROPOSAL))
        uniform = unit(noise_word(seed, t, 0, purpose=Purpose.ACCEPT_UNIFORM))
        residual = noise(t, residual_purpose)
        acceptance = accept_rejection(
            [token_id], [DRAFT], [TARGET, TARGET], [uniform], [residual, residual]
        )
        counts[token_id if acceptance.num_accepted_tokens else acceptance.next_token_id] += 1
    expected = [prob * NUM_DRAWS for prob in TARGET]
    return sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_sharing_noise_between_draft_and_residual_is_caught(seed):
    """vLLM #47386."""
    assert chi_square_of_output(seed, Purpose.DRAFT_PROPOSAL) > 3 * CHI_SQUARE_LIMIT
    assert chi_square_of_output(seed, Purpose.RESIDUAL) < CHI_SQUARE_LIMIT
