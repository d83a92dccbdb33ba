"""What targets write down about rejected proposals, to train drafts with: `rejection_log`."""

from __future__ import annotations

from pydantic import Field

from paceline.config.section import Section


class RejectionLogConfig(Section):
    """Where drafts guess wrong, in files of JSON lines. Off without a `file_dir`."""

    file_dir: str = Field(
        "",
        max_length=4096,
        description="folder for one file of JSON lines per target process (~ is the home folder); "
        "empty: nothing is written",
    )
    sample_ratio: float = Field(
        1.0, ge=0, le=1, description="share of requests whose rejections are written, by their id"
    )
    context_tokens: int = Field(
        0,
        ge=0,
        le=131_072,
        description="last tokens of the context that each line holds: these ARE the text of "
        "prompts and answers; 0: a hash only",
    )
    max_file_bytes: int = Field(
        64 << 20,
        ge=64 << 10,
        le=16 << 30,
        description="size at which such a file is put aside (one old one is kept)",
    )
    max_queue_size: int = Field(
        4096, ge=16, le=1 << 20, description="lines that wait to be written; more are dropped"
    )
