"""`paceline dashboards`: Grafana's dashboards and Prometheus' rules as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option(help="Folder for grafana/ and prometheus/; made if missing.")]


def dashboards(out: Out = Path("deploy")) -> None:
    """Write the Grafana dashboards and Prometheus rules that go with this release's metrics.

    \b
    Examples:
      paceline dashboards
      paceline dashboards --out /etc/paceline
    """
    from paceline.cli.console import out as console
    from paceline.dashboards.files import generated
    from paceline.errors import PacelineError

    for name, text in generated().items():
        path = out / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise PacelineError(f"cannot write {path}: {error.strerror}") from error
        console.print(str(path), markup=False)
