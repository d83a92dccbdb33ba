"""A file of prompts: JSON lines (`messages` or `prompt`) or plain text, one prompt a line.

Knows no HTTP; `Prompt.fields` says which endpoint a prompt is for and what its body has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

MAX_PROMPTS = 100_000
MAX_FILE_BYTES = 256 << 20
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to ask. `content` is a list of messages, a text, or token ids. `is_text`: a plain
    line, which is no record of either endpoint."""

    id: str
    category: str
    content: Any
    is_text: bool = False

    def fields(self, endpoint: str = AUTO) -> tuple[str, dict[str, Any]]:
        """The URL's path and the prompt's field of the body. "auto": messages and plain lines go
        to chat, a `prompt` to completions. ConfigError for token ids in a chat."""
        is_chat_record = self.is_text or _is_messages(self.content)
        if endpoint == "completions" or (endpoint == AUTO and not is_chat_record):
            text = _joined(self.content) if _is_messages(self.content) else self.content
            return PATHS["completions"], {"prompt": text}
        if _is_messages(self.content):
            return PATHS["chat"], {"messages": self.content}
        if not isinstance(self.content, str):
            raise ConfigError(f"prompt {self.id} is a list of token ids, which is no chat")
        return PATHS["chat"], {"messages": [{"role": "user", "content": self.content}]}


def load_prompts(path: Path) -> list[Prompt]:
    """All prompts, in order; blank lines are none. A line that begins with `{` is a record.

    Raises ConfigError with the line for what is no prompt, and for a file that is not there, is
    no UTF-8, has no prompt, or is larger than MAX_FILE_BYTES or MAX_PROMPTS.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text") from error
    prompts = [
        _parse(line.strip(), f"{path}:{number}", number)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"{path} has no prompt")
    if len(prompts) > MAX_PROMPTS:
        raise ConfigError(f"{path} has more than {MAX_PROMPTS} prompts")
    return prompts


def _parse(line: str, where: str, number: int) -> Prompt:
    if not line.startswith("{"):
        return Prompt(f"line-{number}", "", line, is_text=True)
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: this is no JSON ({error})") from None
    content = record.get("messages", record.get("prompt"))
    if not (_is_messages(content) or _is_ids(content) or (isinstance(content, str) and content)):
        raise ConfigError(
            f"{where}: a record needs 'messages' (role and content) or a 'prompt' (a string or"
            " token ids)"
        )
    return Prompt(str(record.get("id", f"line-{number}")), str(record.get("category", "")), content)


def _is_messages(content: object) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(item, dict) and {"role", "content"} <= set(item) for item in content)
    )


def _is_ids(content: object) -> bool:
    return isinstance(content, list) and bool(content) and all(type(i) is int for i in content)


def _joined(messages: list[dict[str, Any]]) -> str:
    return "\n\n".join(str(message["content"]) for message in messages)
