"""Structured output: from a request's fields to one grammar, a string as llguidance has it.

Pure; knows no tokenizer, so whether a grammar can be followed is for `grammars` to say. JSON is
written in one line, ", " and ": " between its parts: a model that may choose its own whitespace
can go on with it for ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from paceline.errors import RequestError
from paceline.gateway.tools import MAX_SCHEMA_DEPTH, FunctionSpec, ToolFormat, is_too_deep
from paceline.sampling.params import MAX_GRAMMAR_CHARS

MAX_GUIDED_CHOICES = 256
SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
# Texts that a tokenizer has a token of its own for.
Markers = frozenset[str]
NO_MARKERS: Markers = frozenset()
# A rule of a GBNF grammar; Lark writes a colon.
# No \s: it would run over line breaks, again from each line of many empty ones.
_GBNF = re.compile(r"^[ \t]*+[A-Za-z0-9_-]++[ \t]*+::=", re.MULTILINE)
_WAYS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True)
class StructuredFields:
    """The fields of a request as JSON has them; None: not given.

    `response_format` is OpenAI's; the `guided_*` ones and `structured_outputs` are vLLM's.
    """

    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None

    @property
    def first(self) -> str | None:
        """The name of the first field that is given."""
        names = (field.name for field in fields(self))
        return next((name for name in names if getattr(self, name) is not None), None)


def grammar_of(wanted: StructuredFields) -> str:
    """The grammar that the fields ask for, empty for none.

    Raises RequestError (400) for a field that is not well-formed, and for more than one way.
    """
    given = {
        f.name: value for f in fields(wanted) if (value := getattr(wanted, f.name)) is not None
    }
    grammars = {name: grammar for name in given if (grammar := _READERS[name](given[name], name))}
    if len(grammars) > 1:
        first, second = list(grammars)[:2]
        raise _invalid(f"'{first}' and '{second}' both ask for a form of the answer", second)
    found = next(iter(grammars.values()), "")
    if found:
        _check_length(found, next(iter(grammars)))
    return found


def reasoning_prefix(
    grammar: str, end_marker: str, begin_marker: str = "", tokens: Markers = NO_MARKERS
) -> str:
    """The grammar behind free text that ends in `end_marker`, such as `</think>`.

    With a `begin_marker` there may be none of it, or it begins with that one. `tokens`: texts
    that the tokenizer has a token of its own for, which a plain string of a grammar excludes.
    """
    begin = _marker(begin_marker, tokens)
    thinking = f"({begin} thinking)?" if begin_marker else "thinking"
    return _nested(
        f"start: {thinking} answer\n{_text_up_to('thinking', end_marker, tokens)}\n"
        "answer: GAP @inner\nGAP: /\\n{0,2}/",
        grammar,
    )


def tool_grammar(
    functions: Sequence[FunctionSpec],
    fmt: ToolFormat,
    *,
    parallel: bool,
    tokens: Markers = NO_MARKERS,
) -> str:
    """Nothing but calls of the functions: one, or with `parallel` one or more."""
    if fmt is ToolFormat.HERMES:
        begin = f'{_marker(CALL_BEGIN, tokens)} "\\n"'
        rules = _calls(functions, "arguments", begin, f'"\\n" {_marker(CALL_END, tokens)}')
        joined = ' ("\\n" call)*' if parallel else ""
    else:
        rules = _calls(functions, "parameters")
        joined = ' ("; " call)*' if parallel else ""
    return _lark(f"start: call{joined}\n{rules}")


def calls_or(
    grammar: str,
    functions: Sequence[FunctionSpec],
    fmt: ToolFormat,
    *,
    parallel: bool,
    tokens: Markers = NO_MARKERS,
) -> str:
    """Either calls, as `tool_grammar` has them, or an answer that fits the grammar."""
    calls = tool_grammar(functions, fmt, parallel=parallel, tokens=tokens)
    rules = calls.partition("\n")[2].replace("start:", "calls:", 1)
    return _nested(f"start: calls | @inner\n{rules}", grammar)


def auto_tool_grammar(
    functions: Sequence[FunctionSpec],
    fmt: ToolFormat,
    *,
    parallel: bool = True,
    tokens: Markers = NO_MARKERS,
) -> str:
    """Free text in which whatever begins as a call is a call of one of the functions, at most one
    unless `parallel`.

    Only functions that are `strict` are held to their schema; the others take any object. Llama 3
    calls have no marker that text could not hold: an answer that begins with `{"name":` is one.
    """
    loose = [f if f.strict else FunctionSpec(f.name) for f in functions]
    if fmt is ToolFormat.HERMES:
        rules = _calls(loose, "arguments", '"\\n"', f'"\\n" {_marker(CALL_END, tokens)}')
        times = "*" if parallel else "?"
        head = f"start: (opening call){times} TEXT\n{_text_up_to('opening', CALL_BEGIN, tokens)}"
        text = f"TEXT: {_text_without(CALL_BEGIN)}"
    else:
        rules = _calls(loose, "parameters")
        head = "start: TEXT | call" + (' ("; " call)*' if parallel else "")
        # Whatever the output parser reads as the beginning of a call is none of the text.
        text = "TEXT: /(?s:.*)/ & ~/\\s*(\\{|<\\|python_tag\\|>)(?s:.*)/"
    return _lark("\n".join([head, rules, text]))


def _calls(functions: Sequence[FunctionSpec], key: str, before: str = "", after: str = "") -> str:
    """Rules: `call` is one call of any of the functions, between `before` and `after` (in Lark).

    The arguments are a grammar of their own, so that `#` in a schema is the schema. Raises
    RequestError for arguments that are no object.
    """
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        schema = _ANY_OBJECT if function.parameters is None else function.parameters
        if schema.get("type", "object") != "object":
            raise _invalid(
                f"Of the 'tools', the 'parameters' of '{function.name}' must be of type 'object'",
                "tools",
            )
        opened = json.dumps(f'{{"name": "{function.name}", "{key}": ')
        styled = {**schema, "type": "object", "x-guidance": _JSON_STYLE}
        rules += [
            f'call_{i}: {before} {opened} args_{i} "}}" {after}',
            f"args_{i}: %json {json.dumps(styled)}",
        ]
    return "\n".join(rules)


def _marker(text: str, tokens: Markers) -> str:
    """As Lark has it: a string, or the token that stands for it."""
    return text if text in tokens else json.dumps(text)


def _text_up_to(rule: str, marker: str, tokens: Markers) -> str:
    """A rule for free text and the marker behind it."""
    if marker in tokens:
        terminal = f"{rule.upper()}_TEXT"
        return f"{rule}: {terminal} {marker}\n{terminal}: {_text_without(marker)}"
    return f"{rule}[suffix={json.dumps(marker)}]: /(?s:.*)/"


def _text_without(marker: str) -> str:
    """A terminal for text that does not spell the marker out, either."""
    return f"/(?s:.*)/ & ~/(?s:.*){marker.replace('/', chr(92) + '/')}(?s:.*)/"


def _lark(rules: str) -> str:
    grammar: str = LLMatcher.grammar_from_lark("%llguidance {}\n" + rules)
    return grammar


def _nested(outer: str, grammar: str) -> str:
    """`outer` is Lark that says `@inner` where the other grammar goes."""
    is_serialized = grammar.lstrip().startswith("{")
    inner = json.loads(grammar)["grammars"] if is_serialized else [{"lark_grammar": grammar}]
    # What is nested already has a name of its own inside: one per depth.
    name = f"inner{len(inner)}"
    named = {**inner[0], "name": name}
    lark = outer.replace("@inner", f"@{name}")
    return json.dumps({"grammars": [{"lark_grammar": lark}, named, *inner[1:]]})


# ------------------------------------------------------------------------------------- fields


def json_grammar(schema: Any, param: str) -> str:
    """Raises RequestError for what is no schema, or too deep."""
    if isinstance(schema, bool) or not isinstance(schema, dict):
        raise _invalid(f"'{param}' must hold a JSON schema, which is an object", param)
    if is_too_deep(schema):
        raise RequestError(
            f"The schema in '{param}' is nested more than {MAX_SCHEMA_DEPTH} deep.",
            param,
            "too_deep",
        )
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(schema, overrides=dict(_JSON_STYLE))
    except ValueError as error:  # numbers beyond 64 bits, half a surrogate pair
        raise _invalid(
            f"The schema in '{param}' has a value that is not supported", param
        ) from error
    return grammar


def _response_format(value: Any, param: str) -> str:
    if not isinstance(value, dict):
        raise _invalid(f"'{param}' must be an object", param)
    kind = value.get("type")
    if kind in ("text", "json_object"):
        _only(value, {"type"}, param)
        return "" if kind == "text" else json_grammar(_ANY_OBJECT, param)
    if kind != "json_schema":
        raise _invalid(f"'{param}.type' must be 'text', 'json_object' or 'json_schema'", param)
    _only(value, {"type", "json_schema"}, param)
    inner, where = value.get("json_schema"), f"{param}.json_schema"
    if not isinstance(inner, dict):
        raise _invalid(f"'{where}' must be an object", where)
    _only(inner, {"name", "schema", "strict", "description"}, where)
    name = inner.get("name")
    if not isinstance(name, str) or not SCHEMA_NAME.fullmatch(name):
        raise _invalid(
            f"'{where}.name' must be 1 to 64 letters, digits, '_' or '-'", f"{where}.name"
        )
    if not isinstance(inner.get("strict"), bool | None):
        raise _invalid(f"'{where}.strict' must be a boolean", f"{where}.strict")
    if not isinstance(inner.get("description"), str | None):
        raise _invalid(f"'{where}.description' must be a string", f"{where}.description")
    schema = inner.get("schema")
    return json_grammar(_ANY_OBJECT if schema is None else schema, f"{where}.schema")


def _json(value: Any, param: str) -> str:
    """vLLM takes a schema as text, too."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _invalid(f"'{param}' is not a JSON schema", param) from None
    return json_grammar(value, param)


def _regex(value: Any, param: str) -> str:
    grammar: str = LLMatcher.grammar_from_regex(_text(value, param))
    return grammar


def _choice(value: Any, param: str) -> str:
    is_list = isinstance(value, list) and all(isinstance(item, str) and item for item in value)
    if not is_list or not value:
        raise _invalid(f"'{param}' must be a list of strings that are not empty", param)
    if len(value) > MAX_GUIDED_CHOICES:
        raise RequestError(
            f"'{param}' may have at most {MAX_GUIDED_CHOICES} choices.", param, "too_many"
        )
    return _lark("start: " + " | ".join(json.dumps(item) for item in dict.fromkeys(value)))


def _grammar(value: Any, param: str) -> str:
    text = _text(value, param)
    if _GBNF.search(text):
        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # the library's converter raises whatever its parser does
            raise _invalid(f"'{param}' is no GBNF grammar", param) from error
    grammar: str = LLMatcher.grammar_from_lark(text)
    return grammar


def _structured_outputs(value: Any, param: str) -> str:
    if not isinstance(value, dict):
        raise _invalid(f"'{param}' must be an object", param)
    _only(value, set(_WAYS), param)
    given = {name: item for name, item in value.items() if item is not None and item is not False}
    if len(given) != 1:
        raise _invalid(f"'{param}' must have exactly one of {', '.join(_WAYS)}", param)
    name, item = next(iter(given.items()))
    where = f"{param}.{name}"
    if name != "json_object":
        return _BY_WAY[name](item, where)
    if item is not True:
        raise _invalid(f"'{where}' must be a boolean", where)
    return json_grammar(_ANY_OBJECT, where)


_Reader = Callable[[Any, str], str]
_BY_WAY: Mapping[str, _Reader] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_READERS: Mapping[str, _Reader] = {
    "response_format": _response_format,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "structured_outputs": _structured_outputs,
}


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise _invalid(f"'{param}' must be a string that is not empty", param)
    _check_length(value, param)
    return value


def _check_length(grammar: str, param: str) -> None:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"The grammar of '{param}' has more than {MAX_GRAMMAR_CHARS} characters.",
            param,
            "too_long",
        )


def _only(value: Mapping[str, Any], names: set[str], param: str) -> None:
    for name in value:
        if name not in names:
            shown = "".join(char if char.isprintable() else "?" for char in name[:64])
            where = f"{param}.{shown}"
            raise RequestError(f"Unknown parameter: '{where}'.", where, "unknown_parameter")


def _invalid(fact: str, param: str) -> RequestError:
    return RequestError(f"{fact}.", param, "invalid_value")
