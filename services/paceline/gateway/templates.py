"""What chat templates are given, and what can be told of a model from its template. Pure, but for
reading one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, RequestError
from paceline.gateway.chat import ChatMessage
from paceline.gateway.output_parser import THINK_BEGIN, THINK_END
from paceline.gateway.tools import FunctionSpec, ToolFormat

# Text that output parsers look for, also where a folder calls it a control token.
MARKERS = frozenset({THINK_BEGIN, THINK_END, "<tool_call>", "</tool_call>"})
MAX_TEMPLATE_BYTES = 1 << 20
SHIPPED = Path(__file__).parents[1] / "assets" / "templates"
# What the gateway itself decides, or what would read something else than the request.
_RESERVED_KWARGS = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "processor_kwargs", "self"),
    )
)


def read(path: str | None) -> str | None:
    """A template file, or the name of one that ships with Paceline. Raises ConfigError."""
    if path is None:
        return None
    shipped = SHIPPED / f"{path}.jinja"
    is_name = path == Path(path).name and shipped.is_file()
    try:
        with (shipped if is_name else Path(path)).open("rb") as file:
            raw = file.read(MAX_TEMPLATE_BYTES + 1)
        text = raw.decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"gateway.chat_template {path!r} cannot be read: {error}") from error
    if len(raw) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"gateway.chat_template {path!r} is larger than {MAX_TEMPLATE_BYTES} B")
    return text


def joined(chat_template: Any) -> str:
    """The text of all templates of a model: it may have several, by name."""
    if isinstance(chat_template, dict):
        return "\n".join(map(str, chat_template.values()))
    return str(chat_template or "")


def tool_format(template: str) -> ToolFormat | None:
    """How a model writes calls, as far as its template shows it."""
    if "tools" not in template:
        return None
    if "<function=" in template or "<arg_key>" in template:
        # Calls as XML, in the same `<tool_call>`: Qwen's coders, GLM.
        return None
    if "<tool_call>" in template:
        return ToolFormat.HERMES
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return ToolFormat.LLAMA3_JSON
    return None


def message(turn: ChatMessage) -> dict[str, Any]:
    """One turn as Hugging Face's templates expect it: arguments are objects, not strings."""
    # Few templates know developers, and OpenAI's models read the two alike.
    role = "system" if turn.role == "developer" else turn.role
    shown: dict[str, Any] = {"role": role, "content": turn.content or ""}
    optional = {"name": turn.name, "tool_call_id": turn.tool_call_id}
    optional["reasoning_content"] = turn.reasoning_content
    shown |= {name: value for name, value in optional.items() if value is not None}
    if turn.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in turn.tool_calls
        ]
    return shown


def tools(functions: Sequence[FunctionSpec]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description,
                "parameters": function.parameters or {"type": "object", "properties": {}},
            },
        }
        for function in functions
    ]


def plain_turn(turn: ChatMessage) -> str:
    """A turn of the toy, which has no template."""
    calls = "".join(f" {call.name}({call.arguments})" for call in turn.tool_calls)
    return f"{turn.role}: {turn.content or ''}{calls}\n"


def safe_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The client's own arguments of the template. Raises RequestError for names that are ours."""
    for name in kwargs:
        if name in _RESERVED_KWARGS or not name.isidentifier():
            raise RequestError(
                f"'chat_template_kwargs' may not have '{name[:64]}'.",
                "chat_template_kwargs",
                "invalid_value",
            )
    return dict(kwargs)


def strings(value: Any) -> Iterator[str]:
    """Every string in a tree of lists and objects, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The same tree with every string changed. Values only where a template asks for names."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): mapped(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    return value
