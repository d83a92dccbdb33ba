"""A dict from another process, read one checked value at a time. Knows no report.

What is too long is cut where the rest is of use, and refused where it is not (names).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

MAX_NAME_CHARS = 256
MAX_SENTENCE_CHARS = 500
MAX_NUMBER = 1e15


class ReportError(ValueError):
    """A report that no replica of ours would send: a sentence says what is wrong."""


class Values:
    """A dict from elsewhere, read one checked value at a time."""

    def __init__(self, data: object) -> None:
        if not isinstance(data, Mapping):
            raise ReportError(f"expected names and values, not {type(data).__name__}")
        self._data = data

    def get(self, key: str, default: object = None) -> object:
        return self._data.get(key, default)

    def keys(self, limit: int) -> list[str]:
        return [str(key) for key in list(self._data)[:limit]]

    def name(self, key: str) -> str:
        """A word that must be there."""
        value = self._data.get(key)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
            raise ReportError(f"{key} must be a text of 1 to {MAX_NAME_CHARS} characters")
        return value

    def names(self, key: str, limit: int) -> tuple[str, ...]:
        values = listed(self._data.get(key, ()), key)[:limit]
        if not all(isinstance(v, str) and len(v) <= MAX_NAME_CHARS for v in values):
            raise ReportError(f"{key} must hold texts of at most {MAX_NAME_CHARS} characters")
        return tuple(str(value) for value in values)

    def words(self, key: str, limit: int) -> dict[str, str]:
        """Names and a word for each."""
        data = self._data.get(key, {})
        if not isinstance(data, Mapping):
            raise ReportError(f"{key} must hold names and words")
        items = list(data.items())[:limit]
        if not all(isinstance(v, str) and len(v) <= MAX_NAME_CHARS for pair in items for v in pair):
            raise ReportError(f"{key} must hold texts of at most {MAX_NAME_CHARS} characters")
        return dict(items)

    def figures(self, key: str, known: Collection[str]) -> dict[str, float]:
        """A number for each of some of the `known` names; what another release knows is left
        out."""
        data = self._data.get(key, {})
        if not isinstance(data, Mapping):
            raise ReportError(f"{key} must hold names and numbers")
        return {name: _number(data[name], key) for name in known if name in data}

    def sentence(self, key: str) -> str:
        return str(self._data.get(key, ""))[:MAX_SENTENCE_CHARS]

    def flag(self, key: str) -> bool:
        return self._data.get(key, False) is True

    def signed(self, key: str) -> float:
        return _number(self._data.get(key, 0), key, -MAX_NUMBER)

    def number(self, key: str) -> float:
        return _number(self._data.get(key, 0), key)

    def maybe_number(self, key: str) -> float | None:
        return None if self._data.get(key) is None else self.number(key)

    def numbers(self, key: str, limit: int) -> tuple[float, ...]:
        return tuple(_number(v, key) for v in listed(self._data.get(key, ()), key)[:limit])

    def whole(self, key: str) -> int:
        return int(self.number(key))

    def maybe_whole(self, key: str) -> int | None:
        return None if self._data.get(key) is None else self.whole(key)


def _number(value: object, key: str, low: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ReportError(f"{key} must be a number")
    if not low <= value <= MAX_NUMBER:  # NaN, too
        raise ReportError(f"{key} must be from {low:g} to {MAX_NUMBER:g}")
    return float(value)


def listed(value: object, key: str) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise ReportError(f"{key} must be a list")
    return value
