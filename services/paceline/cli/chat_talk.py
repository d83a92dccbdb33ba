"""What `paceline chat` does: asks, shows the answer as it comes, remembers the conversation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import httpx

from paceline.cli import demo_view
from paceline.cli.chat_session import HELP, ChatSession, Settings, answer_json
from paceline.cli.console import err, out, told
from paceline.cli.demo import client
from paceline.cli.demo_stream import Answer, Piece, model_name, stream_chat
from paceline.cli.values import json_line
from paceline.errors import ConfigError, PacelineError

MAX_SHOWN_ROUNDS = 24
MAX_HISTORY_LINES = 1000
MAX_PROMPT_CHARS = 1 << 20
PROMPT = "> "

# What a body of an unexpected shape raises where it is read.
_BENT = (LookupError, TypeError, AttributeError, ValueError)


def run(prompt: str | None, url: str, api_key: str, settings: Settings, as_json: bool) -> None:
    """One question (`prompt`, or what a pipe holds), or a conversation at a terminal."""
    is_conversation = prompt is None and sys.stdin.isatty()
    question = "" if is_conversation else _one_question(prompt)
    try:
        with client(url, api_key) as http:
            settings.model = settings.model or _first_model(http, url)
            talk = Talk(http, ChatSession(settings), as_json, url)
            if is_conversation:
                talk.converse()
            else:
                talk.ask(question)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PacelineError(f"no answer from {url}: {error}") from error


def _first_model(http: httpx.Client, url: str) -> str:
    try:
        return model_name(http)
    except _BENT as error:
        raise _no_such_service(url) from error


def _no_such_service(url: str) -> PacelineError:
    return PacelineError(f"{url} does not answer as an OpenAI-compatible service does")


def _one_question(prompt: str | None) -> str:
    """Raises ConfigError for nothing, and for more than anybody means to ask."""
    if prompt is None:
        raw = sys.stdin.buffer.read(4 * MAX_PROMPT_CHARS + 4)
        prompt = raw.decode("utf-8", "replace").strip()
    if not prompt.strip():
        raise ConfigError("nothing to ask: give a prompt, or write one to standard input")
    if len(prompt) > MAX_PROMPT_CHARS:
        raise ConfigError(f"the prompt is longer than {MAX_PROMPT_CHARS} characters")
    return prompt


class Talk:
    """A session, the service it is with, and what is printed."""

    def __init__(self, http: httpx.Client, session: ChatSession, as_json: bool, url: str) -> None:
        self._http = http
        self._session = session
        self._as_json = as_json
        self._url = url

    def converse(self) -> None:
        """Until Ctrl-D. An answer that fails is a sentence, not the end."""
        greeting = told(f"{self._session.settings.model} at {self._url}. {HELP}")
        err.print(greeting, style="dim", markup=False)
        with _history():
            while (line := _next_line()) is not None:
                question = line.strip()
                if (said := self._session.command(question)) is not None:
                    err.print(said, style="dim", markup=False)
                elif question:
                    self._ask_on(question)

    def _ask_on(self, question: str) -> None:
        try:
            self.ask(question)
        except KeyboardInterrupt:
            err.print("\n(stopped)", style="dim")
        except (PacelineError, httpx.HTTPError) as error:
            err.print(told(f"error: {error}"), style="red", markup=False)

    def ask(self, question: str) -> None:
        """One answer, printed as it comes. What came before a Ctrl-C stays in the conversation."""
        answer = Answer()
        body = self._session.body(question)
        try:
            stream_chat(self._http, body, self._show, answer)
        except _BENT as error:
            raise _no_such_service(self._url) from error
        finally:
            self._session.add(question, answer)
        self._show_end(question, answer)

    def _show(self, piece: Piece) -> None:
        if not self._as_json:
            demo_view.show_piece(out, piece)

    def _show_end(self, question: str, answer: Answer) -> None:
        settings = self._session.settings
        if self._as_json:
            found = answer_json(settings.model, question, answer)
            out.print(json_line(found), markup=False)
            return
        out.print()
        if settings.shows_rounds:
            out.print(demo_view.rounds_table(answer.rounds, MAX_SHOWN_ROUNDS))
        if settings.shows_rounds or err.is_terminal:
            err.print(_closing(answer), style="dim", markup=False)


def _closing(answer: Answer) -> str:
    """34 tokens, 41.2 tokens/s, 24 of 36 proposals accepted in 10 rounds."""
    text = f"{answer.num_tokens} tokens, {answer.tokens_per_s:.1f} tokens/s"
    if answer.num_proposed:
        text += (
            f", {answer.num_accepted} of {answer.num_proposed} proposals accepted in "
            f"{len(answer.rounds)} rounds"
        )
    return text + (" (cut at max_tokens)" if answer.finish_reason == "length" else "")


def _next_line() -> str | None:
    """None at the end of the input. Ctrl-C drops the line that was begun."""
    while True:
        try:
            return input(PROMPT)
        except EOFError:
            err.print()
            return None
        except KeyboardInterrupt:
            err.print()


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Arrow keys and Ctrl-R where Python has readline; the questions stay in memory only."""
    try:
        import readline
    except ImportError:
        yield
        return
    readline.set_history_length(MAX_HISTORY_LINES)
    try:
        yield
    finally:
        readline.clear_history()
