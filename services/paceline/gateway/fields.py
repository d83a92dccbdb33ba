"""Request fields whose types are no plain number or string: what each accepts, in words.

Pure functions that pydantic calls before its own check; each returns a plain value or raises
PydanticCustomError with a sentence. Knows no tokenizer and no limits of a deployment.
"""

from __future__ import annotations

import re

from pydantic_core import PydanticCustomError, from_json

from paceline.gateway.tools import is_too_deep
from paceline.sampling.params import MAX_LOGIT_BIAS

_MAX_TOKEN_ID = 2**31 - 1
# Of a part of a message: as the body's own `prompt_cache_options`, a matter of speed and price.
_CACHE_HINT = "prompt_cache_breakpoint"
# As JSON objects spell ids; "07" would be a second name of 7.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def stop_list(value: object) -> object:
    """One string is a list of one; null is none."""
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(stop, str) for stop in value):
        raise PydanticCustomError("stop", "It must be a string or a list of strings.")
    if "" in value:
        raise PydanticCustomError("stop", "A stop string must not be empty.")
    return value


def prompts(value: object) -> object:
    """A string or token ids are a list of one prompt; all are strings, or all are token ids."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and (
        all(isinstance(prompt, str) for prompt in value) or all(_is_ids(ids) for ids in value)
    ):
        return value
    raise PydanticCustomError(
        "prompt",
        "It must be a string, a list of token ids, a list of strings or a list of such lists.",
    )


def _is_ids(value: object) -> bool:
    """The empty list, too."""
    return isinstance(value, list) and all(type(token_id) is int for token_id in value)


def content(value: object) -> object:
    """A string, or text parts, which are joined by line breaks as vLLM does; null is none."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "It must be a string or a list of text parts.")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise PydanticCustomError("content", "Only parts of type 'text' are supported.")
        is_text = set(part) - {_CACHE_HINT} == {"type", "text"} and isinstance(part["text"], str)
        if not is_text or not isinstance(part.get(_CACHE_HINT), dict | None):
            raise PydanticCustomError("content", "A text part has a 'type' and a string 'text'.")
        texts.append(part["text"])
    return "\n".join(texts)


def logit_bias(value: object) -> object:
    """An object of token ids (as JSON spells keys, strings) and numbers; null is none."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "It must be an object of token ids and numbers.")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        is_id = isinstance(key, str) and _TOKEN_ID.fullmatch(key) and int(key) <= _MAX_TOKEN_ID
        if not is_id:
            raise PydanticCustomError("logit_bias", 'Its keys must be token ids, as in "50256".')
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise PydanticCustomError("logit_bias", "Its values must be numbers in [-100, 100].")
        biases[int(key)] = float(bias)
    return biases


def token_id_list(value: object) -> object:
    """Token ids; null is none."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(
        type(token_id) is int and 0 <= token_id <= _MAX_TOKEN_ID for token_id in value
    ):
        raise PydanticCustomError("token_ids", "It must be a list of token ids.")
    return value


def false_is_none(value: object) -> object:
    """Clients that know chat's `logprobs` send false where completions have a number."""
    return None if value is False else value


def null_is_empty(value: object) -> object:
    return [] if value is None else value


def json_or_none(text: str) -> object:
    """What the text holds; None, too, where it is no JSON, nested too deep, or holds half a
    surrogate pair, which no tokenizer can read."""
    try:
        value: object = from_json(text, allow_inf_nan=False, cache_strings="none")
    except ValueError:
        return None
    return None if is_too_deep(value) else value


def tool_choice(value: object) -> object:
    """(mode, names): one of ToolMode's or "none"; names restrict the functions, () does not."""
    if value is None or value in ("none", "auto", "required"):
        return value and (value, ())
    if isinstance(value, dict):
        if value.get("type") == "function" and set(value) == {"type", "function"}:
            name = _function_name(value)
            if name is not None:
                return "named", (name,)
        if value.get("type") == "allowed_tools" and set(value) == {"type", "allowed_tools"}:
            return _allowed_tools(value["allowed_tools"])
    raise PydanticCustomError(
        "tool_choice",
        "It must be 'none', 'auto', 'required', or an object that names a function of 'tools'.",
    )


def _allowed_tools(value: object) -> object:
    if isinstance(value, dict) and set(value) == {"mode", "tools"}:
        tools = value["tools"] if isinstance(value["tools"], list) else []
        names = tuple(_allowed_name(tool) for tool in tools)
        if value["mode"] in ("auto", "required") and names and None not in names:
            return value["mode"], names
    raise PydanticCustomError(
        "tool_choice", "'allowed_tools' has a 'mode', 'auto' or 'required', and a list of 'tools'."
    )


def _allowed_name(tool: object) -> str | None:
    if isinstance(tool, dict) and set(tool) == {"type", "function"}:
        return _function_name(tool) if tool["type"] == "function" else None
    return None


def _function_name(value: object) -> str | None:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    is_alone = isinstance(function, dict) and set(function) == {"name"}
    return name if is_alone and isinstance(name, str) else None
