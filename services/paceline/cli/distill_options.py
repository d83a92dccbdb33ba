"""The options of `paceline distill`: their types and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

DEFAULT_VOCAB = 8192
DEFAULT_NUM_CHATS = 512
DEFAULT_MINUTES = 60.0
MAX_MEDUSA_HEADS = 16

_DATA: Any = {"rich_help_panel": "Data"}
_DRAFT: Any = {"rich_help_panel": "Draft"}
_TRAINING: Any = {"rich_help_panel": "Training"}
_REPORT: Any = {"rich_help_panel": "Report"}

Target = Annotated[
    str, typer.Argument(help="The target: alias, folder or Hub id.", show_default=False)
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the result.")]
Work = Annotated[
    Path | None, typer.Option(help="Data and checkpoints of a run; default: OUT-work.")
]
Chats = Annotated[
    Path | None,
    typer.Option(help="Chats, JSON lines with ids and prompt_len, not made-up ones.", **_DATA),
]
NumChats = Annotated[
    int | None,
    typer.Option(min=0, help=f"Chats that the target makes up: {DEFAULT_NUM_CHATS}.", **_DATA),
]
Text = Annotated[
    list[Path] | None, typer.Option(help="A text file, too; may be repeated.", **_DATA)
]
Rejections = Annotated[
    list[Path] | None,
    typer.Option(help="A target's rejection log, too, file or folder; may be repeated.", **_DATA),
]
Length = Annotated[int, typer.Option(min=32, max=65536, help="Most tokens of a chat.", **_DATA)]
HeldOut = Annotated[
    int | None, typer.Option(min=1, help="Last chats, to measure on: an eighth, 64.", **_DATA)
]
Layers = Annotated[
    str | None, typer.Option(help="Layers of the target to begin with: 0,1,16,17,18.", **_DRAFT)
]
NumLayers = Annotated[
    int | None, typer.Option(min=1, help="Or how many of them: a sixth.", **_DRAFT)
]
StudentConfig = Annotated[
    Path | None, typer.Option(help="Or a JSON of a smaller shape: hidden_size, ...", **_DRAFT)
]
Init = Annotated[
    str | None, typer.Option(help="Or a draft of the same target, to go on from.", **_DRAFT)
]
Vocab = Annotated[
    int | None,
    typer.Option(
        min=0, help=f"Tokens it can propose: {DEFAULT_VOCAB}, or --init's; 0: all.", **_DRAFT
    ),
]
Medusa = Annotated[
    int, typer.Option(min=0, max=MAX_MEDUSA_HEADS, help="So many heads, no draft.", **_DRAFT)
]
Published = Annotated[
    bool, typer.Option("--published", help="Heads with output layers of their own.", **_DRAFT)
]
Asset = Annotated[
    Path | None, typer.Option(help="Folder of the small form (int8, no embeddings).", **_DRAFT)
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="How long: the same result each time.", **_TRAINING)
]
Minutes = Annotated[
    float | None,
    typer.Option(min=0.0, help=f"Or by the clock: {DEFAULT_MINUTES:g}.", **_TRAINING),
]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of everything.", **_TRAINING)]
Rate = Annotated[float, typer.Option(min=1e-7, max=1.0, help="Learning rate.", **_TRAINING)]
Device = Annotated[str, typer.Option(help="cpu or cuda.", **_TRAINING)]
Threads = Annotated[int, typer.Option(min=1, max=256, help="torch's, on a CPU.", **_TRAINING)]
ReportOnly = Annotated[
    bool, typer.Option("--report-only", help="Train nothing, measure.", **_REPORT)
]
Draft = Annotated[str | None, typer.Option(help="The draft to measure.", **_REPORT)]
MedusaHeads = Annotated[Path | None, typer.Option(help="Or the heads to measure.", **_REPORT)]
Last = Annotated[int, typer.Option(min=1, help="On so many chats, the file's last.", **_REPORT)]
