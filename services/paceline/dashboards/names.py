"""What a PromQL expression mentions: metrics, the labels that it matches, those that it groups by.

No parser of the whole language: enough to find every name in the expressions that we generate, and
to refuse what it does not understand. Prometheus itself is the judge of syntax.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_AGGREGATES = ("sum", "min", "max", "avg", "count")
_WORDS = {*_AGGREGATES, "rate", "increase", "histogram_quantile", "and", "or", "unless", "bool"}
_TOKEN = re.compile(
    r"""\s+|(?P<string>"(?:[^"\\]|\\.)*")|(?P<window>\[[^\]]*\])|(?P<number>\d+(\.\d+)?)"""
    r"""|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^=<>(){},])"""
)


@dataclass(frozen=True, slots=True)
class Selector:
    """One metric as it is asked for; `matchers` by label: operator and text."""

    name: str
    matchers: dict[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Mentioned:
    selectors: tuple[Selector, ...]
    grouped_by: frozenset[str]


def mentioned(query: str) -> Mentioned:
    """Raises ValueError for what it cannot read."""
    tokens = _tokens(query)
    selectors: list[Selector] = []
    grouped: set[str] = set()
    place = 0
    while place < len(tokens):
        kind, text = tokens[place]
        place += 1
        if kind != "name":
            continue
        if text in ("by", "without", "on", "ignoring"):
            labels, place = _labels(tokens, place)
            grouped |= labels
        elif text not in _WORDS:
            matchers, place = _matchers(tokens, place)
            selectors.append(Selector(text, matchers))
    return Mentioned(tuple(selectors), frozenset(grouped))


def _tokens(query: str) -> list[tuple[str, str]]:
    found, place = [], 0
    while place < len(query):
        match = _TOKEN.match(query, place)
        if match is None:
            raise ValueError(f"cannot read {query[place:]!r}")
        if match.lastgroup is not None:
            found.append((match.lastgroup, match.group()))
        place = match.end()
    return found


def _labels(tokens: list[tuple[str, str]], place: int) -> tuple[set[str], int]:
    _expect(tokens, place, "(")
    labels: set[str] = set()
    for after in range(place + 1, len(tokens)):
        kind, text = tokens[after]
        if text == ")":
            return labels, after + 1
        if kind == "name":
            labels.add(text)
    raise ValueError("a list of labels without an end")


def _matchers(tokens: list[tuple[str, str]], place: int) -> tuple[dict[str, tuple[str, str]], int]:
    matchers: dict[str, tuple[str, str]] = {}
    if place >= len(tokens) or tokens[place][1] != "{":
        return matchers, place
    place += 1
    while tokens[place][1] != "}":
        if tokens[place][1] == ",":
            place += 1
            continue
        (_, label), (_, operator), (kind, text) = tokens[place : place + 3]
        if operator not in ("=", "=~", "!=", "!~") or kind != "string":
            raise ValueError(f"cannot read the matcher of {label}")
        matchers[label] = (operator, text[1:-1])
        place += 3
    return matchers, place + 1


def _expect(tokens: list[tuple[str, str]], place: int, text: str) -> None:
    if place >= len(tokens) or tokens[place][1] != text:
        raise ValueError(f"expected {text}")
