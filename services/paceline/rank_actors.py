"""The engine of a Serve replica, with its other ranks as Ray actors beside it.

With `tensor_parallel_size` N the replica itself is rank 0, in bundle 0 of its placement group;
ranks 1 .. N-1 are actors in the bundles after it, which die with it. Starts, watches and stops
them; passes go over torch.distributed, never over Ray. Knows no tokens, drafts or requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline import models
from paceline.config import ModelConfig
from paceline.engine.base import NO_ADAPTERS, Engine, EngineBroken
from paceline.engine.loader import load_source
from paceline.engine.medusa_source import resolve_medusa
from paceline.engine.worker import EngineWorker
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.engine.tensor_parallel import TensorParallelRunner

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2.0
# A pass that takes longer hangs, and its replica is replaced: unless a deployment says otherwise.
MAX_PASS_S = 60.0
# Resources that Ray's actor options name by themselves.
NAMED_RESOURCES = {"CPU": "num_cpus", "GPU": "num_gpus"}


class RankActor:
    """One rank other than 0: a process of its own. Calls come in this order, one after another."""

    def __init__(self, model: ModelConfig, rank: int) -> None:
        self._model, self._rank = model, rank
        self._serve: Callable[[], None] | None = None

    def prepare(self) -> tuple[int, str]:
        """(pid, node address), once the weights are found and torch is imported."""
        self._folder = _find_weights(self._model)
        return os.getpid(), ray.util.get_node_ip_address()

    def load(self, address: tuple[str, int]) -> None:
        """Join the group that rank 0 opens at `address` and load this rank's share."""
        from paceline.engine import tensor_parallel

        host = ray.util.get_node_ip_address()
        group = tensor_parallel.RankGroup.join(self._model, self._rank, address, host)
        self._serve = tensor_parallel.follow(self._model, self._folder, group)

    def run(self) -> None:
        """Every pass, until rank 0 stops. A failure ends this process: the group cannot go on,
        and everyone has to see it at once."""
        assert self._serve is not None, "run() before load()"
        try:
            self._serve()
        except Exception as error:
            logger.exception("rank %d failed: %s", self._rank, error)
            os._exit(1)


class ReplicaEngine:
    """The `worker` of a replica and the ranks behind it. `rank_pids`: of ranks 1, 2, ..."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_pass_s: float | None = None,
        runner: TensorParallelRunner | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.worker = EngineWorker(engine, max_pass_s=max_pass_s)
        self._runner = runner
        self._ranks = ranks

    @property
    def rank_pids(self) -> tuple[int, ...]:
        return () if self._ranks is None else self._ranks.pids

    def check_health(self) -> None:
        """Raises RayActorError when a rank died or the engine is broken.

        Serve replaces a replica at once for this exception; for any other only after three
        failed checks.
        """
        if self._ranks is not None:
            self._ranks.check_health()
        try:
            self.worker.check_health()
        except EngineBroken as broken:
            if self._ranks is not None:
                self._ranks.kill()
            raise RayActorError(error_msg=f"the engine is broken: {broken}") from broken

    async def stop(self) -> None:
        """End the ranks. Call it after the worker is closed."""
        if self._runner is None or self._ranks is None:
            return
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.to_thread(self._runner.close)
                await self._ranks.ended()
        except TimeoutError:
            pass
        except Exception:  # a rank is gone already, so it cannot be told
            logger.exception("the ranks could not be asked to end")
        finally:
            self._ranks.kill()


class Ranks:
    """The rank actors of one replica, an actor in each bundle of `group` after the first."""

    def __init__(self, model: ModelConfig, group: Any) -> None:
        self.pids: tuple[int, ...] = ()
        self._hosts: tuple[str, ...] = ()
        self._runs: list[asyncio.Future[None]] = []
        self._actors = [
            ray.remote(RankActor)
            .options(
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                ),
                **actor_options(group.bundle_specs[rank]),
            )
            .remote(model, rank)
            for rank in range(1, model.tensor_parallel_size)
        ]

    async def prepare(self) -> None:
        """Until every rank has started and found its weights."""
        prepared = await asyncio.gather(*(actor.prepare.remote() for actor in self._actors))
        self.pids, self._hosts = zip(*prepared, strict=True)

    def load(self, address: tuple[str, int]) -> list[asyncio.Future[None]]:
        return [_future(actor.load.remote(address)) for actor in self._actors]

    def run(self) -> None:
        """From here on each rank follows rank 0, and `check_health` means something."""
        self._runs = [_future(actor.run.remote()) for actor in self._actors]

    def check_health(self) -> None:
        """Raises the RayActorError of a rank that died, unwrapped."""
        for rank, run in enumerate(self._runs, 1):
            if run.done():
                run.result()
                raise RayActorError(error_msg=f"rank {rank} has ended")

    async def ended(self) -> None:
        """Until every rank has left its loop, whatever the reason."""
        await asyncio.gather(*self._runs, return_exceptions=True)

    def kill(self) -> None:
        """End the rank processes, hung ones too."""
        own_host = ray.util.get_node_ip_address()
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        # Ray asks the process itself to end, which one that is stopped cannot hear. A rank whose
        # loop has not ended still owns its pid.
        for run, pid, host in zip(self._runs, self.pids, self._hosts, strict=False):
            if not run.done() and host == own_host:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


async def load_replica_engine(
    model: ModelConfig,
    *,
    max_pass_s: float = MAX_PASS_S,
    draft_top_n: int | None = None,
    adapters: Mapping[str, str] = NO_ADAPTERS,
    medusa: str = "",
) -> ReplicaEngine:
    """The engine that `model` describes, ready, with all of its ranks.

    A pass that takes longer than `max_pass_s` breaks it; with several ranks also one that takes
    longer than `tensor_parallel_timeout_s`.
    `ConfigError` when it cannot be served, or when the deployment has no place for its ranks.
    `adapters`: LoRA adapters, name -> PEFT folder. `medusa`: where its Medusa heads are, or empty.
    """
    if model.tensor_parallel_size == 1:
        engine = await asyncio.to_thread(
            load_source, model, draft_top_n=draft_top_n, adapters=adapters, medusa=medusa
        )
        return ReplicaEngine(engine, max_pass_s=max_pass_s)
    check_source(model)
    if adapters:
        raise ConfigError(
            f"target.adapters and tensor_parallel_size {model.tensor_parallel_size} do not go"
            " together yet: set tensor_parallel_size: 1, or merge the adapter into the model"
        )
    heads = await asyncio.to_thread(resolve_medusa, medusa) if medusa else None
    ranks = Ranks(model, own_placement_group(model))
    try:
        # Together: each process takes seconds to import torch.
        folder, _ = await asyncio.gather(asyncio.to_thread(_find_weights, model), ranks.prepare())
        engine, runner = await _load_ranks(model, folder, ranks, draft_top_n, heads)
    except BaseException:
        # Whoever still waits for the others in the group, a thread of ours too, fails with them.
        ranks.kill()
        raise
    limit_s = min(max_pass_s, model.tensor_parallel_timeout_s)
    return ReplicaEngine(engine, max_pass_s=limit_s, runner=runner, ranks=ranks)


async def _load_ranks(
    model: ModelConfig, folder: Path, ranks: Ranks, draft_top_n: int | None, heads: Path | None
) -> tuple[Engine, TensorParallelRunner]:
    from paceline.engine import tensor_parallel

    host = ray.util.get_node_ip_address()
    listener = tensor_parallel.bind_listener(host)
    address = (host, listener.getsockname()[1])

    def load() -> tuple[Engine, TensorParallelRunner]:
        group = tensor_parallel.RankGroup.join(model, 0, address, host, listener)
        return tensor_parallel.load_leader(
            model, folder, group, draft_top_n=draft_top_n, medusa=heads
        )

    mine = asyncio.create_task(asyncio.to_thread(load))
    loads: list[asyncio.Future[Any]] = [mine, *ranks.load(address)]
    done, _ = await asyncio.wait(loads, return_when=asyncio.FIRST_EXCEPTION)
    # A rank that failed to load says why; that the group lost it says nothing.
    for future in sorted(done, key=lambda future: future is mine):
        future.result()
    loaded = mine.result()
    ranks.run()
    return loaded


def actor_options(bundle: dict[str, float]) -> dict[str, Any]:
    """Ray actor options that ask for all of a bundle."""
    options: dict[str, Any] = {"num_cpus": 0}
    options |= {name: bundle[key] for key, name in NAMED_RESOURCES.items() if key in bundle}
    others = {key: n for key, n in bundle.items() if key not in NAMED_RESOURCES and key != "memory"}
    return options | ({"resources": others} if others else {})


def check_source(model: ModelConfig) -> None:
    """`ConfigError` for a built-in model, which has no weights to share."""
    if model.source in models.BUILTIN_SOURCES:
        raise ConfigError(
            f"model {model.source} has no weights to share; set tensor_parallel_size: 1"
        )


def _find_weights(model: ModelConfig) -> Path:
    """The model's folder on this node, checked as far as possible without loading it."""
    from paceline.engine.tensor_parallel import check_folder

    folder = models.resolve(model.source)
    check_folder(model, folder)
    return folder


def own_placement_group(model: ModelConfig) -> Any:
    """This replica's placement group; `ConfigError` unless it has a bundle for every rank."""
    group = ray.util.get_current_placement_group()
    size, num_bundles = model.tensor_parallel_size, len(group.bundle_specs) if group else 0
    if num_bundles < size:
        bundles = ", ".join(["{CPU: 1}"] * size)
        raise ConfigError(
            f"tensor_parallel_size {size} needs one placement group bundle per rank, but this "
            f"deployment has {num_bundles}: write placement_group_bundles: [{bundles}] and "
            "placement_group_strategy: STRICT_PACK beside its name (on GPUs {CPU: 1, GPU: 1})"
        )
    return group


def _future(ref: Any) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.wrap_future(ref.future())
    return future
