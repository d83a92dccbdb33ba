"""Which grammar an answer has to follow, by its form, its tools and its reasoning. Pure."""

from __future__ import annotations

from paceline.errors import RequestError
from paceline.gateway.chat import ToolOffer
from paceline.gateway.output_parser import THINK_BEGIN, THINK_END, OutputFormat
from paceline.gateway.structured import (
    NO_MARKERS,
    Markers,
    StructuredFields,
    auto_tool_grammar,
    calls_or,
    grammar_of,
    reasoning_prefix,
    tool_grammar,
)
from paceline.gateway.tools import ToolFormat, ToolMode


def form_grammar(
    wanted: StructuredFields,
    offer: ToolOffer | None,
    fmt: ToolFormat | None,
    tokens: Markers = NO_MARKERS,
) -> str:
    """Empty when the model is free.

    A call that must come is written by the grammar alone. Where the model decides, only functions
    that are `strict`, a form for the answer, or a limit of one call make a grammar. Raises
    RequestError (400).
    """
    grammar = grammar_of(wanted)
    return grammar if offer is None or fmt is None else _with_tools(grammar, offer, fmt, tokens)


def after_reasoning(grammar: str, output: OutputFormat, tokens: Markers = NO_MARKERS) -> str:
    """What reasons, reasons freely first."""
    if grammar and output.begins_in_reasoning:
        return reasoning_prefix(grammar, THINK_END, tokens=tokens)
    if grammar and output.has_reasoning:
        return reasoning_prefix(grammar, THINK_END, THINK_BEGIN, tokens)
    return grammar


def _with_tools(grammar: str, offer: ToolOffer, fmt: ToolFormat, tokens: Markers) -> str:
    functions, is_parallel = offer.functions, offer.is_parallel
    if offer.mode is ToolMode.AUTO:
        if grammar:
            return calls_or(grammar, functions, fmt, parallel=is_parallel, tokens=tokens)
        if is_parallel and not any(function.strict for function in functions):
            return ""
        return auto_tool_grammar(functions, fmt, parallel=is_parallel, tokens=tokens)
    if grammar:
        raise RequestError(
            "'tool_choice' wants a call, and the form of an answer is given, too: leave one out.",
            "tool_choice",
            "invalid_value",
        )
    is_parallel = is_parallel and offer.mode is ToolMode.REQUIRED
    return tool_grammar(functions, fmt, parallel=is_parallel, tokens=tokens)
