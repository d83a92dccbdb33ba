"""Which grammar an answer has to follow, by its form, its tools and its reasoning. Pure."""

from __future__ import annotations

from paceline.errors import RequestError
from paceline.gateway.chat import ToolOffer
from paceline.gateway.output_parser import THINK_BEGIN, THINK_END, OutputFormat
from paceline.gateway.structured import (
    StructuredFields,
    auto_tool_grammar,
    calls_or,
    grammar_of,
    reasoning_prefix,
    tool_grammar,
)
from paceline.gateway.tools import ToolFormat, ToolMode


def form_grammar(wanted: StructuredFields, offer: ToolOffer | None, fmt: ToolFormat | None) -> str:
    """Empty when the model is free.

    A call that must come is written by the grammar alone. Where the model decides, only functions
    that are `strict`, a form for the answer, or a limit of one call make a grammar. Raises
    RequestError (400).
    """
    grammar = grammar_of(wanted)
    return grammar if offer is None or fmt is None else _with_tools(grammar, offer, fmt)


def after_reasoning(grammar: str, output: OutputFormat) -> str:
    """What reasons, reasons freely first."""
    if grammar and output.begins_in_reasoning:
        return reasoning_prefix(grammar, THINK_END)
    if grammar and output.has_reasoning:
        return reasoning_prefix(grammar, THINK_END, THINK_BEGIN)
    return grammar


def _with_tools(grammar: str, offer: ToolOffer, fmt: ToolFormat) -> str:
    functions = offer.functions
    if offer.mode is ToolMode.AUTO:
        if grammar:
            return calls_or(grammar, functions, fmt, parallel=offer.is_parallel)
        is_held = not offer.is_parallel or any(function.strict for function in functions)
        return auto_tool_grammar(functions, fmt, parallel=offer.is_parallel) if is_held else ""
    if grammar:
        raise RequestError(
            "'tool_choice' wants a call, and the form of an answer is given, too: leave one out.",
            "tool_choice",
            "invalid_value",
        )
    is_parallel = offer.is_parallel and offer.mode is ToolMode.REQUIRED
    return tool_grammar(functions, fmt, parallel=is_parallel)
