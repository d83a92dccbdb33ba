"""The request parameters that we do not act on, in one table.

OpenAI clients send many fields at the value that changes nothing. Those values are accepted;
every other value would be ignored silently, so it is refused. Pure; knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic_core import PydanticCustomError


@dataclass(frozen=True, slots=True)
class NeutralParameter:
    """`is_neutral` says whether a value changes nothing; `accepted` says it in words."""

    is_neutral: Callable[[object], bool]
    accepted: str


def _one_of(*values: object) -> NeutralParameter:
    """Exactly these values; True is not 1 here, but 1.0 is."""

    def is_neutral(value: object) -> bool:
        return any(
            value == known and isinstance(value, bool) == isinstance(known, bool)
            for known in values
        )

    return NeutralParameter(is_neutral, " or ".join(_spell(value) for value in values))


def _spell(value: object) -> str:
    spelled = {"True": "true", "False": "false", "None": "null"}
    return spelled.get(repr(value), repr(value).replace("'", '"'))


def _text(max_chars: int) -> NeutralParameter:
    return NeutralParameter(
        lambda value: isinstance(value, str) and len(value) <= max_chars,
        f"a string of at most {max_chars} characters",
    )


_EMPTY_LIST = NeutralParameter(lambda value: value == [], "an empty list")


def _is_metadata(value: object) -> bool:
    """OpenAI's own bounds: 16 pairs of strings."""
    return (
        isinstance(value, dict)
        and len(value) <= 16
        and all(isinstance(item, str) and len(item) <= 512 for item in value.values())
    )


# Labels for the caller's own bookkeeping: whatever they say, the answer is the same.
_LABELS: Mapping[str, NeutralParameter] = {
    "user": _text(512),
    "safety_identifier": _text(512),
    "prompt_cache_key": _text(512),
    "metadata": NeutralParameter(_is_metadata, "an object of at most 16 strings"),
}

_SHARED: Mapping[str, NeutralParameter] = {
    **_LABELS,
    "skip_special_tokens": _one_of(True),
    "service_tier": _one_of("auto", "default"),
}

COMPLETION_NEUTRAL: Mapping[str, NeutralParameter] = {
    **_SHARED,
    "suffix": _one_of(""),
}

CHAT_NEUTRAL: Mapping[str, NeutralParameter] = {
    **_SHARED,
    "store": _one_of(False),
    # Hints of what will be asked or answered: a matter of speed and price alone.
    "prediction": NeutralParameter(lambda value: isinstance(value, dict), "an object"),
    "prompt_cache_options": NeutralParameter(lambda value: isinstance(value, dict), "an object"),
    "prompt_cache_retention": _text(64),
    "verbosity": _one_of("medium"),
    "audio": _one_of(None),
    "web_search_options": _one_of(None),
    "moderation": _one_of(None),
    "reasoning_effort": _one_of(None),
    "modalities": _one_of(["text"]),
    "functions": _EMPTY_LIST,
    "function_call": _one_of("none"),
}

# What a client finds in our answers and sends back as history.
MESSAGE_NEUTRAL: Mapping[str, NeutralParameter] = {
    "refusal": _one_of(""),
    "annotations": _EMPTY_LIST,
    "function_call": _one_of(None),
    "audio": _one_of(None),
}


def drop_neutral(body: object, table: Mapping[str, NeutralParameter]) -> object:
    """The body without the table's fields; null always means "not given".

    Raises PydanticCustomError, which names the field and what it accepts.
    """
    if not isinstance(body, dict):
        return body
    kept = {}
    for name, value in body.items():
        parameter = table.get(name)
        if parameter is None:
            kept[name] = value
        elif value is not None and not parameter.is_neutral(value):
            raise PydanticCustomError(
                "unsupported_value",
                "'{name}' is not supported yet; accepted: {accepted} (or leave it out).",
                {"name": name, "accepted": parameter.accepted},
            )
    return kept
