"""A conversation of `paceline chat`: its turns, its settings and its commands. Pure: knows neither
terminal nor network.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.cli.demo_stream import Answer
from paceline.cli.values import Json
from paceline.methods import METHODS, SpeculationMethod

COMMAND_PREFIX = "/"
# A service reads so many bytes at most anyway; a conversation that long has lost its beginning.
MAX_TURNS = 254
MAX_SPECULATION = 64
HELP = (
    "/system TEXT sets the system prompt (no TEXT: none), /speculation off|on|K|METHOD how many "
    "tokens are proposed, and from where, /clear forgets the conversation. Ctrl-C stops an answer, "
    "Ctrl-D ends."
)


@dataclass(slots=True)
class Settings:
    """What the options say. None is left to the service."""

    model: str = ""
    system: str = ""
    temperature: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    method: SpeculationMethod | None = None
    # Most proposals of a block; None: as far as the service thinks that it pays.
    max_draft_tokens: int | None = None
    shows_rounds: bool = False


@dataclass(slots=True)
class ChatSession:
    """Invariant: len(turns) <= MAX_TURNS; the oldest are forgotten first, a question and its
    answer together."""

    settings: Settings
    turns: list[dict[str, str]] = field(default_factory=list)

    def body(self, question: str) -> Json:
        """The request for the next answer."""
        options = self.settings
        system = [{"role": "system", "content": options.system}] if options.system else []
        asked = {"role": "user", "content": question}
        chosen: Json = {
            "temperature": options.temperature,
            "seed": options.seed,
            "max_tokens": options.max_tokens,
        }
        return {
            "model": options.model,
            "messages": [*system, *self.turns, asked],
            **{name: value for name, value in chosen.items() if value is not None},
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": self._speculation(),
        }

    def add(self, question: str, answer: Answer) -> None:
        """An answer without a word is not kept: templates refuse empty turns."""
        if not answer.content:
            return
        self.turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer.content},
        ]
        del self.turns[:-MAX_TURNS]

    def command(self, line: str) -> str | None:
        """What a command has changed, in a sentence; None for a line that is none."""
        if not line.startswith(COMMAND_PREFIX):
            return None
        name, _, rest = line.removeprefix(COMMAND_PREFIX).partition(" ")
        rest = rest.strip()
        if name == "clear":
            self.turns.clear()
            return "The conversation is forgotten."
        if name == "system":
            self.settings.system = rest
            return "The system prompt is set." if rest else "There is no system prompt now."
        if name == "speculation":
            return self._set_speculation(rest)
        return HELP if name == "help" else f"There is no /{name}. {HELP}"

    def _speculation(self) -> Json:
        options = self.settings
        chosen: Json = {"method": options.method, "include_rounds": True}
        if options.method != "off":
            chosen["max_tokens"] = options.max_draft_tokens
        return {name: value for name, value in chosen.items() if value is not None}

    def _set_speculation(self, value: str) -> str:
        options = self.settings
        if value == "off":
            options.method = "off"
            return "Nothing is proposed."
        if value == "on":
            options.method, options.max_draft_tokens = None, None
            return "The service chooses: as many proposals as it thinks that it pays."
        if value in METHODS:
            options.method = next(method for method in METHODS if method == value)
            return f"The method is {value}."
        is_count = value.isascii() and value.isdigit() and 1 <= len(value) <= 2
        if not is_count or not 1 <= int(value) <= MAX_SPECULATION:
            return (
                f"/speculation off, on, the most tokens of a block (1 to {MAX_SPECULATION}), or a "
                f"method: {', '.join(METHODS[:-1])}."
            )
        options.method = None if options.method == "off" else options.method
        options.max_draft_tokens = int(value)
        return f"At most {int(value)} tokens are proposed at a time."


def answer_json(model: str, question: str, answer: Answer) -> dict[str, Any]:
    """One answer as `--json` prints it."""
    return {
        "model": model,
        "prompt": question,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_tokens,
        "seconds": round(answer.seconds, 4),
        "first_text_s": None if answer.first_text_s is None else round(answer.first_text_s, 4),
        "tokens_per_s": round(answer.tokens_per_s, 2),
        "rounds": len(answer.rounds),
        "proposed": answer.num_proposed,
        "accepted": answer.num_accepted,
        "sources": answer.sources,
        "acceptance_rate": answer.acceptance_rate,
        "mean_acceptance_length": answer.mean_acceptance_length,
    }
