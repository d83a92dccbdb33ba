"""Values of somebody else's JSON, for a terminal: what is missing is shown as "-".

Trusts nothing: a text must not steer the terminal, a number may be absent, of another type or
infinite.
"""

from __future__ import annotations

import json
import math
from typing import Any

Json = dict[str, Any]

NOTHING = "-"
# Sources of proposals, where there is room for a letter only.
SOURCE_LETTERS = {"model": "m", "ngram": "n", "suffix": "s", "medusa": "h"}
SOURCE_LEGEND = "src: m draft model, n ngram, s suffix, h Medusa heads"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def word(value: Any) -> str:
    """Control characters are not passed on: a name must not steer the terminal."""
    text = NOTHING if value is None else str(value)
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def whole(value: Any) -> int:
    return int(number(value) or 0)


def figure(value: Any) -> str:
    """At most four digits that matter; whole numbers as they are."""
    known = number(value)
    if known is None:
        return NOTHING
    return f"{known:.0f}" if known == int(known) else f"{known:.4g}"


def fixed(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def percent(value: Any) -> str:
    known = number(value)
    return NOTHING if known is None else f"{100 * known:.0f} %"


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def dicts(value: Any) -> list[Json]:
    return [item for item in listed(value) if isinstance(item, dict)]


def size(num_bytes: float) -> str:
    """1536 -> 1.5 KiB."""
    for unit in _UNITS[:-1]:
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {_UNITS[-1]}"


def json_line(data: Any) -> str:
    """One line, whatever characters are in it."""
    return json.dumps(data, separators=(", ", ": "))
