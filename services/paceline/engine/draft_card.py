"""What the figures of a draft promise, and its model card: a README.md out of a report.

Pure: a report is a dictionary as it stands in report.json. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_SPEEDUP_TOKENS = 16  # the service's own largest num_speculative_tokens by default


@dataclass(frozen=True, slots=True)
class Speedup:
    """Against no draft, for a request alone. `acceptance` is a token's, taken as independent.

    Co-located: the draft's steps and the pass take turns, `num_tokens` a round, the best number.
    Hidden: the draft works while the target does, and makes `num_hidden` tokens in that time.
    Both take a pass over all tokens of a round to cost as much as one over a single row.
    """

    acceptance: float
    num_tokens: int
    colocated: float
    num_hidden: int
    hidden: float


def tokens_per_round(acceptance: float, num_tokens: int) -> float:
    """Mean committed tokens of a pass over so many proposals: 1 + a + a^2 + ... (math.md 2g.1)."""
    return float(sum(acceptance**k for k in range(num_tokens + 1)))


def speedup(acceptance: float, cost_ratio: float) -> Speedup:
    """`cost_ratio`: a draft step over a target pass. 0 tokens and 1.0 where no draft would pay."""

    def colocated(num: int) -> float:
        return tokens_per_round(acceptance, num) / (1.0 + num * cost_ratio)

    best = max(range(MAX_SPEEDUP_TOKENS + 1), key=colocated)
    fits = int(min(1.0 / max(cost_ratio, 1e-9), MAX_SPEEDUP_TOKENS))
    return Speedup(acceptance, best, colocated(best), fits, tokens_per_round(acceptance, fits))


def acceptances(figures: Mapping[str, Any]) -> dict[str, float]:
    """By temperature, "0" for greedy, of an `Acceptance` as a dictionary."""
    coupled = {str(key): float(value) for key, value in figures["coupled"].items()}
    return {"0": float(figures["agreement"]), **coupled}


# ------------------------------------------------------------------------------------- the card


def card(report: Mapping[str, Any]) -> str:
    """Markdown."""
    kind = {"draft": "A draft", "medusa": "Medusa heads"}[report["kind"]]
    lines = [
        f"# {report['name']}",
        "",
        f"{kind} for {report['target']}, distilled from it by `paceline distill`. "
        "A derivative of the target: the target's licence holds for it.",
        "",
        *table(report),
        "",
        "Single texts are far apart, and other kinds of prompts than those measured may be, too. "
        f"The table again: `{report['measure_command']}`",
        "",
        *_how(report),
    ]
    return "\n".join(lines) + "\n"


def table(report: Mapping[str, Any]) -> list[str]:
    """The figures, as lines of Markdown."""
    return _draft_table(report) if report["kind"] == "draft" else _heads_table(report)


def _draft_table(report: Mapping[str, Any]) -> list[str]:
    found, cost = report["acceptance"], report.get("cost")
    rows = [[f"on {found['num_tokens']:,} answer tokens of {report['num_chats']} held-out chats"]]
    rows[0] += [f"T = {key}" for key in acceptances(found)]
    rows.append(["acceptance (coupled sampling; T = 0: same greedy token)"])
    rows[1] += [f"{value:.3f}" for value in acceptances(found).values()]
    overlap = [f"{value:.3f}" for value in found["optimal"].values()]
    rows.append(["overlap of the two laws (1 - TV)", "", *overlap])
    after = []
    if cost:
        predicted = report["speedup"].values()
        colocated = [f"{s['colocated']:.2f} (K = {s['num_tokens']})" for s in predicted]
        hidden = [f"{s['hidden']:.2f} (K = {s['num_hidden']})" for s in predicted]
        rows.append(["predicted speed-up, draft and target in turns, best K", *colocated])
        rows.append(["predicted speed-up, draft hidden behind the target's passes", *hidden])
        after = [
            "",
            f"A draft step costs {cost['ratio']:.2f} of a target step ({cost['draft_ms']:.1f} ms / "
            f"{cost['target_ms']:.1f} ms, one row, float32, {report['machine']}). Predicted is "
            "E(K) / (1 + K c) and E(K), with E(K) = 1 + a + ... + a^K: tokens accepted "
            "independently, passes over K + 1 rows as dear as over one, no network.",
        ]
    return [*_table(rows), *after]


def _heads_table(report: Mapping[str, Any]) -> list[str]:
    heads = report["heads"]
    rows = [
        [f"on {report['num_tokens']:,} tokens of greedy answers to {report['num_chats']} chats"],
        *[[f"head {h}: token t + {h + 2}"] for h in range(len(heads))],
    ]
    rows[0] += ["top 1", "top 2", "top 3", *[f"coupled, T = {t}" for t in heads[0]["coupled"]]]
    for row, head in zip(rows[1:], heads, strict=True):
        values = [*head["top"], *head["coupled"].values()]
        row += ["-" if value is None else f"{value:.3f}" for value in values]
    return [
        *_table(rows),
        "",
        f"Expected accepted tokens of a pass at T = 0: {report['accepted_chain']:.2f} for the "
        f"chain of first choices, {report['accepted_tree']:.2f} for a tree of "
        f"{report['tree_nodes']} nodes (the target's own token comes on top).",
    ]


def _how(report: Mapping[str, Any]) -> list[str]:
    made = report.get("made")
    if made is None:
        return []
    progress, budget = made["progress"], made["budget"]
    limit = f"{budget['steps']} steps" if budget["steps"] else f"{budget['seconds'] / 60:g} minutes"
    repeat = "The same command gives the same weights on the same machine and threads."
    if not budget["steps"]:
        repeat = "Limited by time, so the same command gives other weights: repeat with --steps."
    recipe = ", ".join(f"{key} {value}" for key, value in made["recipe"].items() if value != {})
    note = made.get("held_out_note")
    return [
        "## How it was made",
        "",
        f"- **Data**: {made['data']}",
        *([f"- **Held out**: {note}"] if note else []),
        f"- **Training**: {limit} were asked for; {progress['steps']:,} steps over "
        f"{progress['tokens']:,} tokens in {progress['seconds'] / 60:.1f} minutes, "
        f"{made['machine']}, seed {made['recipe']['seed']}. {repeat}",
        "- **Loss**: KL to the target's law over the tokens that can be proposed, blended with "
        "-log(overlap), and the squared error of the logits. Weights are averaged over steps.",
        f"- **Recipe**: {recipe}",
        f"- **Command**: `{made['command']}`",
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    width = max(map(len, rows))
    lines = ["| " + " | ".join([*row, *[""] * (width - len(row))]) + " |" for row in rows]
    return [lines[0], "|" + " --- |" * width, *lines[1:]]
