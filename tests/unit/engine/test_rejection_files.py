"""Rejection logs: what is read, what may be torn, and the sentence for what cannot be."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.engine import rejection_files
from paceline.engine.rejection_figures import rejection_figures
from paceline.engine.rejection_files import Torn, read_rejections
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


def test_torn_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    """A machine went down; a target went on in the same file."""
    whole = json.dumps(GOOD, separators=(",", ":"))
    for length in range(1, len(whole)):
        cut = whole[:length]
        for rest in (f"{cut}\n", f"{cut}{whole}\n", f"{cut}\0\0\0\n", f"\0\0\n{cut}\0{whole}\n"):
            path = write_lines(tmp_path / "log", [GOOD], f"{rest}{whole}\n")
            torn = Torn()
            assert len(list(read_rejections([path], torn))) == 2, rest
            assert torn.num == rest.count("\n")
    write_lines(tmp_path / "log", [GOOD], f'{{"model":"a"}}\n{whole}\n')  # whole, and no rejection
    with pytest.raises(ConfigError, match="log, line 2 is no rejection: context_len"):
        list(read_rejections([tmp_path / "log"]))


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
    (tmp_path / "a/b").mkdir(parents=True)
    length = path.stat().st_size
    cases = (
        ("MAX_LINE_BYTES", length // 2, length // 2 - 1, "line 1 has more than"),
        ("MAX_TOTAL_BYTES", length, length - 1, "at most 0.0 fit: split it between"),
        ("MAX_CONTEXT_TOKENS", 3, 2, "context is no list of at most 2 token ids"),
        ("MAX_TOP", 2, 1, "top is no list of at most 1 tokens"),
        ("MAX_NAME_CHARS", 5, 4, "source is no name of at most 4"),
        ("MAX_FILES", 1, 0, "or 0 files of rejections"),
        ("MAX_FOLDERS", 3, 2, "has more than 2 folders or"),
        ("MAX_DEPTH", 2, 1, "has folders more than 1 deep: .*/a/b"),
    )
    for name, fits, too_small, said in cases:
        with monkeypatch.context() as patch:
            patch.setattr(rejection_files, name, fits)
            assert len(list(read_rejections([tmp_path]))) == 2, name
            patch.setattr(rejection_files, name, too_small)
            with pytest.raises(ConfigError, match=said):
                list(read_rejections([tmp_path]))
    other = write_lines(tmp_path / "other", [GOOD])
    monkeypatch.setattr(rejection_files, "MAX_TOTAL_BYTES", length)
    with pytest.raises(ConfigError, match=r"at most 0.0 fit: name fewer of them"):
        list(read_rejections([path, other]))
    monkeypatch.setattr(rejection_files, "MAX_FILES", 1)
    with pytest.raises(ConfigError, match="there are more than 1 files of rejections"):
        list(read_rejections([path, other]))


def test_subfolders_are_read_and_links_to_folders_are_not(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for at, name in enumerate(("a", "a/deep", "b", "../elsewhere"), 3):
        (logs / name).mkdir(parents=True)
        write_lines(logs / name / "rejections-h-1.jsonl", [line(TEXT, at)])
    (logs / "a/back").symlink_to(logs)
    (logs / "b/rejections-link.jsonl").symlink_to(tmp_path / "elsewhere")
    (logs / "b/rejections-file.jsonl").symlink_to(logs / "a/rejections-h-1.jsonl")
    found = [entry.context_len for entry in read_rejections([logs, logs / "a"])]
    assert sorted(found) == [3, 4, 5]
    (tmp_path / "link").symlink_to(logs)  # named by the user
    assert len(list(read_rejections([tmp_path / "link"]))) == 3


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
    loop = tmp_path / "logs/rejections-1.jsonl"
    loop.parent.mkdir()
    loop.symlink_to(loop)
    for path in (loop, loop.parent):
        assert said(path) == f"cannot read {loop}: Too many levels of symbolic links"


def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    """As another user where we are root, and may read anything."""
    write_lines(tmp_path / "rejections-1.jsonl", [GOOD])
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from paceline.engine.rejection_files import read_rejections\n"
        "from paceline.errors import ConfigError\n"
        "os.chdir(sys.argv[1])\n"
        "if os.geteuid() == 0: os.setegid(65534), os.seteuid(65534)\n"
        "try: list(read_rejections([Path(sys.argv[2])]))\n"
        "except ConfigError as error: print(error)\n"
    )
    tmp_path.chmod(0o755)
    for name, at in (("locked", "locked"), (".", "locked"), ("locked/x", "locked/x")):
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path, name], capture_output=True, text=True
        )
        assert done.stdout == f"cannot read {at}: Permission denied\n", done.stderr


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
