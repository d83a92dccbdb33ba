"""Rejection logs: what is read, what may be torn, and the sentence for what cannot be."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.engine import rejection_files
from paceline.engine.rejection_figures import rejection_figures
from paceline.engine.rejection_files import read_rejections
from paceline.errors import ConfigError
from tests.unit.engine.rejection_lines import line, write_lines

TEXT = tuple(range(20, 40))
GOOD = line(TEXT, 5, 3)


def test_a_folder_with_the_files_that_were_put_aside(tmp_path: Path) -> None:
    write_lines(tmp_path / "rejections-7.1.jsonl", [line(TEXT, 3), line(TEXT, 4)])
    write_lines(tmp_path / "rejections-7.jsonl", [line(TEXT, 5, 3)])
    write_lines(tmp_path / "rejections-8.jsonl", [])
    (tmp_path / "traces.jsonl").write_text("nonsense")
    found = list(read_rejections([tmp_path, tmp_path / "rejections-7.jsonl"]))  # named twice
    assert [entry.context_len for entry in found] == [3, 4, 5]
    assert [tuple(entry.context) for entry in found] == [(), (), (22, 23, 24)]
    assert (found[2].token_id, found[2].logprob, found[2].top[1]) == (25, -0.5, (26, -1.5))
    assert (found[2].model, found[2].source) == ("tiny", "model")
    assert found[2].context_hash == int(GOOD["context_hash"], 16)


def test_only_the_last_line_may_be_torn(tmp_path: Path) -> None:
    whole = json.dumps(GOOD)
    path = tmp_path / "log"
    for length in range(len(whole)):
        write_lines(path, [GOOD, GOOD], whole[:length])
        assert len(list(read_rejections([path]))) == 2
    write_lines(path, [GOOD], whole)  # whole, only its end of line is not there yet
    assert len(list(read_rejections([path]))) == 2
    write_lines(path, [GOOD], whole[:9] + "\n" + whole + "\n")
    with pytest.raises(ConfigError, match=r"log, line 2 is no rejection: it is not JSON"):
        list(read_rejections([path]))


def bent(**changes: Any) -> str:
    return json.dumps(GOOD | changes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("\xff", "it is not JSON"),
        ("[]", "it is no JSON object"),
        ("{}", "context_len is no whole number"),
        (bent(context_len=True), "context_len is no whole number"),
        (bent(token_id=-1), "token_id is no whole number"),
        (bent(token_id=2**31), "token_id is no whole number"),
        (bent(model=3), "model is no name"),
        (bent(source="x" * 1025), "source is no name"),
        (bent(context_hash="0" * 15), "context_hash is not 16 hexadecimal digits"),
        (bent(context_hash="x" * 16), "context_hash is not 16 hexadecimal digits"),
        (bent(context_hash=7), "context_hash is not 16 hexadecimal digits"),
        (bent(logprob="-1"), "a log-probability is no number up to 0"),
        (bent(logprob=1.5), "a log-probability is no number up to 0"),
        (bent(logprob=math.nan), "a log-probability is no number up to 0"),
        (bent(logprob=-(10**400)), "a log-probability is no number up to 0"),
        (bent(top=None), "top is no list"),
        (bent(top=[[1, -1.0]] * 65), "top is no list of at most 64 tokens"),
        (bent(top=[[1]]), "top has something else"),
        (bent(top=[[1.5, -1.0]]), "top has something else"),
        (bent(top=[[1, math.inf]]), "a log-probability is no number"),
        (bent(context="abc"), "context is no list of at most 5 token ids"),
        (bent(context=[1] * 6), "context is no list of at most 5 token ids"),
        (bent(context=[1, -1]), "context has something else than token ids"),
        (bent(context=[1, True]), "context has something else than token ids"),
    ],
)
def test_a_bent_line_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = write_lines(tmp_path / "log", [GOOD])
    path.write_bytes(path.read_bytes() + text.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError) as caught:
        list(read_rejections([path]))
    assert str(caught.value).startswith(f"{path}, line 2 is no rejection: {said}")


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "rejections-1.jsonl", [GOOD, GOOD])
    length = path.stat().st_size
    cases = (
        ("MAX_LINE_BYTES", length // 2, length // 2 - 1, "line 1 has more than"),
        ("MAX_TOTAL_BYTES", length, length - 1, "at most 0 fit: name fewer of them"),
        ("MAX_CONTEXT_TOKENS", 3, 2, "context is no list of at most 2 token ids"),
        ("MAX_TOP", 2, 1, "top is no list of at most 1 tokens"),
        ("MAX_NAME_CHARS", 5, 4, "source is no name of at most 4"),
        ("MAX_FILES", 1, 0, "there are 1 files of rejections, at most 0 fit"),
    )
    for name, fits, too_small, said in cases:
        with monkeypatch.context() as patch:
            patch.setattr(rejection_files, name, fits)
            assert len(list(read_rejections([tmp_path]))) == 2, name
            patch.setattr(rejection_files, name, too_small)
            with pytest.raises(ConfigError, match=said):
                list(read_rejections([tmp_path]))


def test_places_that_cannot_be_read(tmp_path: Path) -> None:
    def said(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            list(read_rejections([path]))
        return str(caught.value)

    assert said(tmp_path / "none") == f"cannot read {tmp_path / 'none'}: No such file or directory"
    assert said(tmp_path) == f"{tmp_path} has no file rejections-*.jsonl"
    os.mkfifo(tmp_path / "rejections-1.jsonl")
    assert said(tmp_path) == f"{tmp_path / 'rejections-1.jsonl'} is not an ordinary file"
    assert said(Path("/dev/zero")) == "/dev/zero is not an ordinary file"


def test_figures(tmp_path: Path) -> None:
    rows = [
        *[line(TEXT, at, source=source) for at, source in ((3, "model"), (4, "model"), (4, "x"))],
        line(TEXT, 6, 2, token_id=99, logprob=math.log(0.25), top=[[5, math.log(0.5)]]),
    ]
    entries = list(read_rejections([write_lines(tmp_path / "log", rows)]))
    found = rejection_figures(entries, 2, vocab={23, 24})
    assert (found.num_entries, found.num_contexts, found.num_bare) == (4, 3, 3)
    assert found.sources == {"model": 3, "x": 1}
    assert found.tokens == ((24, 2), (23, 1))
    assert found.num_outside == 1
    assert found.greedy == 0.75
    assert found.taken == pytest.approx((3 * math.exp(-0.5) + 0.25) / 4)
    assert found.best == pytest.approx((3 * math.exp(-0.5) + 0.5) / 4)
    assert rejection_figures(entries, 0).num_outside is None
    assert rejection_figures([], 3).num_entries == 0
