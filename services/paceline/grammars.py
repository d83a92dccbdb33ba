"""Which token ids a grammar allows next: llguidance behind two small classes.

A grammar is a string as llguidance serializes it. Matchers work on the tokenizer's own bytes, so
a token may end in the middle of whatever the grammar's text is made of. Knows no tensor, engine,
request or JSON schema; a source is a resolved folder here, since resolving is `models`' business.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# Engines without weights: 256 bytes and the id that ends a text (`models.TOY_*`).
_BYTE_SOURCES = ("toy", "timed")
_NUM_BYTES = 256
_BYTES_EOS = 256

# Compiled grammars that are kept for the next request; beyond it the one not used longest goes.
MAX_COMPILED_GRAMMARS = 32
# What a grammar may cost. A lexer state takes 1 to 2 kB, and they live as long as the grammar; a
# step is one mask. 64 KiB of a usual kind compile within 2 s and have masks of 40 ms; the worst we
# know (thousands of `multipleOf`, or of `a?`) take tens of seconds. So never on an event loop.
MAX_LEXER_STATES = 16_000
MAX_GRAMMAR_SYMBOLS = 200_000
COMPILE_FUEL = 1_000_000
STEP_FUEL = 200_000
STEP_MAX_ITEMS = 50_000
# Longest sentence of the library's that we pass on.
_MAX_REASON_CHARS = 300


def load_grammars(
    source: str, vocab_size: int | None = None, eos_token_ids: Sequence[int] = ()
) -> TokenGrammars:
    """For a folder with a tokenizer.json, or for the bytes of `toy` and `timed`.

    Ids from `vocab_size` on are never allowed (None: the tokenizer's own count). Any of
    `eos_token_ids` may end the text where it is complete; none: the tokenizer's own. ValueError
    when the folder's tokenizer cannot be used.
    """
    eos = list(eos_token_ids) or None
    if source in _BYTE_SOURCES:
        size = vocab_size or _BYTES_EOS + 1
        tokenizer = LLTokenizer(
            TokenizerWrapper(_Bytes(size)), n_vocab=size, eos_token=eos or [_BYTES_EOS]
        )
        return TokenGrammars(tokenizer, size)
    path = Path(source) / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
        tokenizer = LLTokenizer(text, eos_token=eos)
        if vocab_size is not None and vocab_size > tokenizer.vocab_size:
            tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be used for grammars: {_sentence(str(error))}") from error
    return TokenGrammars(tokenizer, vocab_size or tokenizer.vocab_size)


class _Bytes:
    """What llguidance asks of a tokenizer: here a token is a byte, and ids above them are names
    that stand for no text."""

    eos_token_id = _BYTES_EOS
    bos_token_id = None

    def __init__(self, vocab_size: int) -> None:
        self.tokens = [bytes([i]) for i in range(_NUM_BYTES)]
        self.special_token_ids = list(range(_NUM_BYTES, vocab_size))
        self.tokens += [f"<special {i}>".encode() for i in self.special_token_ids]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class TokenGrammars:
    """Grammars over one tokenizer. Any thread may use it: a matcher has one user at a time."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(i for i in tokenizer.eos_tokens if i < vocab_size)
        self._limits = LLParserLimits(
            initial_lexer_fuel=COMPILE_FUEL,
            step_lexer_fuel=STEP_FUEL,
            step_max_items=STEP_MAX_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            verbose_errors=False,
        )
        self._lock = threading.Lock()
        # Held for as long as one grammar takes, so that it keeps nobody from those that are there.
        self._compiling = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    def check(self, grammar: str, output_token_ids: Sequence[int] = ()) -> None:
        """ValueError, with a sentence, for what can never be generated with here, or not from
        this output on."""
        state = self.start(grammar)
        if not state.sync(output_token_ids):
            raise ValueError("the output so far breaks it")
        try:
            state.bitmask()
        except ValueError as error:  # it compiles, and nothing can ever be written
            no_text = "NoExtension" in str(error)
            raise ValueError("no text fits it") if no_text else error from error

    def start(self, grammar: str) -> GrammarState:
        """The state before any output; ValueError as `check`."""
        found = self._find(grammar)
        if found is None:
            with self._compiling:
                found = self._find(grammar) or self._keep(grammar, self._compile(grammar))
        return found

    def _find(self, grammar: str) -> GrammarState | None:
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                return None
            self._compiled.move_to_end(grammar)
            return self._state(matcher)

    def _keep(self, grammar: str, matcher: LLMatcher) -> GrammarState:
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_COMPILED_GRAMMARS:
                self._compiled.popitem(last=False)
            return self._state(matcher)

    def _state(self, matcher: LLMatcher) -> GrammarState:
        return GrammarState(matcher.deep_copy(), self.vocab_size, self.eos_token_ids)

    def _compile(self, grammar: str) -> LLMatcher:
        if not grammar:
            raise ValueError("an empty grammar allows nothing")
        try:
            grammar.encode()
        except UnicodeEncodeError as error:
            raise ValueError("a grammar must be text that UTF-8 can encode") from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ValueError(_sentence(matcher.get_error()))
        return matcher


class GrammarState:
    """Where a text is in its grammar. Follows any output: it rewinds to what the two have in
    common and reads on from there.

    ValueError: following it costs more than the limits allow. The state is of no use after one.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._token_ids: list[int] = []  # what the matcher has read: no EOS, which it may refuse
        self._is_over = False

    def copy(self) -> GrammarState:
        other = GrammarState(self._matcher.deep_copy(), self._vocab_size, self._eos_token_ids)
        other._token_ids = self._token_ids[:]
        other._is_over = self._is_over
        return other

    def sync(self, output_token_ids: Sequence[int]) -> bool:
        """Be where `output_token_ids` ends, wherever it was before. False: it breaks the grammar,
        or a limit was in the way, and there is no mask before the next `sync`."""
        output, held = list(output_token_ids), len(self._token_ids)
        common = held
        if self._token_ids != output[:held]:
            pairs = zip(self._token_ids, output, strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(held, len(output)))
        if common < held:
            self._matcher.rollback(held - common)
            del self._token_ids[common:]
        self._is_over = False
        places = range(common, len(output))
        end = next((i for i in places if output[i] in self._eos_token_ids), len(output))
        num_read = common + self._matcher.try_consume_tokens(output[common:end])
        self._check()
        self._token_ids += output[common:num_read]
        return num_read == end and all(map(self.advance, output[end:]))

    def advance(self, token_id: int) -> bool:
        """Read one more token; False, and nothing has happened, if its text breaks the grammar."""
        if token_id in self._eos_token_ids:
            self._is_over = is_allowed(self.bitmask(), token_id)
            return self._is_over
        if self._is_over:
            return False
        num_read: int = self._matcher.try_consume_tokens([token_id])
        self._check()
        self._token_ids += [token_id] * num_read
        return num_read == 1

    def bitmask(self) -> bytes:
        """The ids that may come next: id i is bit i % 8 of byte i // 8, lowest bit first.

        Where nothing can come next the text is over, complete or not: then EOS may. Where only one
        text can come next it is to be written in the tokenizer's usual tokens.
        """
        if self._is_over:
            return self._end()
        mask = self._matcher.compute_bitmask()
        self._check()
        num_bytes, num_bits = divmod(self._vocab_size, 8)
        if len(mask) > num_bytes:
            last = mask[num_bytes] & ((1 << num_bits) - 1)
            mask = mask[:num_bytes] + bytes([last] if num_bits else [])
        return mask if any(mask) else self._end()

    def _end(self) -> bytes:
        mask = bytearray(-(-self._vocab_size // 8))
        for token_id in self._eos_token_ids:
            mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(_sentence(self._matcher.get_error()))


def is_allowed(bitmask: bytes, token_id: int) -> bool:
    return token_id < 8 * len(bitmask) and bool(bitmask[token_id // 8] >> token_id % 8 & 1)


def allowed_token_ids(bitmask: bytes) -> list[int]:
    """The ids of a bitmask, ascending."""
    return list(_bits(bitmask))


def _bits(bitmask: bytes) -> Iterator[int]:
    for index, byte in enumerate(bitmask):
        if byte:
            yield from (8 * index + bit for bit in range(8) if byte >> bit & 1)


def _sentence(reason: str) -> str:
    """The library explains over many lines, with its state: the first says what is wrong."""
    line = next((line.strip() for line in reason.splitlines() if line.strip()), "unknown reason")
    return line if len(line) <= _MAX_REASON_CHARS else line[:_MAX_REASON_CHARS] + "..."
