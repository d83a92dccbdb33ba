"""The README's table on a schema small enough to read."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from paceline.cli.config_table import HEADER, markdown_table, rows_of


class Inner(BaseModel):
    rate: float = Field(0.5, gt=0, le=1.0, description="a share | of all")
    method: Literal["a", "b"] = Field("a", description="which")


class Outer(BaseModel):
    name: str = Field("x", description="a name")
    inner: Inner = Field(default_factory=Inner, description="a section")


def test_sections_become_dotted_keys_with_bounds_and_choices() -> None:
    assert rows_of(Outer) == [
        ("name", "`x`", "", "a name"),
        ("inner.rate", "`0.5`", "> 0, <= 1", "a share \\| of all"),
        ("inner.method", "`a`", "`a`, `b`", "which"),
    ]


def test_the_table_is_markdown() -> None:
    header, rule, first, *_ = markdown_table().splitlines()
    assert f"{header}\n{rule}\n" == HEADER
    assert (
        first == "| `gateway.served_model_name` | `toy` |  | the `model` that requests must name |"
    )
