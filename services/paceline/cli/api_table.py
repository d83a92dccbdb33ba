"""The README's table of request fields."""

from __future__ import annotations

from paceline.gateway.field_table import markdown_table

__all__ = ["markdown_table"]
