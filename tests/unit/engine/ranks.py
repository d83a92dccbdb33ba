"""Two ranks over gloo, this process being rank 0, and the same model in one process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.config import ModelConfig
from paceline.engine import tensor_parallel as tp
from paceline.engine.loader import load_engine
from paceline.engine.torch_engine import TorchEngine

needs_no_gpu = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="ranks take the GPU; hide it: CUDA_VISIBLE_DEVICES=''"
)

# One process imports torch and transformers, which takes seconds; the ranks are forked from it.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["paceline.engine.tensor_parallel"])

LOOPBACK = "127.0.0.1"
CPU = {"device": "cpu", "max_model_len": 1024, "block_size": 2, "num_kv_blocks": 2048}


def config(folder: Path, **fields: Any) -> ModelConfig:
    fields = {"tensor_parallel_size": 2, "tensor_parallel_timeout_s": 2.0, **CPU, **fields}
    return ModelConfig(source=str(folder), **fields)


def follow(model: ModelConfig, folder: Path, address: tuple[str, int]) -> None:
    """The process of rank 1."""
    torch.set_num_threads(1)
    group = tp.RankGroup.join(model, 1, address, LOOPBACK)
    tp.follow(model, folder, group)()


@dataclass
class Leader:
    engine: TorchEngine
    runner: tp.TensorParallelRunner
    other: BaseProcess


@contextmanager
def two_ranks(
    folder: Path,
    *,
    medusa: Path | None = None,
    other_blocks: int | None = None,
    rank_1: Callable[[ModelConfig, Path, tuple[str, int]], None] = follow,
    **fields: Any,
) -> Iterator[Leader]:
    """`other_blocks`: another cache size for rank 1, which then fails where rank 0 does not."""
    model = config(folder, **fields)
    other_model = model.model_copy(update={"num_kv_blocks": other_blocks or model.num_kv_blocks})
    listener = tp.bind_listener(LOOPBACK)
    address = listener.getsockname()
    other = PROCESSES.Process(target=rank_1, args=(other_model, folder, address), daemon=True)
    other.start()
    try:
        group = tp.RankGroup.join(model, 0, address, LOOPBACK, listener)
        yield Leader(*tp.load_leader(model, folder, group, medusa=medusa), other)
    finally:
        other.kill()
        other.join()
        dist.destroy_process_group()


def alone(folder: Path, *, medusa: Path | None = None, **fields: Any) -> TorchEngine:
    model = config(folder, tensor_parallel_size=1, **fields)
    engine = load_engine(model, folder, medusa="" if medusa is None else str(medusa))
    assert isinstance(engine, TorchEngine)
    return engine
