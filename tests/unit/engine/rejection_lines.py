"""Lines as a target's rejection log has them. For tests only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.protocol.token_log import TokenLog


def line(text: Sequence[int], at: int, window: int = 0, **changes: Any) -> dict[str, Any]:
    """What was proposed behind the first `at` tokens of the text was not its token there."""
    token_id = text[at] if at < len(text) else 7
    row: dict[str, Any] = {
        "model": "tiny",
        "adapter": "",
        "source": "model",
        "temperature": 0.8,
        "context_hash": f"{TokenLog(text[:at]).hash_at(at):016x}",
        "context_len": at,
        "prompt_len": 2,
        "num_accepted": 0,
        "token_id": token_id,
        "logprob": -0.5,
        "top": [[token_id, -0.5], [token_id + 1, -1.5]],
    }
    if window:
        row["context"] = list(text[max(0, at - window) : at])
    return row | changes


def write_lines(path: Path, rows: Iterable[dict[str, Any]], rest: str = "") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + rest, encoding="utf-8")
    return path
