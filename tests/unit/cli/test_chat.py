"""`paceline chat` against a real gateway on a real socket, and at a real terminal."""

from __future__ import annotations

import codecs
import json
import os
import pty
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.chat_session import MAX_TURNS, ChatSession, Settings
from paceline.cli.chat_talk import MAX_PROMPT_CHARS
from paceline.cli.demo_stream import Answer
from paceline.cli.main import app
from tests.unit.cli.toy_service import KEY, gateway, serving

ASKED = ("--temperature", "0", "--max-tokens", "20")
READ_TIMEOUT_S = 20.0
GREEN = "\x1b[32m"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(gateway(None)) as address:
        yield address


def chat(*arguments: str, input: str | bytes = "", env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=input, env=env)


def answer_of(*arguments: str, url: str, input: str = "") -> dict[str, Any]:
    result = chat(*arguments, *ASKED, "--json", "--url", url, input=input)
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# -- one question -------------------------------------------------------------------------------


def test_one_answer_as_text_and_as_json(url: str) -> None:
    found = answer_of("hello", url=url)
    assert (found["model"], found["prompt"], found["finish_reason"]) == ("toy", "hello", "length")
    assert found["completion_tokens"] == 20
    assert found["proposed"] >= found["accepted"] > 0
    assert found["acceptance_rate"] == found["accepted"] / found["proposed"]
    assert set(found["sources"]) <= {"model"}
    text = chat("hello", *ASKED, "--url", url)
    assert text.exit_code == 0
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in found["text"])
    assert text.stdout == shown + "\n"
    assert text.stderr == ""


def test_no_draft_is_the_same_text_without_proposals(url: str) -> None:
    with_draft, alone = answer_of("hello", url=url), answer_of("hello", "--no-draft", url=url)
    assert alone["text"] == with_draft["text"]
    assert (alone["proposed"], alone["acceptance_rate"]) == (0, None)
    assert answer_of("hello", "--method", "off", url=url)["proposed"] == 0


def test_the_method_is_asked_of_the_service(url: str) -> None:
    refused = chat("hello", *ASKED, "--method", "medusa", "--url", url)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "'speculation.method' cannot be 'medusa': this model has no Medusa heads." in (
        refused.stderr
    )
    both = chat("hello", "--method", "ngram", "--no-draft", "--url", url)
    assert both.stderr == "error: --no-draft is --method off: it contradicts --method ngram\n"
    table = chat("hello", "--json", "--show-rounds", "--url", url)
    assert table.stderr == "error: --json prints no table of rounds: leave --show-rounds out\n"


def test_a_count_keeps_the_method_and_ends_off() -> None:
    talk = session()
    for line in ("/speculation ngram", "/speculation 3"):
        talk.command(line)
    chosen = {"method": "ngram", "include_rounds": True, "max_tokens": 3}
    assert talk.body("q")["speculation"] == chosen
    for line in ("/speculation off", "/speculation 3"):
        talk.command(line)
    assert talk.body("q")["speculation"] == {"include_rounds": True, "max_tokens": 3}


def test_a_pipe_is_the_question(url: str) -> None:
    assert answer_of(url=url, input="hello\n")["text"] == answer_of("hello", url=url)["text"]
    assert chat("--url", url, input=b"\xff\xfe", env={}).exit_code == 0


def test_options_reach_the_service(url: str) -> None:
    plain = answer_of("hello", url=url)
    told = answer_of("hello", "--system", "Be brief.", url=url)
    assert told["prompt_tokens"] > plain["prompt_tokens"]
    warm = [
        chat("hello", "--temperature", "1", "--seed", seed, "--json", "--url", url).stdout
        for seed in ("1", "1", "2")
    ]
    texts = [json.loads(line)["text"] for line in warm]
    assert texts[0] == texts[1] != texts[2]


def test_rounds_are_shown_below_the_answer(url: str) -> None:
    result = chat("hello", *ASKED, "--show-rounds", "--url", url)
    assert "rounds: one pass of the target each" in result.stdout
    assert "20 tokens, " in result.stderr
    assert result.stderr.endswith("(cut at max_tokens)\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hi", "--model", "none"), "error: The model 'none' does not exist"),
        (("hi", "--url", "http://127.0.0.1:9"), "error: no answer from http://127.0.0.1:9: "),
        (("hi", "--url", "nonsense"), "error: no answer from nonsense: "),
        ((" ",), "error: nothing to ask: give a prompt, or write one to standard input"),
        ((), "error: nothing to ask: give a prompt, or write one to standard input"),
        (("x" * (MAX_PROMPT_CHARS + 1),), "error: the prompt is longer than 1048576 characters"),
    ],
)
def test_errors_are_one_line_and_exit_1(arguments: tuple[str, ...], message: str, url: str) -> None:
    where = () if "--url" in arguments else ("--url", url)
    result = chat(*arguments, *where)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1


def test_usage_errors_exit_2() -> None:
    assert chat("hi", "--temperature", "3").exit_code == 2
    assert chat("hi", "--max-tokens", "0").exit_code == 2


def test_a_service_with_keys() -> None:
    with serving(gateway(None, has_keys=True)) as url:
        refused = chat("hi", "--url", url)
        assert refused.exit_code == 1
        assert refused.stderr.startswith("error: ")
        let_in = chat("hi", "--url", url, *ASKED, env={"PACELINE_API_KEY": KEY})
        assert let_in.exit_code == 0, let_in.stderr


# -- the session ----------------------------------------------------------------------------------


def session(**settings: Any) -> ChatSession:
    return ChatSession(Settings(model="m", **settings))


def test_what_is_not_asked_for_is_not_sent() -> None:
    assert session().body("hi") == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"include_rounds": True},
    }


def test_the_conversation_goes_on_until_it_is_cleared() -> None:
    talk = session(system="S")
    talk.add("q", Answer(text="<think>a", content="a"))
    roles = [(turn["role"], turn["content"]) for turn in talk.body("r")["messages"]]
    assert roles == [("system", "S"), ("user", "q"), ("assistant", "a"), ("user", "r")]
    assert talk.command("/clear") == "The conversation is forgotten."
    assert len(talk.body("r")["messages"]) == 2


def test_an_answer_without_a_word_is_not_kept() -> None:
    talk = session()
    talk.add("q", Answer())
    assert talk.turns == []


def test_the_oldest_turns_are_forgotten_in_pairs() -> None:
    talk = session()
    for number in range(MAX_TURNS):
        talk.add(f"q{number}", Answer(content="a"))
    assert len(talk.turns) == MAX_TURNS
    assert talk.turns[0]["role"] == "user"
    assert talk.turns[-2]["content"] == f"q{MAX_TURNS - 1}"


@pytest.mark.parametrize(
    ("line", "said", "sent"),
    [
        ("/speculation off", "Nothing is proposed", {"method": "off", "include_rounds": True}),
        ("/speculation on", "as many proposals as", {"include_rounds": True}),
        ("/speculation 3", "At most 3", {"include_rounds": True, "max_tokens": 3}),
        ("/speculation suffix", "is suffix", {"method": "suffix", "include_rounds": True}),
        ("/speculation eagle", "model, ngram, suffix, medusa", {"include_rounds": True}),
        ("/speculation 64", "At most 64", {"include_rounds": True, "max_tokens": 64}),
        ("/speculation 65", "1 to 64", {"include_rounds": True}),
        ("/speculation 0", "1 to 64", {"include_rounds": True}),
        ("/speculation \u0663", "1 to 64", {"include_rounds": True}),
        ("/speculation", "1 to 64", {"include_rounds": True}),
        ("/nonsense", "There is no /nonsense", {"include_rounds": True}),
        ("/help", "/clear forgets", {"include_rounds": True}),
    ],
)
def test_commands_of_the_conversation(line: str, said: str, sent: dict[str, Any]) -> None:
    talk = session()
    answered = talk.command(line)
    assert answered is not None
    assert said in answered
    assert talk.body("q")["speculation"] == sent


def test_the_system_prompt_can_change() -> None:
    talk = session()
    assert talk.command("/system  Be brief. ") == "The system prompt is set."
    assert talk.body("q")["messages"][0] == {"role": "system", "content": "Be brief."}
    talk.command("/system")
    assert len(talk.body("q")["messages"]) == 1
    assert talk.command("a /system in the middle") is None


# -- a terminal -----------------------------------------------------------------------------------


class Terminal:
    """`paceline chat` at a terminal of its own."""

    def __init__(self, *arguments: str, **env: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline.cli.main", "chat", *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", **env},
            preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""
        self._place = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        """Only at a prompt: what comes before the terminal is set up for it may be lost."""
        os.write(self._ours, text.encode())

    def wait_for(self, text: str) -> None:
        """Until it is shown after what was waited for before."""
        while (place := self.shown.find(text, self._place)) < 0:
            ready, _, _ = select.select([self._ours], [], [], READ_TIMEOUT_S)
            assert ready, f"{text!r} did not come: {self.shown[self._place :]!r}"
            self.shown += self._decoder.decode(os.read(self._ours, 4096))
        self._place = place + len(text)

    def say(self, text: str) -> None:
        self.wait_for("> ")
        self.type(text)

    def end(self) -> int:
        return self.process.wait(READ_TIMEOUT_S)


def _take_terminal() -> None:
    """So that Ctrl-C at the terminal is a signal."""
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_conversation_at_a_terminal(url: str) -> None:
    with Terminal("--url", url, *ASKED, "--show-rounds", NO_COLOR="") as terminal:
        terminal.wait_for("Ctrl-D ends.")
        terminal.say("hello\r")
        terminal.wait_for("proposals accepted")
        assert GREEN in terminal.shown, "no token is green"
        terminal.say("/speculation off\r")
        terminal.wait_for("Nothing is proposed.")
        before = len(terminal.shown)
        terminal.say("again\r")
        terminal.wait_for("20 tokens")
        assert GREEN not in terminal.shown[before:]
        terminal.say("\x04")
        assert terminal.end() == 0


def test_no_color_is_respected(url: str) -> None:
    with Terminal("hello", "--url", url, *ASKED, "--show-rounds", NO_COLOR="1") as terminal:
        terminal.wait_for("proposals accepted")
        assert GREEN not in terminal.shown
        assert terminal.end() == 0


class Slow(BaseHTTPRequestHandler):
    """Begins an answer, and never ends it."""

    released: threading.Event

    def do_GET(self) -> None:
        self._begin("application/json")
        self.wfile.write(b'{"data": [{"id": "slow"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._begin("text/event-stream")
        chunk = {"choices": [{"index": 0, "delta": {"content": "Once upon"}}]}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()
        self.released.wait(READ_TIMEOUT_S)

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""


@contextmanager
def slow_service() -> Iterator[str]:
    Slow.released = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            Slow.released.set()
            server.shutdown()
            thread.join()


def test_ctrl_c_stops_the_answer_and_not_the_conversation() -> None:
    with slow_service() as url, Terminal("--url", url) as terminal:
        terminal.wait_for("Ctrl-D ends.")
        terminal.say("hello\r")
        terminal.wait_for("Once upon")
        terminal.type("\x03")
        terminal.wait_for("(stopped)")
        terminal.say("/clear\r")
        terminal.wait_for("The conversation is forgotten.")
        terminal.say("\x04")
        assert terminal.end() == 0


def test_ctrl_c_ends_a_single_question_with_130() -> None:
    with slow_service() as url, Terminal("hello", "--url", url) as terminal:
        terminal.wait_for("Once upon")
        terminal.type("\x03")
        terminal.wait_for("interrupted")
        assert terminal.end() == 130
