"""client -> Gateway (this ingress) -> TargetReplica: the Serve deployment around the service.

Wires and starts; decides nothing.
"""

# No `from __future__ import annotations` here: Serve looks at constructor annotations as classes.

import secrets
import time
import uuid
from typing import Any

from fastapi import FastAPI
from ray import serve

from paceline import models
from paceline.config import GatewayConfig
from paceline.gateway.api import build_api
from paceline.gateway.service import GatewayService
from paceline.gateway.target_client import ServeTargetClient
from paceline.gateway.tokenizer import load_tokenizer


@serve.ingress()
class Gateway:
    """OpenAI's HTTP API over the targets of one application.

    `model_source` is what the configuration names as the target's model. `bound` are handles of
    deployments that the gateway never calls: binding them here is what makes Serve deploy them.
    """

    def __init__(
        self,
        config: GatewayConfig,
        model_source: str,
        max_model_len: int,
        target_handle: Any,
        *bound: Any,
    ) -> None:
        self._bound = bound
        is_builtin = model_source in models.BUILTIN_SOURCES
        source = model_source if is_builtin else str(models.resolve(model_source))
        self._service = GatewayService(
            config,
            load_tokenizer(source),
            ServeTargetClient(target_handle),
            max_model_len,
            clock=time.time,
            random_hex=lambda: uuid.uuid4().hex,
            random_seed=lambda: secrets.randbits(64),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve's own HTTP server puts x-request-id on every answer.
        return build_api(self._service, adds_request_id=False)
