"""Text to token ids and back, with a model's own tokenizer and chat template.

Local files only, no code from a model folder, no template from a request. Knows no HTTP and no
event loop: every method is synchronous, thread-safe and may be slow; callers use a thread.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from jinja2.exceptions import TemplateError

from paceline.errors import ConfigError, RequestError
from paceline.gateway import templates
from paceline.gateway.chat import ChatMessage
from paceline.gateway.output_parser import THINK_BEGIN, THINK_END
from paceline.gateway.tools import FunctionSpec, ToolFormat
from paceline.grammars import TokenGrammars, load_grammars
from paceline.models import BUILTIN_SOURCES, TOY_EOS_TOKEN_ID, TOY_VOCAB_SIZE
from paceline.token_bytes import TokenSpelling

_FENCE = re.compile("\ue000([0-9]+)\ue001")


class Tokenizer(Protocol):
    """What the gateway needs; also a `text.TokenDecoder`."""

    @property
    def vocab_size(self) -> int:
        """Ids a prompt may use are below it."""

    @property
    def max_token_bytes(self) -> int:
        """No token stands for more UTF-8 bytes: a longer text has more tokens than
        bytes / max_token_bytes."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt: control tokens written in it are control tokens, as in vLLM. Those that
        the model's texts begin or end with can be left out."""

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls; None: its template has no tools."""

    @property
    def marker_tokens(self) -> frozenset[str]:
        """Those of `templates.MARKERS` that are single tokens: grammars must name them so."""

    @property
    def has_reasoning(self) -> bool:
        """Whether the model thinks before it answers, between `<think>` and `</think>`."""

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        functions: Sequence[FunctionSpec] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The model's chat template, ready for the assistant's turn. Control tokens spelt out
        in what a client sent stay plain text. Raises RequestError when the template refuses.

        Added tokens that the folder does not call special (Qwen's `<tool_call>`) become tokens
        wherever they are spelt, as in Hugging Face's library and in vLLM: they are part of what
        the model was trained to read, and end no turn.
        """

    def ends_in_reasoning(self, token_ids: Sequence[int]) -> bool:
        """Whether a prompt ends in an open `<think>`."""

    def check_grammar(self, grammar: str) -> None:
        """ValueError, with a sentence, for a grammar that nothing can be written in. Slow."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def is_special(self, token_id: int) -> bool: ...

    def has_token(self, token_id: int) -> bool:
        """Whether the id stands for anything: a vocabulary may have gaps."""

    def token_bytes(self, token_id: int) -> bytes:
        """What the token writes on its own, maybe half a character; a control token as it is
        spelt. Empty for ids without an entry."""


def load_tokenizer(
    model_source: str,
    chat_template: str | None = None,
    tool_format: ToolFormat | None = None,
    has_reasoning: bool | None = None,
) -> Tokenizer:
    """The tokenizer of a model folder, or the toy's. Raises ConfigError, which says the fix.

    `chat_template`: a file with a template in place of the model's own. `tool_format` and
    `has_reasoning`: in place of what the template looks like.
    """
    if model_source in BUILTIN_SOURCES:
        return ToyTokenizer()
    folder = Path(model_source)
    if not folder.is_dir():
        raise ConfigError(
            f"model folder {model_source!r} does not exist; give a local folder, toy or timed"
        )
    template = templates.read(chat_template)
    return HuggingFaceTokenizer(folder, template, tool_format, has_reasoning)


class ToyTokenizer:
    """Bytes are ids 0 to 255; id 256 ends a text. The vocabulary of the toy and timed engines."""

    @property
    def vocab_size(self) -> int:
        return TOY_VOCAB_SIZE

    @property
    def max_token_bytes(self) -> int:
        return 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    @property
    def tool_format(self) -> ToolFormat | None:
        return ToolFormat.HERMES

    @property
    def marker_tokens(self) -> frozenset[str]:
        return frozenset()

    @property
    def has_reasoning(self) -> bool:
        return False

    @cached_property
    def _grammars(self) -> TokenGrammars:
        return load_grammars("toy")

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        functions: Sequence[FunctionSpec] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        offered = f"tools: {json.dumps(templates.tools(functions))}\n" if functions else ""
        turns = "".join(templates.plain_turn(message) for message in messages)
        return self.encode(offered + turns + "assistant: " * add_generation_prompt)

    def ends_in_reasoning(self, token_ids: Sequence[int]) -> bool:
        return False

    def check_grammar(self, grammar: str) -> None:
        self._grammars.check(grammar)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = bytes(token_id for token_id in token_ids if not self.is_special(token_id))
        return kept.decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id == TOY_EOS_TOKEN_ID or token_id >= TOY_VOCAB_SIZE

    def has_token(self, token_id: int) -> bool:
        return 0 <= token_id < TOY_VOCAB_SIZE

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if self.is_special(token_id) else bytes([token_id])


class HuggingFaceTokenizer:
    """A model folder's tokenizer.json and chat template.

    Encoding goes to two private copies of the fast tokenizer, one that parses control tokens and
    one that does not. Switching the flag on a shared one, as transformers does per call, is a
    race between threads ("Already borrowed").
    """

    def __init__(
        self,
        folder: Path,
        chat_template: str | None = None,
        tool_format: ToolFormat | None = None,
        has_reasoning: bool | None = None,
    ) -> None:
        # Imported here: transformers takes seconds, and the toy needs none of it.
        from tokenizers import Tokenizer as FastTokenizer
        from transformers import AutoTokenizer

        try:
            self._template_holder: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"no usable tokenizer in {folder}: {error}") from error
        backend = getattr(self._template_holder, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"{folder} has no tokenizer.json; a fast tokenizer is required")
        serialized: str = backend.to_str()
        self._parsing: Any = FastTokenizer.from_str(serialized)
        self._literal: Any = FastTokenizer.from_str(serialized)
        for copy, is_literal in ((self._parsing, False), (self._literal, True)):
            copy.no_padding()
            copy.no_truncation()
            copy.encode_special_tokens = is_literal
        self._read_vocabulary()
        self._folder = folder
        if chat_template is not None:
            self._template_holder.chat_template = chat_template
        text = templates.joined(self._template_holder.chat_template)
        self._tool_format = tool_format or templates.tool_format(text)
        self._has_reasoning = THINK_END in text if has_reasoning is None else has_reasoning

    def _read_vocabulary(self) -> None:
        vocabulary: dict[str, int] = self._parsing.get_vocab(with_added_tokens=True)
        self._known_ids = frozenset(vocabulary.values())
        self._vocab_size = max(self._known_ids) + 1
        self._max_token_bytes = max(len(token.encode()) for token in vocabulary)
        # What pickling stores is the decoder's section of tokenizer.json.
        decoder = self._parsing.decoder
        self._spelling = TokenSpelling(json.loads(decoder.__getstate__()) if decoder else None)
        added = self._parsing.get_added_tokens_decoder()
        specials = {token_id: token.content for token_id, token in added.items() if token.special}
        # What parsers look for must be seen, whatever the folder calls it.
        self._special_ids = frozenset(
            token_id for token_id, text in specials.items() if text not in templates.MARKERS
        )
        self._marker_tokens = templates.MARKERS & {token.content for token in added.values()}
        self._bytes: dict[int, bytes] = {}  # at most one entry for each known id
        self._special_texts = tuple(sorted(specials.values(), key=len, reverse=True))

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_token_bytes(self) -> int:
        return self._max_token_bytes

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._parsing.encode(text, add_special_tokens=add_special_tokens).ids)

    @property
    def tool_format(self) -> ToolFormat | None:
        return self._tool_format

    @property
    def marker_tokens(self) -> frozenset[str]:
        return self._marker_tokens

    @property
    def has_reasoning(self) -> bool:
        return self._has_reasoning

    @cached_property
    def _grammars(self) -> TokenGrammars:
        return load_grammars(str(self._folder))

    def check_grammar(self, grammar: str) -> None:
        self._grammars.check(grammar)

    def ends_in_reasoning(self, token_ids: Sequence[int]) -> bool:
        if not self._has_reasoning:
            return False
        tail: str = self._parsing.decode(list(token_ids[-16:]), skip_special_tokens=False)
        return tail.rstrip().endswith(THINK_BEGIN)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        functions: Sequence[FunctionSpec] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        given = {
            "messages": [templates.message(message) for message in messages],
            "tools": templates.tools(functions),
            "kwargs": dict(template_kwargs or {}),
        }
        fence = _unused_fence(list(templates.strings(given)))
        spelt: list[str] = []
        fenced = templates.mapped(given, lambda text: self._fence_specials(text, fence, spelt))
        rendered = self._render(**fenced, add_generation_prompt=add_generation_prompt)
        if not spelt:
            return list(self._parsing.encode(rendered, add_special_tokens=False).ids)
        return list(self._encode_fenced(rendered, fence, spelt))

    def _render(
        self, messages: Any, tools: Any, kwargs: Mapping[str, Any], add_generation_prompt: bool
    ) -> str:
        if not self._template_holder.chat_template:
            raise RequestError(
                "This model has no chat template; use /v1/completions.", "messages", "no_template"
            )
        try:
            rendered: str = self._template_holder.apply_chat_template(
                messages,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **templates.safe_kwargs(kwargs),
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RequestError(
                f"The chat template refuses these messages: {reason}", "messages"
            ) from error
        return rendered

    def _fence_specials(self, content: str, fence: str, spelt: list[str]) -> str:
        """Replace every control token spelt out in `content` by a fenced number, so that the
        template (which may trim, or look for markers) sees everything else as it is."""
        for text in self._special_texts:
            pieces = content.split(text)
            for index in range(1, len(pieces)):
                pieces[index] = f"{fence}{len(spelt)}{fence}{pieces[index]}"
                spelt.append(text)
            content = "".join(pieces)
        return content

    def _encode_fenced(self, rendered: str, fence: str, spelt: Sequence[str]) -> Iterator[int]:
        """Odd pieces between fences are numbers of control tokens that stay plain text."""
        for index, piece in enumerate(rendered.split(fence)):
            if index % 2 == 0:
                yield from self._parsing.encode(piece, add_special_tokens=False).ids
            else:
                yield from self._literal.encode(spelt[int(piece)], add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        hidden = self._special_ids if skip_special_tokens else ()
        kept = [token_id for token_id in token_ids if token_id not in hidden]
        text: str = self._parsing.decode(kept, skip_special_tokens=False)
        return text

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids or token_id not in self._known_ids

    def has_token(self, token_id: int) -> bool:
        return token_id in self._known_ids

    def token_bytes(self, token_id: int) -> bytes:
        # Asked for some twenty times per token; the same few ids over and over.
        found = self._bytes.get(token_id)
        if found is None:
            if not self.has_token(token_id):
                return b""
            found = self._spelling.encode(self._parsing.id_to_token(token_id))
            self._bytes[token_id] = found
        return found


def _unused_fence(contents: Sequence[str]) -> str:
    """A private-use string that is in no message, so that nobody can forge it.

    One pass over the messages, however many such strings they hold.
    """
    taken = {number for content in contents for number in _FENCE.findall(content)}
    number = next(number for number in itertools.count() if str(number) not in taken)
    return f"\ue000{number}\ue001"
