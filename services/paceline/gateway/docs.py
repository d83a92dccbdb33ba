"""GET /openapi.json and the page at /docs that shows it: Swagger UI from files of our own.

The page asks nobody else for anything, so it works without the Internet, and its policy forbids
the browser to. Knows no route but its own.
"""

# No `from __future__ import annotations` here: FastAPI reads the routes' annotations as classes.

from collections.abc import Mapping
from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from paceline.gateway.openapi import openapi_document

# The package keeps Swagger UI's current build; nothing else of it is used.
_ASSETS = files("fastapi_offline") / "static"
_SCRIPT_PATH, _STYLE_PATH = "/static/docs/swagger-ui.js", "/static/docs/swagger-ui.css"
_BEGIN_PATH = "/static/docs/begin.js"
# Swagger UI sets styles on its elements and draws its icons from data: addresses.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HTML_HEADERS: Mapping[str, str] = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_ASSET_HEADERS = {"cache-control": "public, max-age=3600", "x-content-type-options": "nosniff"}

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Paceline API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="static/docs/swagger-ui.css">
<style>body { margin: 0 }</style>
</head>
<body>
<main id="docs"><noscript>This page needs JavaScript; the same is in
<a href="openapi.json">openapi.json</a>.</noscript></main>
<script src="static/docs/swagger-ui.js"></script>
<script src="static/docs/begin.js"></script>
</body>
</html>
"""
_BEGIN = """"use strict";
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  validatorUrl: null,
  defaultModelsExpandDepth: 0,
});
"""


def add_docs_routes(app: FastAPI) -> None:
    """The document has the routes that the app has when it is first asked for."""
    document: list[JSONResponse] = []

    @app.api_route("/openapi.json", methods=["GET", "HEAD"])
    async def openapi() -> Response:
        if not document:
            document.append(JSONResponse(openapi_document(app)))
        return document[0]

    @app.api_route("/docs", methods=["GET", "HEAD"])
    async def docs() -> Response:
        return Response(PAGE, media_type="text/html", headers=dict(HTML_HEADERS))

    assets = {
        _SCRIPT_PATH: ("text/javascript", (_ASSETS / "swagger-ui-bundle.js").read_bytes()),
        _STYLE_PATH: ("text/css", (_ASSETS / "swagger-ui.css").read_bytes()),
        _BEGIN_PATH: ("text/javascript", _BEGIN.encode()),
    }
    for path, (media_type, content) in assets.items():
        _add_asset(app, path, Response(content, media_type=media_type, headers=_ASSET_HEADERS))


def _add_asset(app: FastAPI, path: str, response: Response) -> None:
    @app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)
    async def asset() -> Response:
        return response
