"""`paceline explain`: asks a running gateway what its targets decide and why. Rendering is
`explain_view`'s."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import out
from paceline.cli.options import DEFAULT_URL, ApiKey, Url
from paceline.cli.values import Json
from paceline.errors import PacelineError

if TYPE_CHECKING:
    import httpx

AsJson = Annotated[bool, typer.Option("--json", help="The gateway's answer as it is.")]


def explain(url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Say why each target of a running service drafts as far as it does."""
    from paceline.cli.explain_view import show_fleet

    fleet = fetch_fleet(url, api_key)
    if as_json:
        out.print(json.dumps(fleet, indent=2), markup=False)
    else:
        show_fleet(out, fleet)


def fetch_fleet(url: str, api_key: str) -> Json:
    """What GET /fleet says. Raises PacelineError with a sentence for anything else."""
    from paceline.cli.demo import client

    with client(url, api_key) as http:
        return get_fleet(http, url)


def get_fleet(http: httpx.Client, url: str) -> Json:
    """`fetch_fleet` over a connection that is there already."""
    import httpx

    try:
        response = http.get("/fleet")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PacelineError(f"no answer from {url}: {error}") from error
    try:
        data = response.json()
    except ValueError as error:
        said = f"{url}/fleet answered {response.status_code} without JSON"
        raise PacelineError(f"{said}: no Paceline gateway?") from error
    if response.status_code == httpx.codes.NOT_FOUND:
        raise PacelineError(f"{url} has no /fleet: no Paceline gateway, or one of an older release")
    if response.status_code != httpx.codes.OK:
        raise PacelineError(_said(data) or f"{url}/fleet answered {response.status_code}")
    if not isinstance(data, dict) or not isinstance(data.get("targets"), list):
        raise PacelineError(f"{url}/fleet does not say what targets there are")
    return data


def _said(data: Any) -> str:
    """The sentence of an error in OpenAI's shape, if that is what it is."""
    error = data.get("error") if isinstance(data, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else ""
