"""The routes. Thin: everything that decides is in the service, the plan or the exchange."""

# No `from __future__ import annotations` here: FastAPI reads the routes' annotations as classes.

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from paceline.errors import RequestError
from paceline.gateway.auth import AuthMiddleware, Keyring
from paceline.gateway.exchange import Exchange
from paceline.gateway.http import EdgeMiddleware, error_response, http_exception_response
from paceline.gateway.plan import Endpoint
from paceline.gateway.responses import Json, model_body
from paceline.gateway.service import GatewayService


def build_api(
    service: GatewayService,
    adds_request_id: bool = True,
    monotonic: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """An ASGI app over one service; serves no schema pages. `adds_request_id` is False where the
    server around it already answers with an x-request-id."""
    config = service.config
    keyring = Keyring(config.api_keys, config.isolates_prefix_cache, monotonic)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.drain()

    app = FastAPI(
        title="Paceline",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    # The last one added is the outermost.
    app.add_middleware(AuthMiddleware, keyring=keyring)
    app.add_middleware(
        EdgeMiddleware,
        adds_request_id=adds_request_id,
        max_header_bytes=config.max_header_bytes,
        write_timeout_s=config.write_timeout_s,
    )
    app.add_exception_handler(HTTPException, http_exception_response)
    _add_generation_routes(app, service)
    _add_model_routes(app, service)
    _add_probe_routes(app, service)
    return app


def _add_generation_routes(app: FastAPI, service: GatewayService) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return Exchange(service, Endpoint.COMPLETIONS, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return Exchange(service, Endpoint.CHAT, request)


def _add_model_routes(app: FastAPI, service: GatewayService) -> None:
    bodies = {
        name: model_body(name, service.started_s, model.max_model_len)
        for name, model in service.models.items()
    }

    @app.get("/v1/models")
    async def list_models() -> Json:
        return {"object": "list", "data": list(bodies.values())}

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> Json:
        return bodies[service.served(model_id).name]


def _add_probe_routes(app: FastAPI, service: GatewayService) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Json:
        """This process is alive; says nothing about targets."""
        return {"status": "ok"}

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> JSONResponse:
        """200 only when a request would be answered."""
        try:
            await service.check_ready()
        except RequestError as error:
            return error_response(error)
        return JSONResponse({"status": "ready"})
