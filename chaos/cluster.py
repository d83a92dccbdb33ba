"""The service under test: started once on this machine, asked for its state, healed in between.

Replicas are found by what Serve and the Controller report, never by name or by guessing. All
waiting for Ray happens in threads, so that traffic goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from chaos import proxy_control
from chaos.app import PROXY_ENV
from paceline.cli import cluster as local
from paceline.cli.servefile import ServeFile
from paceline.config import AppConfig

HERE = Path(__file__).parent
APP = "paceline"
HOST = "127.0.0.1"
ASK_TIMEOUT_S = 10.0
STEADY_TIMEOUT_S = 90.0
POLL_S = 0.1
NUM_STARTS = 4
RAY_IS_SLOW = "timed out during startup"
DEPLOYMENTS = ("Gateway", "TargetReplica", "DraftReplica", "Controller")
SIZES = ("num_running", "num_waiting", "num_reserved_blocks", "num_engine_blocks_used")
ASK_ERRORS = (RayError, RayServeException, TimeoutError, RuntimeError)

logger = logging.getLogger("chaos")


class NotSteady(Exception):
    """The service did not come back; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One process, as Serve lists it."""

    deployment: str
    replica_id: str
    pid: int


class Cluster:
    """`url` for clients, `control` for the proxy."""

    def __init__(self, url: str, control: str, config: AppConfig) -> None:
        self.url = url
        self.control = control
        self.config = config

    # -- what is there ----------------------------------------------------------------------

    async def replicas(self, deployment: str) -> list[Replica]:
        """The running ones, in the order of their ids; empty while nobody can tell."""
        details = await _quietly(_instance_details)
        if not details:
            return []
        found = details["applications"][APP]["deployments"].get(deployment, {"replicas": []})
        return sorted(
            (
                Replica(deployment, replica["replica_id"], replica["pid"])
                for replica in found["replicas"]
                if replica["state"] == "RUNNING" and replica["pid"]
            ),
            key=lambda replica: replica.replica_id,
        )

    async def fleet(self) -> dict[str, list[dict[str, Any]]]:
        """What the Controller has heard; empty while it is away."""
        answer = await _quietly(lambda: _ask("Controller", "status"))
        return answer or {"targets": [], "drafts": []}

    async def stats(self, deployment: str) -> list[dict[str, Any]]:
        """Every replica's counters; a replica that does not answer is missing."""
        is_gateway = deployment == "Gateway"
        args = () if is_gateway else (True,)
        return await _quietly(lambda: _ask_all(deployment, "stats", *args)) or []

    async def take_lag_s(self) -> float:
        """How long a target's event loop stood still at worst since this was asked last."""
        lags = await _quietly(lambda: _ask_all("TargetReplica", "take_lag"))
        return max(lags or [0.0])

    async def order_proxy(self, **command: Any) -> dict[str, Any]:
        return await asyncio.to_thread(lambda: proxy_control.order(self.control, **command))

    # -- states to wait for -----------------------------------------------------------------

    async def wait_steady(self, timeout_s: float = STEADY_TIMEOUT_S) -> float:
        """Until every replica runs and every draft has a stream to every target; returns how
        long that took. Raises NotSteady."""
        return await wait_for(self._unsteady, timeout_s)

    async def wait_quiet(self, timeout_s: float) -> float:
        """Until nothing is left of any request: sequences, sessions, KV blocks, places."""
        return await wait_for(self.leftovers, timeout_s)

    async def _unsteady(self) -> str:
        wanted = await _quietly(_wanted_replicas) or dict.fromkeys(DEPLOYMENTS, 1)
        for deployment, number in wanted.items():
            running = await self.replicas(deployment)
            if len(running) != number:
                return f"{len(running)} of {number} {deployment} run"
        fleet = await self.fleet()
        if len(fleet["targets"]) != wanted["TargetReplica"]:
            return f"the Controller knows {len(fleet['targets'])} targets"
        if len(fleet["drafts"]) != wanted["DraftReplica"]:
            return f"the Controller knows {len(fleet['drafts'])} drafts"
        addresses = {target["address"] for target in fleet["targets"]}
        for draft in fleet["drafts"]:
            if set(draft["connected"]) != addresses:
                return f"draft {draft['replica_id']} is connected to {len(draft['connected'])}"
        return "" if await self._is_ready() else "GET /ready says no"

    async def _is_ready(self) -> bool:
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=ASK_TIMEOUT_S) as http:
                return (await http.get(f"{self.url}/ready")).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    async def leftovers(self) -> str:
        """What requests have left behind, in words; empty when nothing is."""
        left = []
        targets, drafts, gateways = [
            await self.stats(name) for name in ("TargetReplica", "DraftReplica", "Gateway")
        ]
        if not (targets and drafts and gateways):
            return "some replicas do not answer"
        left += [f"{t['replica_id']}: {key} {t[key]}" for t in targets for key in SIZES if t[key]]
        for draft in drafts:
            for key in ("num_sessions", "num_engine_blocks_used"):
                if draft[key]:
                    left.append(f"{draft['replica_id']}: {key} {draft[key]}")
        for gateway in gateways:
            if gateway["num_in_progress"]:
                left.append(f"gateway {gateway['pid']}: {gateway['num_in_progress']} places")
        return "; ".join(left)

    # -- signals ----------------------------------------------------------------------------

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
        """Whether the process was still there to be told."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True


async def wait_for(problem: Callable[[], Awaitable[str]], timeout_s: float) -> float:
    """Ask until there is no problem; returns the seconds. Raises NotSteady with the last one."""
    started_s = time.monotonic()
    while True:
        said = await problem()
        passed_s = time.monotonic() - started_s
        if not said:
            return passed_s
        if passed_s > timeout_s:
            raise NotSteady(f"after {passed_s:.0f} s: {said}")
        await asyncio.sleep(POLL_S)


async def _quietly(ask: Callable[[], Any]) -> Any:
    """None while whoever is asked is dead or hangs: chaos expects that."""
    try:
        return await asyncio.to_thread(ask)
    except ASK_ERRORS as error:
        logger.debug("no answer: %r", error)
        return None


def _ask(deployment: str, method: str, *args: Any) -> Any:
    from ray import serve

    handle = serve.get_deployment_handle(deployment, APP)
    return getattr(handle, method).remote(*args).result(timeout_s=ASK_TIMEOUT_S)


def _ask_all(deployment: str, method: str, *args: Any) -> list[Any]:
    from ray import serve

    handle = serve.get_deployment_handle(deployment, APP)
    return list(handle.broadcast(method, *args).results(timeout_s=ASK_TIMEOUT_S))


def _instance_details() -> dict[str, Any]:
    import ray
    from ray.serve.context import _get_global_client

    controller = _get_global_client()._controller
    details: dict[str, Any] = ray.get(
        controller.get_serve_instance_details.remote(), timeout=ASK_TIMEOUT_S
    )
    return details


def _wanted_replicas() -> dict[str, int]:
    deployments = _instance_details()["applications"][APP]["deployments"]
    return {name: deployments[name]["target_num_replicas"] for name in deployments}


def load_file(path: Path = HERE / "serve.yaml", **target: Any) -> ServeFile:
    """Our YAML, checked as `paceline serve` checks one. `target`: changed fields of the target."""
    from ray.serve.schema import ServeDeploySchema

    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    app = data["applications"][0]["args"]
    for key, value in target.items():
        where = app["target"] if key in app["target"] else app["target"]["model"]
        where[key] = value
    return ServeFile(path, ServeDeploySchema.model_validate(data), (AppConfig(**app),))


def _silence_ray() -> None:
    """Ray prints a paragraph about every worker that dies; here that is on purpose."""
    import ray

    ray._private.worker.print_to_stdstream = lambda *args, **kwargs: None


def _start(parts: ExitStack, file: ServeFile) -> str:
    """The service's URL. Ray gives a start up after a fixed 30 s, which a busy machine may take."""
    for _ in range(NUM_STARTS - 1):
        try:
            return parts.enter_context(_service(file))
        except Exception as error:
            if RAY_IS_SLOW not in str(error):
                raise
            logger.warning("Ray did not start in time, once more")
    return parts.enter_context(_service(file))


def _service(file: ServeFile) -> AbstractContextManager[str]:
    return local.local_service(file, HOST, local.free_port(HOST), lambda status: None)


@contextmanager
def running(file: ServeFile, seed: int) -> Iterator[Cluster]:
    """The service of `file` and the proxy between its drafts and targets."""
    root = str(HERE.parent)
    old = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{root}{os.pathsep}{old}" if old else root
    command = [sys.executable, "-m", "chaos.proxy", str(seed)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as proxy:
        try:
            assert proxy.stdout is not None
            control = f"{HOST}:{int(proxy.stdout.readline())}"
            os.environ[PROXY_ENV] = control
            with ExitStack() as parts:
                url = _start(parts, file)
                _silence_ray()
                yield Cluster(url, control, file.apps[0])
        finally:
            proxy.terminate()
