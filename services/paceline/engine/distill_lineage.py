"""Whether a draft that goes on from another one is measured on chats that the other learned from.

Reports say of each run its seed and its data in words; no chats are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.engine.distill_folders import REPORT
from paceline.engine.json_files import read_json
from paceline.errors import ConfigError

MADE_UP = "chats that the target made up"
BESIDES = "; besides "  # behind the chats: what is never held out


def earlier_runs(draft: Path) -> list[dict[str, Any]] | None:
    """Seed and data of the run that made the draft, and of those that it went on from; None where
    its folder does not say."""
    try:
        made = read_json(draft / REPORT)["made"]
        run = {"seed": int(made["recipe"]["seed"]), "data": str(made["data"])}
        if not made["recipe"].get("init"):
            return [run]
        before = made["earlier"]
        return [run, *({"seed": int(r["seed"]), "data": str(r["data"])} for r in before)]
    except (ConfigError, LookupError, TypeError, ValueError, AttributeError):
        return None


def held_out_note(earlier: list[dict[str, Any]] | None, seed: int, data: str) -> str:
    """What a card must say about the held-out chats; empty where no earlier run learned from them.

    The same seed and data hold the same chats out; other seeds make up other chats.
    """
    if earlier is None:
        return (
            "the draft that this one went on from does not say what it learned from: it may know "
            "the held-out chats, and the figures may flatter"
        )
    if all(_are_apart(run, seed, data) for run in earlier):
        return ""
    return (
        "the draft that this one went on from may have learned from the held-out chats, so the "
        "figures may flatter: take another --seed, or hold the same chats out"
    )


def _are_apart(run: dict[str, Any], seed: int, data: str) -> bool:
    theirs, ours = (text.partition(BESIDES)[0] for text in (run["data"], data))
    are_made_up = MADE_UP in theirs, MADE_UP in ours
    if all(are_made_up):
        return run["seed"] != seed or theirs == ours
    return any(are_made_up) or theirs == ours
