"""How plain values travel between processes: pickled by field name.

So two releases understand each other while one replaces the other: names that the reader does not
know are dropped, those that are missing get their field's default. (A frozen dataclass with slots
is otherwise pickled by position.) Knows no value and no process.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def by_name(cls: type[T]) -> type[T]:
    """Decorate a frozen dataclass with slots, and at least two fields, that crosses a handle.

    A field that is new needs a default: one that a release before did not send.
    """
    known = fields(cls)  # type: ignore[arg-type]
    names = tuple(field.name for field in known)
    values = attrgetter(*names)
    setters = tuple((name, getattr(cls, name).__set__) for name in names)
    defaults = {field.name: field for field in known}

    def get_state(self: T) -> dict[str, Any]:
        return dict(zip(names, values(self), strict=True))

    def set_state(self: T, state: dict[str, Any]) -> None:
        for name, put in setters:
            put(self, state[name] if name in state else _default(cls, defaults[name]))

    cls.__getstate__ = get_state  # type: ignore[method-assign, assignment]
    cls.__setstate__ = set_state  # type: ignore[attr-defined]
    return cls


def _default(cls: type, field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    raise TypeError(f"a {cls.__name__} came without {field.name}, which has no default")
