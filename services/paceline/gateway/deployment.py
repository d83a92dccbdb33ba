"""client -> Gateway (this ingress) -> TargetReplica: the Serve deployment around the service.

Wires and starts; decides nothing.
"""

# No `from __future__ import annotations` here: Serve looks at constructor annotations as classes.

import logging
import secrets
import time
import uuid
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from paceline import models
from paceline.config import GatewayConfig
from paceline.gateway.api import build_api
from paceline.gateway.fleet import FleetView, add_fleet_route
from paceline.gateway.responses import Json
from paceline.gateway.service import GatewayService, ServedModel
from paceline.gateway.target_client import ServeTargetClient
from paceline.gateway.tokenizer import load_tokenizer
from paceline.gateway.tools import ToolFormat

logger = logging.getLogger(__name__)


@serve.ingress()
class Gateway:
    """OpenAI's HTTP API over the targets of one application.

    `model_source` is what the configuration names as the target's model. The controller is asked
    for GET /fleet only. `bound` are handles of deployments that the gateway never calls: binding
    them here is what makes Serve deploy them.
    """

    def __init__(
        self,
        config: GatewayConfig,
        model_source: str,
        max_model_len: int,
        target_handle: Any,
        controller_handle: Any,
        *bound: Any,
    ) -> None:
        self._bound = bound
        self._fleet = FleetView(ServeFleetClient(controller_handle))
        is_builtin = model_source in models.BUILTIN_SOURCES
        source = model_source if is_builtin else str(models.resolve(model_source))
        named = config.tool_call_format
        tool_format = None if named == "auto" else ToolFormat(named)
        self._service = GatewayService(
            config,
            [
                ServedModel(
                    config.served_model_name,
                    load_tokenizer(source, config.chat_template, tool_format),
                    ServeTargetClient(target_handle),
                    max_model_len,
                )
            ],
            clock=time.time,
            random_hex=lambda: uuid.uuid4().hex,
            random_seed=lambda: secrets.randbits(64),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve's own HTTP server puts x-request-id on every answer.
        app = build_api(self._service, adds_request_id=False)
        add_fleet_route(app, self._fleet)
        return app


class ServeFleetClient:
    """A `FleetClient` over `handle.status`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def status(self) -> Json | None:
        try:
            answer: Json = await self._handle.status.remote()
        except (RayError, RayServeException) as error:
            logger.info("no answer from the controller: %s", type(error).__name__)
            return None
        return answer
