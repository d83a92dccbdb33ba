"""What a run must hold: safety and liveness of its answers. Pure. Hygiene is asked of the cluster.

Texts are compared with the reference byte by byte: a finished one must equal it, any other one
must be its beginning. Tokens are aligned, so that a lost token is told from a repeated one.
"""

from __future__ import annotations

import difflib
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from chaos.traffic import Outcome


@dataclass
class Findings:
    """What a run's answers say."""

    requests: int = 0
    finished: int = 0
    left: int = 0
    failed: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    unclean: int = 0  # failures without an error object
    differing: list[str] = field(default_factory=list)
    tokens_lost: int = 0
    tokens_duplicated: int = 0
    tokens_compared: int = 0
    worst_stall_s: float = 0.0
    num_gaps: int = 0  # between events; none: no stream was watched
    accepted: int = 0

    @property
    def text_identical(self) -> bool:
        return not self.differing


def examine(outcomes: Iterable[Outcome], references: Sequence[Outcome]) -> Findings:
    """`references[i]` is what request i says when nothing disturbs it."""
    findings = Findings()
    for outcome in outcomes:
        add(findings, outcome, references[outcome.request.index])
    return findings


def add(findings: Findings, outcome: Outcome, reference: Outcome) -> None:
    """Count one more answer."""
    findings.requests += 1
    findings.finished += outcome.is_done
    findings.left += outcome.has_left
    findings.accepted += outcome.num_accepted
    if outcome.has_failed:
        findings.failed += 1
        findings.errors[outcome.error] += 1
        findings.unclean += not outcome.is_clean
    findings.num_gaps += len(outcome.gaps)
    findings.worst_stall_s = max([findings.worst_stall_s, *outcome.gaps])
    _compare(outcome, reference, findings)


def _compare(outcome: Outcome, reference: Outcome, findings: Findings) -> None:
    for choice, (text, wanted) in enumerate(zip(outcome.texts, reference.texts, strict=True)):
        is_same = text == wanted if outcome.is_done else wanted.startswith(text)
        if not is_same:
            findings.differing.append(
                f"request {outcome.request.index} choice {choice}: {shown(text, wanted)}"
            )
        has_tokens = bool(reference.tokens[choice])
        got: Sequence[str] = outcome.tokens[choice] if has_tokens else text
        expected: Sequence[str] = reference.tokens[choice] if has_tokens else wanted
        if not outcome.is_done:
            expected = expected[: len(got)]
        lost, duplicated = misaligned(got, expected)
        findings.tokens_lost += lost
        findings.tokens_duplicated += duplicated
        findings.tokens_compared += len(expected)


def misaligned(got: Sequence[str], wanted: Sequence[str]) -> tuple[int, int]:
    """(tokens of `wanted` that are missing, tokens too many); a changed one counts in both."""
    if list(got) == list(wanted):
        return 0, 0
    matcher = difflib.SequenceMatcher(None, wanted, got, autojunk=False)
    pieces = [piece for piece in matcher.get_opcodes() if piece[0] != "equal"]
    lost = sum(end - start for _, start, end, _, _ in pieces)
    extra = sum(end - start for _, _, _, start, end in pieces)
    return lost, extra


def shown(text: str, wanted: str) -> str:
    """Where two texts part, with a little of each."""
    at = next(
        (i for i, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b),
        min(len(text), len(wanted)),
    )
    return f"from character {at} on {text[at : at + 12]!r} instead of {wanted[at : at + 12]!r}"


def median_gap_s(outcomes: Iterable[Outcome]) -> float:
    """A round of the undisturbed service, as a client sees it."""
    gaps = [gap for outcome in outcomes for gap in outcome.gaps]
    return statistics.median(gaps) if gaps else 0.0
