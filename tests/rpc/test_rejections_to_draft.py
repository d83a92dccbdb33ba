"""From a target's rejection log to a better draft: real weights, no network, no clock."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from paceline.config import ModelConfig, RejectionLogConfig, SpeculationConfig
from paceline.engine.base import Engine
from paceline.engine.distill import Budget
from paceline.engine.distill_data import DataSettings, gather, load_examples, prepare
from paceline.engine.distill_run import DistillJob, Watch, distill
from paceline.engine.draft_report import load_dense
from paceline.engine.rejection_texts import gather_rejections
from paceline.engine.student import Recipe
from paceline.engine.torch_loader import load_torch_engine
from paceline.errors import ConfigError
from paceline.generation import GenerateRequest, RoundDelta, TokenOrigin
from paceline.target.rejection_log import Generate, RejectionLog, open_rejection_log
from tests.rpc import fleet
from tests.rpc.audit_world import LockStep
from tests.unit.engine.tiny_chat import chats_file, save_chat_model

NUM_REQUESTS, MAX_TOKENS, WINDOW = 6, 30, 16
LOGS = {"whole": 1000, "windows": WINDOW, "bare": 0}  # context_tokens of each
CHATS = 24

Place = tuple[tuple[int, ...], tuple[int, ...]]  # the whole text before it, what the log may hold


def job(target: Path, place: Path, name: str, steps: int, *rejections: Path) -> DistillJob:
    chats = place / "chats.jsonl"
    if not chats.exists():
        chats_file(chats, CHATS)
    return DistillJob(
        target=target,
        name="tiny",
        out=place / name,
        work=place / f"{name}-work",
        data=DataSettings(chats=chats, length=64, held_out=4, rejections=rejections),
        recipe=Recipe(vocab=0, batch_tokens=200),
        budget=Budget(steps=steps),
        num_layers=2,
    )


def load(folder: Path) -> Engine:
    config = ModelConfig(source="x", max_model_len=128, num_kv_blocks=64, device="cpu")
    return load_torch_engine(config, folder)


@dataclass(frozen=True)
class Traffic:
    """A service's: where its logs are, and what was rejected in truth."""

    target: Path
    place: Path
    rejected: list[Place]


async def served(target: Path, draft: Path, *logs: RejectionLog) -> list[Place]:
    """Every log watches the same answers."""
    service = LockStep(load(target), load(draft), SpeculationConfig(num_speculative_tokens=2))

    async def generate(request: GenerateRequest) -> AsyncGenerator[RoundDelta | None, None]:
        async for delta in service.generate(request):
            yield delta

    watched: Generate = generate
    for log in logs:
        watched = partial(log.watch, generate=watched)
    found: list[Place] = []
    for number in range(NUM_REQUESTS):
        prompt = (3, 6, *(8 + (number * 7 + i * i) % 80 for i in range(6)), 4, 5, 7)
        request = fleet.request(
            str(number), temperature=0.8, seed=number, max_tokens=MAX_TOKENS, prompt=prompt
        )
        text = list(prompt)
        async for delta in watched(request):
            assert delta is not None
            text += delta.token_ids
            if delta.origins[-1:] == (TokenOrigin.RECOVERED,):
                whole = tuple(text[:-1])
                found.append((whole, whole[-WINDOW:]))
    for log in logs:
        log.file.close()
    return found


def opened(folder: Path, context_tokens: int) -> RejectionLog:
    config = RejectionLogConfig(file_dir=str(folder), context_tokens=context_tokens)
    log = open_rejection_log(config, "tiny")
    assert log is not None
    return log


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    target = save_chat_model("llama", tmp_path_factory.mktemp("llama"))
    place = tmp_path_factory.mktemp("place")
    distill(job(target, place, "served", 1), Watch())
    logs = (opened(place / name, num) for name, num in LOGS.items())
    return Traffic(target, place, asyncio.run(served(target, place / "served", *logs)))


@pytest.mark.parametrize(("name", "column"), [("whole", 0), ("windows", 1)])
def test_exactly_the_rejected_contexts_are_learned_from(
    traffic: Traffic, tmp_path: Path, name: str, column: int
) -> None:
    settings = job(traffic.target, traffic.place, "x", 1, traffic.place / name).data
    data = gather(traffic.target, settings, tmp_path)
    prepare(traffic.target, data.train, tmp_path)
    examples = load_examples(data, tmp_path, skip=20)
    read = [tuple(e.ids[: at + 1].tolist()) for e in examples for at in e.places]
    expected = {place[column]: place[0] for place in traffic.rejected}
    assert len(traffic.rejected) > 40
    assert len(read) == len({place[0] for place in traffic.rejected})
    for context in expected:
        assert any(ids[-len(context) :] == context for ids in read), context
    for ids in read:  # a window's text is longer where an earlier one begins before it
        assert any(whole[-len(ids) :] == ids for whole in expected.values()), ids
    learned = [example for example in examples if example.places]
    assert all(len(example.ids) == example.places[-1] + 1 for example in learned)
    # put together again: about a text a request and not one a rejection
    assert len(learned) <= 2 * NUM_REQUESTS
    # of the chats, rows behind what all begin with; of these texts, every row
    assert all(example.rows(20)[0] == 0 for example in learned)


def divergence(traffic: Traffic, draft: Path) -> float:
    """Mean KL to the target's law at the rejected places, in nats."""
    target, student = load_dense(traffic.target), load_dense(draft)
    total = 0.0
    with torch.inference_mode():
        for whole, _ in traffic.rejected:
            ids = torch.tensor([whole])
            laws = [
                model(ids, logits_to_keep=1).logits[0, -1].float().log_softmax(-1)
                for model in (target, student)
            ]
            total += float((laws[0].exp() * (laws[0] - laws[1])).sum())
    return total / len(traffic.rejected)


def test_training_brings_the_draft_closer_where_it_failed(traffic: Traffic) -> None:
    steps = 40
    said: list[str] = []
    place = traffic.place
    with_log = job(traffic.target, place, "with", steps, place / "whole")
    report = distill(with_log, Watch(progress=lambda what, done, total: said.append(what)))
    assert report is not None
    distill(job(traffic.target, place, "without", steps), Watch())
    served, without, better = (
        divergence(traffic, place / name) for name in ("served", "without", "with")
    )
    assert better < 0.8 * served
    assert better < 0.9 * without
    assert f"{len({p[0] for p in traffic.rejected})} rejected places in" in report["made"]["data"]
    assert any("rejected places in" in what for what in said)
    assert stat.S_IMODE((place / "with-work").stat().st_mode) == 0o700


def test_heads_learn_from_them_too(traffic: Traffic) -> None:
    given = job(traffic.target, traffic.place, "heads", 5, traffic.place / "windows")
    report = distill(replace(given, num_layers=0, num_heads=2), Watch())
    assert report is not None
    assert report["made"]["progress"]["steps"] == 5


def test_without_contexts_there_is_nothing_to_learn_from(traffic: Traffic) -> None:
    num, bare = len(traffic.rejected), traffic.place / "bare"
    with pytest.raises(ConfigError) as caught:
        distill(job(traffic.target, traffic.place, "none", 5, bare), Watch())
    assert str(caught.value) == (
        f"nothing to learn from in {bare}: {num} of {num} entries have no context: "
        "rejection_log.context_tokens"
    )
    both = gather_rejections([bare, traffic.place / "whole"], 1000, 1000)
    assert f"{num} of {2 * num} entries have no context" in both.sentence()
