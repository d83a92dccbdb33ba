"""What every part of the configuration has in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """Frozen; unknown keys, infinities, NaN and booleans in place of numbers are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        hide_input_in_errors=True,  # an API key in place of its hash must not get into logs
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        if (
            isinstance(value, bool)
            and cls.model_fields[str(info.field_name)].annotation is not bool
        ):
            raise ValueError("true, false, yes, no, on and off are no values here (quote a word)")
        return value
