"""The audit over the torch engine: its own sampler, right and with a bug planted in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import ModelConfig
from paceline.engine.base import Engine
from paceline.engine.loader import load_engine
from paceline.engine.rejection import DraftBlock
from paceline.engine.sampler import BatchedSampler
from tests.e2e.matrix import save_model
from tests.rpc.audit_world import World, lockstep

MODES = {"greedy": 0.0, "coupled": 0.8, "rejection": 0.8, "block": 0.8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), seed=3)


def load(folder: Path) -> Engine:
    fields = {"source": str(folder), "num_kv_blocks": 128, "max_model_len": 256}
    return load_engine(ModelConfig.model_validate({**fields, "num_threads": 1}), folder)


def world(folder: Path, mode: str) -> World:
    """The draft is the same model: it is the target's verification that is looked at."""
    deployed = "coupled" if mode == "greedy" else mode
    return lockstep(load(folder), load(folder), deployed)


def plant_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Every sampled row is judged by the logits of the row behind it; the last by its own. (There
    is one sequence at a time here, so that all rows of a call are one block.)"""
    rank, verify_blocks = BatchedSampler.rank, BatchedSampler.verify_blocks

    def shifted(logits: torch.Tensor) -> torch.Tensor:
        return torch.cat((logits[1:], logits[-1:]))

    def bad_rank(self: BatchedSampler, logits: torch.Tensor, *given: Any) -> Any:
        return rank(self, shifted(logits), *given)

    def bad_verify(
        self: BatchedSampler, logits: torch.Tensor, blocks: Sequence[DraftBlock]
    ) -> list[tuple[tuple[int, ...], int]]:
        return verify_blocks(self, shifted(logits), blocks)

    patch.setattr(BatchedSampler, "rank", bad_rank)
    patch.setattr(BatchedSampler, "verify_blocks", bad_verify)


@pytest.mark.parametrize("mode", MODES)
async def test_right(mode: str, folder: Path) -> None:
    audited = world(folder, mode)
    for _ in range(12):
        await audited.ask(temperature=MODES[mode], ignore_eos=True)
        await audited.audited()
    assert (audited.has_alarm, audited.counts.num_requests) == (False, 12)
    assert audited.num_accepted > 100


@pytest.mark.parametrize("mode", MODES)
async def test_off_by_one(mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_off_by_one(monkeypatch)
    await world(folder, mode).until_alarm(200, temperature=MODES[mode], ignore_eos=True)
