"""The catalog's metrics in Ray's own metrics endpoint, as `ray_paceline_...`.

Every process that counts exports its snapshot now and then; Ray's agent of its node serves it. Ray
takes histograms one observation at a time only, so theirs go out as Prometheus spells them: series
`_bucket` (by `le`), `_sum` and `_count`, which `histogram_quantile` and `rate` read like any
others. A gauge that is not set again is forgotten by Ray after a while, which suits one whose draft
is gone. Knows no clock and decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from paceline.metrics.exposition import samples_of
from paceline.metrics.metric import BASE_LABELS, Kind, Metric
from paceline.metrics.snapshot import Snapshot

# Ray's agent is asked about every 10 s: more often would be of no use.
EXPORT_INTERVAL_S = 2.0
LOG_INTERVAL_S = 60.0
Series = tuple[tuple[str, str], ...]

logger = logging.getLogger(__name__)


class RayExporter:
    """`base`: the values of the role's own labels."""

    def __init__(self, base: Mapping[str, str]) -> None:
        self._base = dict(base)
        self._instruments: dict[str, Any] = {}
        # Of counters: Ray adds, our figures are sums.
        self._last: dict[tuple[str, Series], float] = {}
        self._exported_s = self._logged_s = float("-inf")

    def offer(self, take: Callable[[], Snapshot], now_s: float) -> None:
        """Export what `take` returns, unless that was done less than EXPORT_INTERVAL_S ago. Never
        raises: figures must not end what they are about. The next try may do better."""
        if now_s - self._exported_s < EXPORT_INTERVAL_S:
            return
        self._exported_s = now_s
        try:
            self.export(take())
        except Exception:
            if now_s - self._logged_s >= LOG_INTERVAL_S:
                self._logged_s = now_s
                logger.exception("Ray did not take the metrics")

    def export(self, snapshot: Snapshot) -> None:
        for metric, labels, value in snapshot:
            pairs = tuple(zip(metric.labels, labels, strict=True))
            for name, extra, number in samples_of(metric, value):
                self._record(metric, name, pairs + extra, number)

    @asynccontextmanager
    async def running(self, take: Callable[[], Snapshot]) -> AsyncIterator[None]:
        """Exports what `take` returns every EXPORT_INTERVAL_S, until the block is left."""
        task = asyncio.create_task(self._run(take), name="paceline-ray-metrics")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self, take: Callable[[], Snapshot]) -> None:
        while True:
            try:
                self.export(take())
            except Exception:
                # Figures must not end what they are about; the next try may do better.
                logger.exception("Ray did not take the metrics")
            await asyncio.sleep(EXPORT_INTERVAL_S)

    def _record(self, metric: Metric, name: str, series: Series, number: float) -> None:
        instrument = self._instrument(metric, name, series)
        tags = self._base | dict(series)
        if metric.kind is not Kind.COUNTER:
            instrument.set(number, tags)
            return
        before = self._last.get((name, series), 0.0)
        if number > before:
            instrument.inc(number - before, tags)
            self._last[name, series] = number

    def _instrument(self, metric: Metric, name: str, series: Series) -> Any:
        if name not in self._instruments:
            from ray.util.metrics import Counter, Gauge

            kind = Counter if metric.kind is Kind.COUNTER else Gauge
            keys = (*BASE_LABELS[metric.role], *(key for key, _ in series))
            self._instruments[name] = kind(name, metric.help_text, keys)
        return self._instruments[name]
