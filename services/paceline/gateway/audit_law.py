"""What the tokens of a text say about the law that they were drawn from. Pure.

The target has scored a text that was made with a draft: for each token the log-probabilities of
the most likely ids, under its raw logits. From these and the request's own parameters follows
the law of that token *given that it is one of certain ids* (those of the list whose logits the
processors leave known), and with it the exact mean of any statistic of it, given all that came
before. That is far stronger than one comparison of two texts: every token is a sample.

    mode       1 if the token is the most likely one, less the probability of that
    place      how far up in descending order of probability: 1 - 2 F(before) - P(token)
    surprise   -log P(token), cut off, less its mean
    outside    1 if the token is none of the list, less the most that this can be likely

The first three have mean 0 whatever the list: a condition on the list is one on the prefix. The
last has mean <= 0, so that only its positive side is evidence: it is what catches tokens that
should never have been accepted. Where the processors make the law unknown (a grammar; a filter
whose reach depends on what is not in the list), or rounding does (a cold law), nothing is said.

For two texts, one with and one without a draft: either could have been the other, so a statistic
that changes its sign when they change places has mean 0, whatever the law.

Knows no target, no bet and no text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from paceline.generation import TokenLogprobs
from paceline.sampling.params import SamplingParams

# Log-probabilities per token that the statistics want; the target has more to sort for more.
NUM_TOP = 32
TOKEN_SIDES = ((1, -1), (1, -1), (1, -1), (1,))
PAIR_SIDES = ((1, -1), (1, -1), (1, -1))

# Below it a log-probability stands for minus infinity (`engine/logprobs.py`).
_FLOOR = -9000.0
# Sums of float32 log-probabilities are no better than that.
_MASS_ERROR = 1e-5
_MAX_SURPRISE = 12.0
# Colder than so many tie tolerances, rounding alone changes a law: the scored one looks more
# certain than the one that was drawn from, by about (error / temperature) ** 2. At this border,
# with logits of 24 in bfloat16 and errors of 0.06, simulation gives statistics a mean of 0.007,
# which `audit.law_tolerance` covers; at a temperature of 0.7 it is below 0.002.
_MIN_WARMTH = 2.0
# Of a mean log-probability, that makes a text's advantage count fully.
_CLEAR_ADVANTAGE = 0.25

TokenValues = tuple[float | None, float | None, float | None, float | None]
PairValues = tuple[float | None, float | None, float | None]
_SILENT: TokenValues = (None, None, None, None)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a token stands: what was before it, and which ids could not be drawn there although
    their logits do not say so (what may end the text while it is too short)."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    vocab_size: int
    is_held_back: Callable[[int], bool] = lambda _: False


@dataclass(frozen=True, slots=True)
class KnownLaw:
    """`probs`: of each id, given that it is one of these; 0 for what a filter surely removes.
    `listed`: ids that are not outside. `outside`: upper bound of the probability of all others;
    None where there is none."""

    probs: dict[int, float]
    listed: Collection[int]
    outside: float | None


def token_values(scored: TokenLogprobs, place: Place, tie_tolerance: float) -> TokenValues:
    """Statistics of one token, given what was before it. `tie_tolerance`: logits are no more
    precise, so what is closer than that to a filter's edge may be on either side of it."""
    law = known_law(scored.top, place, tie_tolerance)
    if law is None:
        return _SILENT
    outside = None
    if law.outside is not None:
        outside = float(scored.token_id not in law.listed) - law.outside
    ranked = sorted(law.probs, key=lambda i: (-law.probs[i], i))
    if scored.token_id not in law.probs or len(ranked) < 2:
        return None, None, None, outside
    prob = law.probs[scored.token_id]
    best = law.probs[ranked[0]]
    before = math.fsum(law.probs[i] for i in ranked[: ranked.index(scored.token_id)])
    mean = math.fsum(p * _surprise(p) for p in law.probs.values())
    return (
        float(scored.token_id == ranked[0]) - best,
        _clip(1.0 - 2.0 * before - prob),
        _surprise(prob) - mean,
        outside,
    )


def _surprise(prob: float) -> float:
    """In [0, 1]."""
    return min(-math.log(prob), _MAX_SURPRISE) / _MAX_SURPRISE if prob > 0.0 else 1.0


def pair_values(
    drafted: Sequence[float],
    plain: Sequence[float],
    drafted_token_ids: Sequence[int],
    plain_token_ids: Sequence[int],
) -> PairValues:
    """Statistics of two texts, by their tokens' log-probabilities under one law.

    Both must have ended as the law has it, or be as long as is looked at: nothing that one of them
    says may have cut it short.
    """
    if list(drafted_token_ids) == list(plain_token_ids):
        return (None, None, None)
    parting = None
    pairs = zip(drafted_token_ids, plain_token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is not None:
        parting = _sign(drafted[at] - plain[at])
    if not drafted or not plain:
        return (parting, None, None)
    advantage = math.fsum(drafted) / len(drafted) - math.fsum(plain) / len(plain)
    return (parting, _sign(advantage), math.tanh(advantage / _CLEAR_ADVANTAGE))


def known_law(
    top: Sequence[tuple[int, float]], place: Place, tie_tolerance: float
) -> KnownLaw | None:
    """What is known of the law behind `place`; `top` is in descending order. None: nothing."""
    params = place.params
    live = [(token_id, logprob) for token_id, logprob in top if logprob > _FLOOR]
    if params.is_greedy or params.grammar or not live:
        return None
    if params.temperature < _MIN_WARMTH * tie_tolerance:
        return None
    is_whole = len(live) < len(top) or len(top) >= place.vocab_size
    values = _adjusted(live, place)
    is_partial = len(values) < len(live)
    edge = -math.inf if is_whole else live[-1][1]
    # What is not in the list may be above what is, once the processors are done with it.
    is_risen = not is_whole and _may_rise(place, {token_id for token_id, _ in live})
    filtered = bool(params.top_k) or params.top_p < 1.0 or params.min_p > 0.0
    if filtered and (is_partial or is_risen):
        return None
    surely = {i: value for i, value in values.items() if value > edge}
    if not values or (filtered and not surely):
        return None
    peak = max(values.values())
    mass_left = 0.0 if is_whole else _mass_left(live, place, peak)
    weights = {i: math.exp((value - peak) / params.temperature) for i, value in values.items()}
    if filtered:
        margin = tie_tolerance / params.temperature
        scaled = {i: (value - peak) / params.temperature for i, value in surely.items()}
        unsure = math.fsum(weights[i] for i in values.keys() - surely.keys())
        removed, undecided = _filter(scaled, params, mass_left + unsure, margin)
        weights = {i: 0.0 if i in removed else weights[i] for i in surely.keys() - undecided}
    total = math.fsum(weights.values())
    outside = None if is_risen or total <= 0.0 else mass_left / (mass_left + total)
    probs = {i: weight / total for i, weight in weights.items()} if total > 0.0 else {}
    return KnownLaw(probs, {token_id for token_id, _ in live}, outside)


def _adjusted(live: Sequence[tuple[int, float]], place: Place) -> dict[int, float]:
    """The list after penalties, bias and min tokens, up to a constant; without what is unknown
    or cannot be drawn. (A repetition penalty scales logits, of which we know differences.)"""
    params, values = place.params, dict(live)
    counts = Counter(place.output_token_ids if params.has_penalties else ())
    if params.repetition_penalty != 1.0:
        seen = {*place.prompt_token_ids, *counts}
        values = {i: value for i, value in values.items() if i not in seen}
    if len(place.output_token_ids) < params.min_tokens:
        values = {i: value for i, value in values.items() if not place.is_held_back(i)}
    biases = dict(params.logit_bias)
    for token_id in values:
        if token_id in counts:
            values[token_id] -= params.frequency_penalty * counts[token_id]
            values[token_id] -= params.presence_penalty
        values[token_id] += biases.get(token_id, 0.0)
    return values


def _may_rise(place: Place, listed: Collection[int]) -> bool:
    params = place.params
    is_raised = any(bias > 0.0 and i not in listed for i, bias in params.logit_bias)
    rewards = params.frequency_penalty < 0.0 or params.presence_penalty < 0.0
    return is_raised or rewards or params.repetition_penalty != 1.0


def _mass_left(live: Sequence[tuple[int, float]], place: Place, peak: float) -> float:
    """Upper bound of what the ids outside the list weigh, in units of the peak's weight.

    They have the raw probability that the list leaves over, and none has more than its last.
    Cold laws (temperature <= 1) make that smaller, at most by the factor of the largest; warm ones
    make most of it when it is spread evenly.
    """
    temperature = place.params.temperature
    left = max(0.0, 1.0 - math.fsum(math.exp(logprob) for _, logprob in live)) + _MASS_ERROR
    if temperature <= 1.0:
        log = math.log(left) + live[-1][1] * (1.0 / temperature - 1.0)
    else:
        num_left = max(1, place.vocab_size - len(live))
        log = math.log(left) / temperature + math.log(num_left) * (1.0 - 1.0 / temperature)
    return math.exp(min(log - peak / temperature, 700.0))


def _filter(
    scaled: dict[int, float], params: SamplingParams, mass_left: float, margin: float
) -> tuple[set[int], set[int]]:
    """(surely removed, undecided) by top-k, top-p and min-p, in the engine's order.

    `scaled` has every id above the list's edge; `mass_left` is the weight of what is below.
    """
    ranked = sorted(scaled, key=lambda i: (-scaled[i], i))
    removed: set[int] = set()
    undecided: set[int] = set()
    if 0 < params.top_k < len(ranked):
        last, first_out = scaled[ranked[params.top_k - 1]], scaled[ranked[params.top_k]]
        removed |= {i for i in ranked if scaled[i] < last - margin}
        undecided |= {i for i in ranked if i not in removed and scaled[i] <= first_out + margin}
        mass_left = 0.0
    elif params.top_k == len(ranked):
        undecided |= {i for i in ranked if scaled[i] <= scaled[ranked[-1]] + margin}
    if params.top_p < 1.0:
        left = {i: scaled[i] for i in ranked if i not in removed}
        out, unclear = _beyond_top_p(left, undecided, params.top_p, mass_left, margin)
        removed |= out
        undecided |= unclear
    if params.min_p > 0.0:
        threshold = math.log(params.min_p)
        removed |= {i for i in ranked if scaled[i] < threshold - margin}
        undecided |= {i for i in ranked if abs(scaled[i] - threshold) <= margin}
    return removed, undecided - removed


def _beyond_top_p(
    scaled: dict[int, float],
    undecided: Collection[int],
    top_p: float,
    mass_left: float,
    margin: float,
) -> tuple[set[int], set[int]]:
    """(surely removed, undecided): an id is kept when those before it do not reach `top_p`.

    `scaled` is in descending order, without what top-k removes; `undecided`, it may be there.
    """
    weights = {i: math.exp(logit) for i, logit in scaled.items()}
    most_known = math.fsum(weights.values())
    least_known = math.fsum(weight for i, weight in weights.items() if i not in undecided)
    if least_known <= 0.0:
        return set(), set(scaled)
    out: set[int] = set()
    unclear: set[int] = set()
    most_before = least_before = 0.0
    for token_id, weight in weights.items():
        most = min(1.0, most_before / least_known)
        least = least_before / (most_known + mass_left)
        error = _MASS_ERROR + margin * most * (1.0 - most)
        if least - error >= top_p:
            out.add(token_id)
        elif most + error >= top_p:
            unclear.add(token_id)
        most_before += weight
        least_before += 0.0 if token_id in undecided else weight
    return out, unclear


def _sign(value: float) -> float | None:
    return None if value == 0.0 else math.copysign(1.0, value)


def _clip(value: float) -> float:
    return max(-1.0, min(1.0, value))
