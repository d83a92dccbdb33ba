"""What a target writes down about rejected proposals, and what it must not."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import FileIO
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config import RejectionLogConfig
from paceline.generation import GenerateRequest, RoundDelta, TokenOrigin
from paceline.protocol.token_log import TokenLog
from paceline.target.rejection_log import (
    MAX_HOST_CHARS,
    NUM_TOP,
    LineFile,
    RejectionLog,
    host_part,
    open_rejection_log,
    rejection_counts,
)
from paceline.tracing.json_lines import MAX_FILES
from tests.rpc import fleet

pytestmark = pytest.mark.timeout(60)

Deltas = list[RoundDelta]


def opened(folder: Path, **settings: Any) -> RejectionLog:
    log = open_rejection_log(RejectionLogConfig(file_dir=str(folder), **settings), "toy-target")
    assert log is not None
    return log


async def answered(log: RejectionLog | None, *requests: GenerateRequest) -> list[Deltas]:
    """The deltas of each request, one after the other, with a draft that is often wrong."""
    settings = fleet.config(num_speculative_tokens=4, lookahead="fixed")
    answers = []
    async with (
        fleet.target(settings, step_ms=10) as target,
        fleet.draft(settings, target, error_rate=0.3),
    ):
        for request in requests:
            work = target.generate(request) if log is None else log.watch(request, target.generate)
            answers.append([delta async for delta in work if delta is not None])
    return answers


def lines(log: RejectionLog) -> list[dict[str, Any]]:
    log.file.close()
    text = log.file.path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def rejections(deltas: Deltas) -> list[tuple[int, int]]:
    """(output index, token) of what was taken instead of a proposal."""
    found, length = [], 0
    for delta in deltas:
        length += len(delta.token_ids)
        if delta.origins[-1] is TokenOrigin.RECOVERED:
            found.append((length - 1, delta.token_ids[-1]))
    return found


def asked(name: str, **changes: Any) -> GenerateRequest:
    return dataclasses.replace(fleet.request(name, temperature=0.8, seed=3), **changes)


def test_each_rejection_is_a_line_that_names_its_place(tmp_path: Path) -> None:
    log = opened(tmp_path)
    request = asked("a")
    (deltas,) = asyncio.run(answered(log, request))
    text = TokenLog(request.prompt_token_ids + fleet.tokens(deltas))
    found = lines(log)
    assert len(found) > 3
    places = [(line["context_len"] - line["prompt_len"], line["token_id"]) for line in found]
    assert places == rejections(deltas)
    for line in found:
        assert line["context_hash"] == f"{text.hash_at(line['context_len']):016x}"
        logprobs = [logprob for _, logprob in line["top"]]
        assert len(logprobs) == NUM_TOP
        assert logprobs == sorted(logprobs, reverse=True)
        assert (line["model"], line["temperature"]) == ("toy-target", 0.8)
    assert rejection_counts(log) == {
        "num_logged_rejections": len(found),
        "num_dropped_rejections": 0,
    }


@pytest.mark.parametrize("wanted", [None, 0, 2, 20])
def test_the_client_sees_what_it_would_see_anyway(tmp_path: Path, wanted: int | None) -> None:
    request = asked("a", num_logprobs=wanted)
    (watched,) = asyncio.run(answered(opened(tmp_path), request))
    (plain,) = asyncio.run(answered(None, request))
    assert fleet.tokens(watched) == fleet.tokens(plain) == fleet.alone(request)
    entries = [entry for delta in watched for entry in delta.logprobs]
    assert entries == [entry for delta in plain for entry in delta.logprobs]
    assert len(entries) == (0 if wanted is None else request.max_tokens)


def test_no_text_unless_it_is_allowed(tmp_path: Path) -> None:
    request = asked("a")
    log = opened(tmp_path / "without")
    asyncio.run(answered(log, request))
    assert all("context" not in line for line in lines(log))
    log = opened(tmp_path / "with", context_tokens=30)
    (deltas,) = asyncio.run(answered(log, request))
    text = request.prompt_token_ids + fleet.tokens(deltas)
    found = lines(log)
    assert found
    for line in found:
        place = line["context_len"]
        assert tuple(line["context"]) == text[max(0, place - 30) : place]


def test_several_choices_and_what_came_before_a_failure(tmp_path: Path) -> None:
    log = opened(tmp_path)
    request = asked("a", n=2)
    (deltas,) = asyncio.run(answered(log, request))
    hashes = set()
    for choice in range(2):
        own = [delta for delta in deltas if delta.choice == choice]
        text = TokenLog(request.prompt_token_ids + fleet.tokens(own))
        hashes |= {
            f"{text.hash_at(len(request.prompt_token_ids) + index):016x}"
            for index, _ in rejections(own)
        }
    assert {line["context_hash"] for line in lines(log)} == hashes


def test_a_share_of_requests_and_nothing_in_the_background(tmp_path: Path) -> None:
    log = opened(tmp_path, sample_ratio=0.5)
    chosen = {name for name in map(str, range(400)) if log.is_chosen(asked(name))}
    assert 150 < len(chosen) < 250
    assert not any(log.is_chosen(asked(name, is_background=True)) for name in chosen)
    left_out = next(name for name in map(str, range(400)) if name not in chosen)
    asyncio.run(answered(log, asked(left_out)))
    assert lines(log) == []


def test_off_by_default(tmp_path: Path) -> None:
    assert open_rejection_log(RejectionLogConfig(), "m") is None
    assert (
        open_rejection_log(RejectionLogConfig(file_dir=str(tmp_path), sample_ratio=0), "m") is None
    )
    assert not list(tmp_path.iterdir())
    assert rejection_counts(None) == {"num_logged_rejections": 0, "num_dropped_rejections": 0}


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    assert open_rejection_log(RejectionLogConfig(file_dir=str(tmp_path / "file")), "m") is None
    assert "no rejection log" in caplog.text


def test_a_full_file_is_put_aside_once(tmp_path: Path) -> None:
    file = LineFile(tmp_path, max_bytes=100, max_queue_size=64)
    for number in range(10):
        file.put({"number": number, "padding": "x" * 30})
    file.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    assert file.num_written == 10
    kept = [
        json.loads(line) for name in names for line in (tmp_path / name).read_text().splitlines()
    ]
    assert [line["number"] for line in kept] == [8, 9] or [line["number"] for line in kept] == [
        6,
        7,
        8,
        9,
    ]
    assert all(path.stat().st_size <= 100 for path in tmp_path.iterdir())
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_a_rotation_that_fails_costs_lines_until_it_succeeds(tmp_path: Path) -> None:
    file = LineFile(tmp_path, max_bytes=64, max_queue_size=64)
    in_the_way = tmp_path / file.path.name.replace(".jsonl", ".1.jsonl")
    in_the_way.mkdir()
    (in_the_way / "x").touch()
    file._write(b"0" * 40)
    for _ in range(2):
        with pytest.raises(OSError, match="directory"):
            file._write(b"1" * 40)
    (in_the_way / "x").unlink()
    in_the_way.rmdir()
    file._write(b"2" * 40)
    file.put({"number": 3})
    file.close()
    assert in_the_way.read_bytes() == b"0" * 40
    assert file.path.read_bytes() == b"2" * 40 + b'{"number":3}\n'
    assert (file.num_written, file.num_dropped) == (1, 0)


def test_a_files_name_tells_hosts_apart(tmp_path: Path) -> None:
    file = LineFile(tmp_path, max_bytes=100, max_queue_size=16)
    file.close()
    host = host_part(socket.gethostname())
    assert file.path.name == f"rejections-{host}-{os.getpid()}.jsonl"
    assert host_part("pod-7.x/../\x1b[2J") == "pod-7-x------2J"
    assert host_part("") == "host"
    assert host_part("a" * 64 + "-z7") == "a" * (MAX_HOST_CHARS - 3) + "-z7"


def test_half_a_line_of_a_process_before_is_ended(tmp_path: Path) -> None:
    file = LineFile(tmp_path, max_bytes=100, max_queue_size=16)
    file.put({"number": 1})
    file.close()
    with file.path.open("ab") as before:
        before.write(b'{"numb')
    for number in (2, 3):
        file = LineFile(tmp_path, max_bytes=100, max_queue_size=16)
        file.put({"number": number})
        file.close()
    assert file.path.read_text() == '{"number":1}\n{"numb\n{"number":2}\n{"number":3}\n'


def test_half_a_line_does_not_stay(tmp_path: Path) -> None:
    class Small(FileIO):
        """A disk with room for 20 bytes."""

        def write(self, data: Any) -> int:
            return super().write(bytes(data)[: max(0, 20 - self.tell())])

    file = LineFile(tmp_path, max_bytes=1 << 20, max_queue_size=16)
    file._file.close()
    file._file = Small(str(file.path), "ab")
    for number in range(3):
        file.put({"number": number})
    file.close()
    assert file.path.read_text() == '{"number":0}\n'
    assert (file.num_written, file.num_dropped) == (1, 2)


def test_files_of_processes_that_are_gone_are_bounded(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 6):
        (tmp_path / f"rejections-{10**9 + number}.jsonl").write_text("{}")
    for number in range(3):  # of other hosts: the oldest of all
        file = tmp_path / f"rejections-other-{os.getpid()}{number}.jsonl"
        file.touch()
        os.utime(file, (number, number))
    host = host_part(socket.gethostname())
    alive = tmp_path / f"rejections-{host}-{os.getppid()}.jsonl"
    alive.touch()
    os.utime(alive, (0, 0))
    LineFile(tmp_path, max_bytes=1 << 20, max_queue_size=16).close()
    assert len(list(tmp_path.iterdir())) == MAX_FILES
    assert [path.name for path in tmp_path.glob("rejections-*-*.jsonl")].count(alive.name) == 1
    assert not list(tmp_path.glob("rejections-other-*"))


def test_a_full_queue_drops_and_counts(
    tmp_path: Path, blocked: Callable[[LineFile], AbstractContextManager[None]]
) -> None:
    file = LineFile(tmp_path, max_bytes=1 << 20, max_queue_size=16)
    with blocked(file):
        for number in range(20):
            file.put({"number": number})
    file.close()
    assert file.num_dropped in (3, 4)  # the thread may hold one
    assert file.num_written + file.num_dropped == 20
    file.put({"late": True})
    assert file.num_dropped in (4, 5)


@pytest.fixture
def blocked() -> Callable[[LineFile], AbstractContextManager[None]]:
    """Its disk does not answer."""

    @contextmanager
    def block(file: LineFile) -> Iterator[None]:
        answer, write = Event(), file._write

        def slow(line: bytes) -> None:
            answer.wait(30)
            write(line)

        file._write = slow
        yield
        answer.set()

    return block


def test_closing_is_bounded_where_the_disk_does_not_answer(
    tmp_path: Path, blocked: Callable[[LineFile], AbstractContextManager[None]]
) -> None:
    file = LineFile(tmp_path, max_bytes=1 << 20, max_queue_size=16)
    with blocked(file):
        file.put({"number": 1})
        file.close(timeout_s=0.05)
        assert file._thread.is_alive()
    file._thread.join(10)
    assert file.num_written == 1


def test_a_full_disk_costs_lines_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = LineFile(tmp_path, max_bytes=1 << 20, max_queue_size=16)
    file._file.close()
    file._file = FileIO("/dev/full", "ab")
    file.put({"number": 1})
    file.put({"number": 2})
    file.close()
    assert file.num_dropped == 2
    assert caplog.text.count("cannot be written") == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"sample_ratio": 1.1},
        {"context_tokens": -1},
        {"context_tokens": 131_073},
        {"max_file_bytes": 1},
        {"max_queue_size": 15},
        {"file_dir": "x" * 4097},
    ],
)
def test_what_the_configuration_refuses(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RejectionLogConfig(**settings)
