"""The page at `/`: a chat whose tokens show where they came from, with the draft and without.

Plain files that ask for nothing but this API. They are the same wherever Paceline runs, so nobody
needs a key for them; the page asks for one when the API does. Knows no request and no service.
"""

# No `from __future__ import annotations` here: FastAPI reads the routes' annotations as classes.

import hashlib
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response

FOLDER = Path(__file__).with_name("static")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# The page itself, and the files that it names, by the path at which they are served.
PAGES = {
    "/": ("playground.html", "text/html"),
    "/static/playground.css": ("playground.css", "text/css"),
    "/static/playground.js": ("playground.js", "text/javascript"),
    "/static/form.js": ("form.js", "text/javascript"),
    "/static/rounds.js": ("rounds.js", "text/javascript"),
    "/static/stream.js": ("stream.js", "text/javascript"),
    "/static/view.js": ("view.js", "text/javascript"),
}


def add_playground_routes(app: FastAPI) -> None:
    """Each file is read once; only these paths exist."""
    for path, (name, media_type) in PAGES.items():
        _add_page(app, path, (FOLDER / name).read_bytes(), media_type)


def _add_page(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "etag": etag,
    }

    @app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        if _is_known(etag, request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)


def _is_known(etag: str, known: str) -> bool:
    """Whether the client's copy is this one; a proxy that compresses makes its tag a weak one."""
    tags = [tag.strip().removeprefix("W/") for tag in known.split(",")]
    return etag in tags or "*" in tags
