"""A real gateway in this process, behind a real socket: toy target, toy draft, real controller.

Only Ray is missing. `serving` gives its URL.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from paceline.config import (
    ApiKeyConfig,
    ControllerConfig,
    GatewayConfig,
    ModelConfig,
    Offer,
    SpeculationConfig,
)
from paceline.controller.fleet import Fleet
from paceline.engine.loader import load_engine
from paceline.fleet_reports import DraftReport, TargetReport
from paceline.gateway.api import build_api
from paceline.gateway.fleet import FleetView, add_fleet_route
from paceline.gateway.service import GatewayService, ServedModel
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.protocol.lookahead import AcceptanceClass, ClassCounts
from paceline.sampling.params import VerificationMode
from paceline.testing.loopback import Loopback
from tests.fuzz.http import LoopbackTargets

MAX_MODEL_LEN = 512
KEY = "sk-paceline-test"
NOW_S = 1_700_000_000
DEFAULT_OFFER = Offer()


class ToyTargets(LoopbackTargets):
    """With room for a conversation."""

    def __init__(self) -> None:
        model = ModelConfig(max_model_len=MAX_MODEL_LEN, num_kv_blocks=256)
        draft = model.model_copy(update={"toy_error_rate": 0.2})
        self.engine = load_engine(model)
        self.loopback = Loopback(self.engine, load_engine(draft), SpeculationConfig())
        self._streams = {}


class ControllerClient:
    """The controller's answer as it comes over Ray: plain data. None: it is gone."""

    def __init__(self, told: dict[str, Any] | None) -> None:
        self.told = told

    async def status(self) -> dict[str, Any] | None:
        return self.told


def two_targets_two_drafts(**figures: Any) -> dict[str, Any]:
    """What a real controller says of them; `figures` are the first target's."""
    fleet = Fleet(ControllerConfig())
    kind = AcceptanceClass("smol", VerificationMode.COUPLED, 0.75)
    counts = {kind: ClassCounts((100.0, 60.0), (60.0, 40.0))}
    first: dict[str, Any] = {
        "num_running": 4, "num_waiting": 1, "num_speculative_tokens": 4.0, "batch": 3.5,
        "pass_ms": 25.5, "class_counts": counts, **figures,
    }  # fmt: skip
    reports = (
        TargetReport("paceline#TargetReplica#aaaa1111", "b", "127.0.0.1:52000", 1, **first),
        TargetReport("paceline#TargetReplica#bbbb2222", "b", "127.0.0.1:52001", 2, num_running=2),
    )
    drafts = [
        DraftReport(f"paceline#DraftReplica#{name}", "b", 3, 128, num, (address,),
                    busy_share=0.655, step_ms=3.0, batch=3.9)
        for name, num, address in
        (("cccc3333", 4, "127.0.0.1:52000"), ("dddd4444", 2, "127.0.0.1:52001"))
    ]  # fmt: skip
    for now_s in (0.0, 1.0):
        for report in reports:
            fleet.hear_target(report, now_s)
        for draft in drafts:
            fleet.hear_draft(draft, now_s)
    told: dict[str, Any] = json.loads(json.dumps(fleet.status()))
    return told


def two_models() -> dict[str, Any]:
    """What each model's controller says."""
    first, second = two_targets_two_drafts(), two_targets_two_drafts()
    second["targets"], second["drafts"] = second["targets"][:1], []
    return {"toy": first, "big": second}


def gateway(
    told: dict[str, Any] | None,
    more: Mapping[str, dict[str, Any] | None] | None = None,
    *,
    has_keys: bool = False,
    offer: Offer = DEFAULT_OFFER,
) -> FastAPI:
    """`told` is what the toy model's controller says, `more` what those of others would say."""
    sha256 = hashlib.sha256(KEY.encode()).hexdigest()
    keys = (ApiKeyConfig(name="test", sha256=sha256),) if has_keys else ()
    numbers = iter(range(1 << 60))
    service = GatewayService(
        GatewayConfig(api_keys=keys),
        [ServedModel("toy", ToyTokenizer(), ToyTargets(), MAX_MODEL_LEN, offer=offer)],
        clock=lambda: NOW_S,
        random_hex=lambda: f"{next(numbers):x}",
        random_seed=lambda: 7,
    )
    app = build_api(service)
    controllers = {"toy": told, **(more or {})}
    clients = {name: ControllerClient(said) for name, said in controllers.items()}
    add_fleet_route(app, FleetView(clients))
    return app


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The socket listens before the server runs: a client that comes early waits in its queue."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
