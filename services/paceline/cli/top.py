"""`paceline top`: a running service, looked at again and again. The frame is `top_view`'s."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import DEFAULT_URL, ApiKey, Url
from paceline.errors import PacelineError

if TYPE_CHECKING:
    import httpx
    from rich.console import Group

    from paceline.cli.top_data import Look, Rates

TIMEOUT_S = 5.0
MAX_METRICS_BYTES = 8 << 20

Interval = Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")]
Once = Annotated[bool, typer.Option("--once", help="One frame, then the end.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per look, one a line.")]


def top(
    url: Url = DEFAULT_URL,
    interval: Interval = 1.0,
    once: Once = False,
    as_json: AsJson = False,
    api_key: ApiKey = "",
) -> None:
    """Watch a running service: targets, drafts, K, acceptance, tokens/s. q ends it.

    \b
    Examples:
      paceline top
      paceline top --once --url http://10.0.0.5:8000
      paceline top --json --interval 10 >> fleet.jsonl
    """
    from paceline.cli.demo import client

    with client(url, api_key, TIMEOUT_S) as http:
        watch = Watch(http, url, interval, as_json)
        try:
            if once:
                watch.once()
            else:
                watch.forever()
        except KeyboardInterrupt:
            return  # that is how it ends


class Watch:
    """Looks at a service and shows what it sees. `clock` and `sleep` are seconds."""

    def __init__(
        self,
        http: httpx.Client,
        url: str,
        interval_s: float,
        as_json: bool,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        from paceline.cli.top_data import History

        self._http = http
        self._url = url
        self._interval_s = interval_s
        self._as_json = as_json
        self._clock = clock
        self._sleep = sleep
        self.history = History()

    def once(self) -> None:
        """Rates need two looks. Raises PacelineError when nobody answers."""
        look = self._look()
        if look.fleet is None and look.counters is None:
            raise PacelineError(look.problem)
        self.history.receive(look)
        self._sleep(self._interval_s)
        self._print(self._look())

    def forever(self) -> None:
        """In place on a terminal, until q is pressed; one frame below the other elsewhere."""
        from rich.live import Live

        from paceline.cli.console import out
        from paceline.cli.top_keys import quit_key

        if self._as_json or not out.is_terminal:
            while True:
                self._print(self._look())
                self._sleep(self._interval_s)
        live = Live(console=out, screen=True, auto_refresh=False)
        with live, quit_key(self._sleep) as is_over_after:
            while True:
                look = self._look()
                live.update(self._frame(look, self.history.receive(look)), refresh=True)
                if is_over_after(self._interval_s):
                    return

    def _print(self, look: Look) -> None:
        from paceline.cli.console import out
        from paceline.cli.top_data import look_json
        from paceline.cli.values import json_line

        rates = self.history.receive(look)
        if self._as_json:
            out.print(json_line(look_json(look, rates, self._url)), markup=False)
            return
        out.print(self._frame(look, rates), soft_wrap=False)
        out.print()

    def _frame(self, look: Look, rates: Rates) -> Group:
        from paceline.cli.console import out
        from paceline.cli.top_view import frame

        return frame(look, rates, self.history, self._url, out.width)

    def _look(self) -> Look:
        """Never raises: a service that is away is a sentence."""
        from paceline.cli.explain import get_fleet
        from paceline.cli.top_data import Look

        fleet, problem = None, ""
        try:
            fleet = get_fleet(self._http, self._url)
        except PacelineError as error:
            problem = f"{error}; trying again every {self._interval_s:g} s"
        return Look(self._clock(), fleet, self._counters(), problem)

    def _counters(self) -> dict[str, float] | None:
        """None without /metrics: then there are no rates."""
        import httpx

        from paceline.cli.top_data import read_counters

        try:
            response = self._http.get("/metrics")
        except (httpx.HTTPError, httpx.InvalidURL):
            return None
        if response.status_code != httpx.codes.OK or len(response.content) > MAX_METRICS_BYTES:
            return None
        return read_counters(response.text)
