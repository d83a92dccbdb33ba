"""The routes. Thin: everything that decides is in the service, the plan or the exchange."""

# No `from __future__ import annotations` here: FastAPI reads the routes' annotations as classes.

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Scope

import paceline
from paceline.config import GatewayConfig
from paceline.errors import RequestError
from paceline.gateway.auth import AuthMiddleware, Keyring, route_path
from paceline.gateway.docs import add_docs_routes
from paceline.gateway.exchange import Exchange
from paceline.gateway.http import EdgeMiddleware, error_response, http_exception_response
from paceline.gateway.metrics import CONTENT_TYPE, OTHER
from paceline.gateway.metrics_page import MetricsPage
from paceline.gateway.plan import Endpoint
from paceline.gateway.playground import add_playground_routes
from paceline.gateway.request_log import log_of
from paceline.gateway.responses import Json, model_body
from paceline.gateway.service import GatewayService
from paceline.gateway.tokenization import add_tokenization_routes
from paceline.gateway.trace import TRACE_ID_HEADER

METRICS_PATH = "/metrics"
# A browser may keep a preflight's answer so long.
CORS_MAX_AGE_S = 600


def build_api(
    service: GatewayService,
    adds_request_id: bool = True,
    monotonic: Callable[[], float] = time.monotonic,
    metrics_page: MetricsPage | None = None,
) -> FastAPI:
    """An ASGI app over one service. `adds_request_id` is False where the server around it already
    answers with an x-request-id. `metrics_page` None: without the fleet's figures."""
    config = service.config
    keyring = Keyring(config.api_keys, config.isolates_prefix_cache, monotonic)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.drain()

    app = FastAPI(
        title="Paceline",
        version=paceline.__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    # The last one added is the outermost.
    more_public = (METRICS_PATH,) if config.public_metrics else ()
    app.add_middleware(AuthMiddleware, keyring=keyring, more_public=more_public)
    app.add_middleware(
        EdgeMiddleware,
        adds_request_id=adds_request_id,
        max_header_bytes=config.max_header_bytes,
        write_timeout_s=config.write_timeout_s,
        clock=service.monotonic,
        on_end=AnswerRecorder(app, service),
    )
    _add_cors(app, config)
    app.add_exception_handler(HTTPException, http_exception_response)
    _add_generation_routes(app, service)
    add_tokenization_routes(app, service)
    _add_model_routes(app, service)
    _add_probe_routes(app, service)
    _add_metrics_route(app, metrics_page or MetricsPage(service.metrics))
    add_docs_routes(app)
    if config.playground:
        add_playground_routes(app)
    return app


def _add_cors(app: FastAPI, config: GatewayConfig) -> None:
    """Outside the edge, so that errors can be read by those pages too. Keys travel in a header
    that the page itself sets: cookies are neither needed nor allowed."""
    if config.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", TRACE_ID_HEADER.decode(), "retry-after"],
            max_age=CORS_MAX_AGE_S,
        )


class AnswerRecorder:
    """Counts and logs every answer by its route; the routes are those at the first one."""

    def __init__(self, app: FastAPI, service: GatewayService) -> None:
        self._app = app
        self._metrics = service.metrics
        self._monotonic = service.monotonic
        self._exact: frozenset[str] | None = None
        self._by_prefix: tuple[tuple[str, str], ...] = ()

    def __call__(self, scope: Scope, status: int, error: RequestError | None) -> None:
        route = self._label(route_path(scope))
        log_of(scope).write(scope["method"], route, status, self._monotonic())
        self._metrics.answer(route, status)
        if error is not None:
            self._metrics.refusal(error.code, error.limit)

    def _label(self, path: str) -> str:
        if self._exact is None:
            paths = [str(getattr(route, "path", "")) for route in self._app.routes]
            self._exact = frozenset(path for path in paths if "{" not in path)
            self._by_prefix = tuple((path.split("{")[0], path) for path in paths if "{" in path)
        if path in self._exact:
            return path
        for prefix, label in self._by_prefix:
            if path.startswith(prefix):
                return label.replace(":path}", "}")
        return OTHER


def _add_generation_routes(app: FastAPI, service: GatewayService) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return Exchange(service, Endpoint.COMPLETIONS, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return Exchange(service, Endpoint.CHAT, request)


def _add_model_routes(app: FastAPI, service: GatewayService) -> None:
    bodies = {name: model_body(model, service.started_s) for name, model in service.models.items()}

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

    @app.api_route("/version", methods=["GET", "HEAD"])
    async def version() -> Json:
        return {"version": paceline.__version__}


def _add_metrics_route(app: FastAPI, page: MetricsPage) -> None:
    @app.get(METRICS_PATH)
    async def metrics() -> Response:
        return Response(await page.render(), media_type=CONTENT_TYPE)
