from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench import prompts
from paceline.bench.prompts import load_prompts
from paceline.errors import ConfigError

FILE = """\
{"id": "a", "category": "code", "source": "x", "messages": [{"role": "user", "content": "hi"}]}

Why is the sky blue?
{"prompt": "Once upon"}
{"id": "ids", "prompt": [1, 2, 3]}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text(FILE)
    return file


def test_each_record_goes_where_it_belongs(path: Path) -> None:
    found = load_prompts(path)
    assert [(p.id, p.category) for p in found] == [
        ("a", "code"),
        ("line-3", ""),
        ("line-4", ""),
        ("ids", ""),
    ]
    chat, completions = "/v1/chat/completions", "/v1/completions"
    assert [p.fields() for p in found] == [
        (chat, {"messages": [{"role": "user", "content": "hi"}]}),
        (chat, {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}),
        (completions, {"prompt": "Once upon"}),
        (completions, {"prompt": [1, 2, 3]}),
    ]


def test_an_endpoint_takes_whatever_fits_it(path: Path) -> None:
    found = load_prompts(path)
    assert [p.fields("completions")[1]["prompt"] for p in found] == [
        "hi",
        "Why is the sky blue?",
        "Once upon",
        [1, 2, 3],
    ]
    assert found[2].fields("chat")[1] == {"messages": [{"role": "user", "content": "Once upon"}]}
    with pytest.raises(ConfigError, match="prompt ids is a list of token ids"):
        found[3].fields("chat")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no prompt"),
        ("\n \n", "has no prompt"),
        ('ok\n{"messages": ', r":2: this is no JSON"),
        ('{"messages": []}', ":1: a record needs"),
        ('{"messages": [{"role": "user"}]}', ":1: a record needs"),
        ('{"prompt": ""}', ":1: a record needs"),
        ('{"prompt": ["a"]}', ":1: a record needs"),
        ('{"question": "?"}', ":1: a record needs"),
    ],
)
def test_what_is_no_prompt_is_named_with_its_line(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        load_prompts(file)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_prompts(tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_prompts(tmp_path / "latin")
    (tmp_path / "many").write_text("a\nb\nc\n")
    monkeypatch.setattr(prompts, "MAX_PROMPTS", 2)
    with pytest.raises(ConfigError, match="more than 2"):
        load_prompts(tmp_path / "many")
    monkeypatch.setattr(prompts, "MAX_FILE_BYTES", 2)
    with pytest.raises(ConfigError, match="larger than"):
        load_prompts(tmp_path / "many")
