"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.methods import SpeculationMethod

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_ENV = "PACELINE_API_KEY"

Method = Annotated[
    SpeculationMethod | None,
    typer.Option(help="Where proposals come from; default: as the service is configured."),
]
Url = Annotated[str, typer.Option(help="The service, as in http://127.0.0.1:8000.")]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar=KEY_ENV,
        show_default=False,
        help="For a service with keys. Others on this machine see options, not variables.",
    ),
]
