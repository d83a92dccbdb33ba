"""`paceline explain`."""

from __future__ import annotations


def explain() -> None:
    """Say why each target of a running service drafts as far as it does."""
    raise NotImplementedError
