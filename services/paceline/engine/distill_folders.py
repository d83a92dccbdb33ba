"""Where a distillation may write: nothing of a user's is overwritten, no stage disturbs another.

Knows the names of what a result holds, not what is in it, but for a report.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

REPORT, CARD = "report.json", "README.md"


def check_apart(source: Path, places: dict[str, Path], whose: str = "the target's") -> None:
    """`ConfigError` where one of the places (by option) lies inside the source's folder or another.

    One that the source lies in is fine: `claim_result` sees whether it holds something else.
    """
    found = {name: path.resolve() for name, path in places.items()}
    for name, path in found.items():
        if path.is_relative_to(source.resolve()):
            raise ConfigError(f"{name} {places[name]} is in {whose} own folder: name another")
        for other, where in found.items():
            if other != name and path.is_relative_to(where):
                raise ConfigError(
                    f"{name} {places[name]} is in {other}'s folder ({places[other]}): "
                    "they must lie apart"
                )


def claim_result(out: Path) -> None:
    """Create the folder; `ConfigError` unless it is new or holds the result of an earlier run."""
    is_used = out.is_dir() and any(out.iterdir())
    if is_used and not (out / REPORT).is_file():
        raise ConfigError(f"{out} holds something else: name a new folder for the result")
    out.mkdir(parents=True, exist_ok=True)


def retract_report(out: Path) -> None:
    """Before a result goes into the claimed folder: an old card is not true of it, and a folder
    with half of one can be claimed again."""
    (out / CARD).unlink(missing_ok=True)
    (out / REPORT).write_text(json.dumps({"unfinished": True}) + "\n", encoding="utf-8")


def claim_report(out: Path, target: Path, measured: Path) -> dict[str, Any]:
    """Claim a folder for a report alone; what its report says already on how `measured` was made.

    `ConfigError` if the folder belongs to another draft, or other heads: its card would lie.
    """
    check_apart(target, {"--out": out})
    claim_result(out)
    made = _made(out)
    if made and out.resolve() != measured.resolve():
        raise ConfigError(f"{out} holds another draft's report: name a new folder for this one")
    return made


def _made(folder: Path) -> dict[str, Any]:
    path = folder / REPORT
    if not path.exists():
        return {}
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: name a new folder for the report") from error
    is_known = isinstance(report, dict) and isinstance(report.get("made"), dict)
    return {"made": report["made"]} if is_known else {}
