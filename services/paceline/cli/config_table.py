"""The README's configuration table, made from the schema so that the two cannot differ."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.config import AppConfig

HEADER = "| key | default | allowed | meaning |\n| --- | --- | --- | --- |\n"
BOUND_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def markdown_table() -> str:
    lines = [f"| `{key}` | {' | '.join(cells)} |\n" for key, *cells in rows_of(AppConfig)]
    return HEADER + "".join(lines)


def rows_of(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(key, default, allowed values, meaning) of every leaf field, in the schema's order."""
    rows = []
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            rows += rows_of(kind, f"{key}.")
            continue
        text = (field.description or "").replace("|", "\\|")
        rows.append((key, _default(field), _allowed(field), text))
        items = get_args(kind)[0] if get_origin(kind) is tuple else None
        if isinstance(items, type) and issubclass(items, BaseModel):
            rows += rows_of(items, f"{key}[].")
    return rows


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "none" if default in ("", (), {}, None) else f"`{default}`"


def _allowed(field: FieldInfo) -> str:
    kind = get_origin(field.annotation)
    if kind in (tuple, dict):
        return "a list" if kind is tuple else "a mapping"
    if kind is Literal:
        return ", ".join(f"`{value}`" for value in get_args(field.annotation))
    bounds = [
        f"{sign} {_number(value)}"
        for item in field.metadata
        for name, sign in BOUND_SIGNS.items()
        if (value := getattr(item, name, None)) is not None
    ]
    return ", ".join(bounds)


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
