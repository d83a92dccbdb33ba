"""Exact enumeration over both shipped sessions and a wire between them.

A schedule is a fixed list of events (draws, messages, passes), the same on every path, as in a
network that does not look at tokens. After every event all paths that reached the same state
are merged and their probabilities added up, so that three output tokens over several rounds, with
proposals drawn ahead, late, twice or behind a lost verdict, are enumerated with no rounding.

In exact arithmetic neither shipped rule recovers the token that it rejected; rounding can. The
sessions must not rely on it, so a third rule does so all the time: see `accept_peeking`.
"""

import functools
import pickle
import random
from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

from paceline.proposers.base import LocalProposal
from paceline.protocol.draft_session import DraftSession, WorkResult
from paceline.protocol.messages import DraftTokens, Nack, Opened, OpenStatus, Verdict
from paceline.protocol.target_session import Disposition, TargetSession
from paceline.sampling.acceptance import Acceptance, accept_block, accept_rejection, race
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import TOTAL_WEIGHT, SparseProbs
from paceline.testing.enumeration import exact_law

PEEKED_SHARE = Fraction(1, 4)


def accept_peeking(draft_token_ids, draft_probs, target_probs, uniforms, residual_noise):
    """Exact if all proposals are new, but the last decides whether the first one stays, and the
    recovered token may be the first one itself: what the last was must then be forgotten.

    The first, x, is kept with probability c min(1, p(x) / q(x)) whatever x is, if averaged over
    the last: the residual is p - c min(p, q), which has mass at x (math.md 2a, abstention).
    """
    if len(draft_token_ids) < 2:
        return accept_rejection(
            draft_token_ids, draft_probs, target_probs, uniforms, residual_noise
        )
    first, last = draft_token_ids[0], draft_token_ids[-1]
    drafted = [Fraction(draft_probs[0].weight(i), TOTAL_WEIGHT) for i in range(NUM_TOKENS)]
    kept = [min(p, q) for p, q in zip(target_probs[0], drafted, strict=True)]
    heaviest = max(draft_probs[-1].weights)
    likeliest = draft_probs[-1].token_ids[draft_probs[-1].weights.index(heaviest)]
    share = PEEKED_SHARE * TOTAL_WEIGHT / heaviest if last == likeliest else 0
    if uniforms[0] < share * kept[first] / drafted[first]:
        return Acceptance(1, race(target_probs[1], residual_noise[1]))
    residual = [p - PEEKED_SHARE * k for p, k in zip(target_probs[0], kept, strict=True)]
    return Acceptance(0, race(residual, residual_noise[0]))


RULES = {
    "rejection": (VerificationMode.REJECTION, accept_rejection),
    "block": (VerificationMode.BLOCK, accept_block),
    "peeking": (VerificationMode.BLOCK, accept_peeking),
}
NUM_TOKENS = 3
LENGTH = 3
PROMPT = (0,)
MAX_EVENTS = 200
NUM_WORDS = 4
WORD_STEP = TOTAL_WEIGHT // NUM_WORDS
WORD_LAW = [Fraction(1, NUM_WORDS)] * NUM_WORDS


class Laws:
    """Target and draft laws of every context, drawn from one seed.

    The draft's are in quarters, so that one of four words decides a draw.
    """

    def __init__(self, seed, *, has_full_support=False):
        nums_entries = (NUM_TOKENS,) if has_full_support else (1, 2, 3, 3)

        @functools.cache
        def target(context):
            rng = random.Random(f"target {seed} {context}")
            weights = [rng.choice((0, 1, 2, 5)) for _ in range(NUM_TOKENS)]
            weights[rng.randrange(NUM_TOKENS)] += 1
            return [Fraction(weight, sum(weights)) for weight in weights]

        @functools.cache
        def draft(context):
            rng = random.Random(f"draft {seed} {context}")
            ids = tuple(rng.sample(range(NUM_TOKENS), rng.choice(nums_entries)))
            cuts = sorted(rng.sample(range(1, NUM_WORDS), len(ids) - 1))
            quarters = [b - a for a, b in pairwise((0, *cuts, NUM_WORDS))]
            return SparseProbs(ids, tuple(quarter * WORD_STEP for quarter in quarters))

        self.target, self.draft = target, draft

    def output_law(self):
        law = {(): Fraction(1)}
        for _ in range(LENGTH):
            law = {
                (*text, token_id): prob * share
                for text, prob in law.items()
                for token_id, share in enumerate(self.target((*PROMPT, *text)))
                if share
            }
        return law


@dataclass
class Parts:
    """What is under test; the teeth put subclasses here."""

    target: type = TargetSession
    draft: type = DraftSession
    is_noise_keyed_by_position: bool = False
    chooses_by_value: bool = False


@dataclass
class World:
    """Both ends and what is between them. One method per event."""

    rule: str
    parts: Parts
    target: TargetSession = None
    draft: DraftSession = None
    to_target: list = field(default_factory=list)
    to_draft: list = field(default_factory=list)
    pass_of: tuple | None = None
    words: dict = field(default_factory=dict)
    dispositions: set = field(default_factory=set)

    def start(self):
        self.target = self.parts.target(
            1,
            PROMPT,
            sampling=SamplingParams(),
            mode=RULES[self.rule][0],
            max_tokens=8,
            max_len=64,
            max_draft_ahead=3,
        )
        self.reopen(None, None)
        return self

    # -- the draft ---------------------------------------------------------------------------

    def reopen(self, laws, chance):
        """A new draft takes over; what the old one sent may still arrive."""
        if self.target.is_attached:
            self.target.lose_draft()
        opened = self.target.reopen()
        self.draft = self.parts.draft(opened, max_len=64)
        self.target.receive_opened(Opened(1, opened.epoch, OpenStatus.OK))

    def begin_draw(self, laws, chance):
        if self.draft.can_draft():
            self.draft.begin_work(64)
            self.draft._num_draws = 0  # the noise is new each time here: let states merge

    def end_draw(self, laws, chance):
        work = self.draft._working
        if work is not None:
            # what the engine read at the start of the pass
            context = (*self.draft.log.slice(0, work.start), *work.token_ids)
            if self.draft.log.hash_at(min(work.end, len(self.draft.log))) != work.context_hash:
                context = self.draft.log.slice(0)  # of no interest: it will be dropped
            probs = laws.draft(context)
            token_id = probs.draw(self.word(chance, work) * WORD_STEP)
            self.draft.end_work(WorkResult(token_id, draft_probs=probs))

    def word(self, chance, work):
        """Noise of one draw: new each time, since no `round` comes twice."""
        if not self.parts.is_noise_keyed_by_position:
            return chance.choose(WORD_LAW)
        if work.output_index not in self.words:
            self.words[work.output_index] = chance.choose(WORD_LAW)
        return self.words[work.output_index]

    def draw(self, laws, chance):
        self.begin_draw(laws, chance)
        self.end_draw(laws, chance)

    def send(self, laws, chance):
        message = self.draft.take_draft()
        if message is not None:
            self.to_target.append(message)

    # -- the wire ----------------------------------------------------------------------------

    def copy(self, laws, chance):
        """The newest proposals will arrive a second time."""
        if self.to_target:
            self.to_target.append(self.to_target[-1])

    def lose_verdict(self, laws, chance):
        self.to_draft.clear()

    def at_target(self, laws, chance):
        """The oldest message arrives."""
        message = self.to_target.pop(0) if self.to_target else None
        if isinstance(message, DraftTokens):
            disposition = self.target.receive_draft(message)
            self.dispositions.add(disposition)
            if disposition is Disposition.GAP:
                self.to_draft.append(Nack(1, self.target.epoch, len(self.target.log)))
        elif isinstance(message, Nack) and message.epoch == self.target.epoch:
            verdict = self.target.receive_nack(message.have_len)
            if verdict is not None:
                self.to_draft.append(verdict)

    def at_draft(self, laws, chance):
        message = self.to_draft.pop(0) if self.to_draft else None
        if isinstance(message, Verdict):
            outcome = self.draft.receive_verdict(message)
            if isinstance(outcome, Nack):
                self.to_target.append(outcome)
        elif message is not None:
            self.draft.receive_nack(message)

    # -- the target ---------------------------------------------------------------------------

    def begin_pass(self, laws, chance, limit):
        rows = self.target.begin_verify(limit)
        text = self.target.log.slice(0, self.target.committed_len)
        self.pass_of = (text, rows, self.target.verifying_probs)

    def begin_local(self, laws, chance, limit):
        """Local proposals instead of the window: a function of the committed text."""
        text = self.target.log.slice(0, self.target.committed_len)
        guesses = []
        for place in range(limit):
            law = laws.target((*text, *guesses))
            guesses.append((law.index(max(law)) + place) % NUM_TOKENS)
        window = self.target.log.slice(len(text))
        if self.parts.chooses_by_value and window and window[0] != guesses[0]:
            self.begin_pass(laws, chance, limit)
            return
        rows = self.target.begin_verify(limit, LocalProposal(tuple(guesses)))
        self.pass_of = (text, rows, self.target.verifying_probs)

    def end_pass(self, laws, chance):
        text, rows, probs = self.pass_of
        self.pass_of = None
        target_rows = [laws.target((*text, *rows[:i])) for i in range(len(rows) + 1)]
        noise = [chance.exponentials(NUM_TOKENS) for _ in target_rows]
        uniforms = [chance.uniform() for _ in rows]
        acceptance = RULES[self.rule][1](rows, probs, target_rows, uniforms, noise)
        step = self.target.end_verify(acceptance)
        if step.verdict is not None:
            self.to_draft.append(step.verdict)

    @property
    def output(self):
        return self.target.log.slice(len(PROMPT), self.target.committed_len)


def law_of_output(laws, rule, name, parts):
    """Exact law of the first tokens, and every disposition that occurred on some path."""
    done = defaultdict(Fraction)
    seen = set()
    states = {pickle.dumps(World(rule, parts).start()): Fraction(1)}
    schedule = [event.strip() for event in SCHEDULES[name].split(",")]
    for number in range(MAX_EVENTS):
        if not states:
            return dict(done), seen
        name, *arguments = schedule[number % len(schedule)].split()
        states = advance(states, laws, name, map(int, arguments), done, seen)
    raise AssertionError(f"{len(states)} states have not ended")


def advance(states, laws, name, arguments, done, seen):
    arguments = tuple(arguments)
    after = defaultdict(Fraction)
    for state, prob in states.items():

        def play(chance, state=state):
            world = pickle.loads(state)  # noqa: S301 - our own bytes
            getattr(world, name)(laws, chance, *arguments)
            seen.update(world.dispositions)
            world.dispositions.clear()
            if len(world.output) >= LENGTH:
                return world.output[:LENGTH]
            return pickle.dumps(world)

        for outcome, share in exact_law(play).items():
            bucket = done if isinstance(outcome, tuple) else after
            bucket[outcome] += prob * share
    return after


# Each runs in a circle until three tokens are out; every round commits at least one.
SCHEDULES = {
    "lock_step": "draw, draw, send, at_target, begin_pass 2, end_pass, at_draft",
    "window_longer_than_the_block": (
        "draw, draw, draw, send, at_target, begin_pass 2, end_pass, at_draft"
    ),
    "ahead_during_the_pass": (
        "draw, draw, send, at_target, begin_pass 2, draw, send, at_target, end_pass, at_draft"
    ),
    "ahead_and_late": (
        "draw, draw, send, at_target, begin_pass 2, draw, send, end_pass, at_target, at_draft"
    ),
    "drawing_while_the_verdict_arrives": (
        "draw, draw, send, at_target, begin_pass 2, end_pass, begin_draw, at_draft, end_draw,"
        "send, at_target, begin_pass 1, end_pass, at_draft"
    ),
    "twice": (
        "draw, send, at_target, draw, draw, send, copy, at_target, begin_pass 3, end_pass,"
        "at_target, begin_pass 3, end_pass, at_draft, at_draft"
    ),
    "copy_between_verdict_and_redraw": (
        "draw, send, at_target, draw, draw, send, copy, at_target, begin_pass 3, end_pass,"
        "at_draft, draw, at_target, send, at_target"
    ),
    "plain_rounds_between": (
        "draw, draw, draw, send, begin_pass 2, at_target, end_pass, at_draft, draw, send,"
        "at_target, begin_pass 2, end_pass, at_draft"
    ),
    "lost_verdict": (
        "draw, draw, send, at_target, begin_pass 2, end_pass, lose_verdict, draw, send, at_target,"
        "begin_pass 2, end_pass, at_draft, at_target, at_draft, at_draft"
    ),
    "gap_after_the_verdict": (
        "draw, draw, draw, send, at_target, begin_pass 2, end_pass, at_draft, draw, send,"
        "at_target, at_draft, send, at_target, begin_pass 2, end_pass, at_draft"
    ),
    "gap_after_the_repeat": (
        "draw, draw, draw, send, at_target, begin_pass 3, end_pass, lose_verdict, begin_pass 0,"
        "end_pass, at_draft, at_target, at_draft, draw, send, at_target, at_draft, send, at_target,"
        "begin_pass 2, end_pass, at_draft"
    ),
    "another_draft_during_the_pass": (
        "draw, draw, send, copy, at_target, begin_pass 2, reopen, draw, send, at_target,"
        "end_pass, at_target, at_draft"
    ),
    "local_passes_between": (
        "draw, draw, draw, send, at_target, begin_local 2, end_pass, at_draft, begin_pass 2,"
        "end_pass, at_draft"
    ),
    "local_while_proposals_arrive": (
        "draw, draw, send, begin_local 2, at_target, draw, end_pass, send, at_draft, at_target,"
        "begin_pass 2, end_pass, at_draft"
    ),
    "local_behind_a_rejection": (
        "draw, draw, draw, send, at_target, begin_pass 2, draw, send, end_pass, begin_local 1,"
        "at_target, end_pass, at_draft, at_draft"
    ),
    "blocks_of_three_then_one": (
        "draw, draw, draw, send, at_target, begin_pass 3, end_pass, at_draft, draw, draw, send,"
        "at_target, begin_pass 1, end_pass, at_draft"
    ),
}
