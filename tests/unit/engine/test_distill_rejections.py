"""A distillation with rejections: its work folder is its owner's only; logs are read first."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.engine.distill import Budget
from paceline.engine.distill_data import DataSettings
from paceline.engine.distill_run import DistillJob, Watch, distill
from paceline.errors import ConfigError
from tests.unit.engine.rejection_lines import line, write_lines
from tests.unit.engine.test_distill_run import job, run
from tests.unit.engine.tiny_chat import save_chat_model

TEXT = (3, 6, *range(8, 40))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model("llama", tmp_path_factory.mktemp("llama"))


def with_log(target: Path, place: Path, text: Sequence[int] = TEXT, window: int = 16) -> DistillJob:
    place.mkdir(exist_ok=True)
    log = write_lines(place / "log.jsonl", [line(text, at, window) for at in (9, 14, 20)])
    data = DataSettings(num_chats=12, length=40, held_out=4, rejections=(log,))
    return job(target, place, data=data, budget=Budget(steps=1))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("is_there", [False, True])
def test_the_work_folder_is_its_owners_only(is_there: bool, target: Path, tmp_path: Path) -> None:
    given = with_log(target, tmp_path)
    if is_there:
        given.work.mkdir()
        given.work.chmod(0o755)
    run(given)
    assert mode(given.work) == 0o700
    assert list(given.work.glob("teacher-*.safetensors"))


def test_a_work_folder_of_somebody_else(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = with_log(target, tmp_path)
    given.work.mkdir()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        distill(given, Watch())
    assert not list(given.work.iterdir())


@pytest.mark.parametrize(
    ("text", "window", "said"),
    [
        (TEXT, 0, "nothing to learn from in"),
        ((3, 6, *range(1000, 1030)), 16, "log.jsonl: text 1 has token id 1017"),
    ],
    ids=["no contexts", "tokens of another model"],
)
def test_logs_are_read_before_chats_are_made_up(
    text: Sequence[int], window: int, said: str, target: Path, tmp_path: Path
) -> None:
    given = with_log(target, tmp_path, text, window)
    with pytest.raises(ConfigError, match=said):
        distill(given, Watch())
    assert not list(given.work.glob("chats-*.jsonl"))
