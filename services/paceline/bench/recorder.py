"""What one side of a benchmark brought: counts, samples, a timeline in seconds, a summary.

Told of each request as it happens (a `Watcher`). Its own time stands still between blocks, so a
side that runs in several blocks has one timeline without gaps. Knows no HTTP and no clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from paceline.bench.client import Outcome
from paceline.bench.events import Chunk
from paceline.bench.statistics import Samples, ratio

# Two days; whatever comes later is counted in the last second.
MAX_BINS = 2 * 86_400
# Error codes that are told apart; more are one.
MAX_ERROR_CODES = 64
OTHER_ERRORS = "other"
MS = 1000.0


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds that a good request meets, in milliseconds; None bounds nothing."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    @property
    def is_given(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None

    def met_by(self, outcome: Outcome) -> bool:
        ttft_s = None if self.ttft_ms is None else self.ttft_ms / MS
        return outcome.meets(ttft_s, None if self.itl_ms is None else self.itl_ms / MS)


@dataclass(slots=True)
class Bin:
    """One second. `running_s`: requests in flight, summed over the time they were."""

    tokens: int = 0
    finished: int = 0
    failed: int = 0
    running_s: float = 0.0
    rounds: int = 0
    sum_k: int = 0
    proposed: int = 0
    accepted: int = 0

    def row(self, second: int, length_s: float) -> dict[str, Any]:
        """`length_s`: how much of the second was measured; rates are over that."""
        return {
            "second": second,
            "tokens_per_s": ratio(self.tokens, length_s),
            "running": ratio(self.running_s, length_s),
            "num_speculative_tokens": ratio(self.sum_k, self.rounds),
            "acceptance_rate": ratio(self.accepted, self.proposed),
            "finished": self.finished,
            "failed": self.failed,
        }


class Recorder:
    """One side. Between `resume` and `pause` its time runs; requests begin and end within."""

    def __init__(self, slo: Slo | None = None, keep_outcomes: bool = True) -> None:
        self._slo = slo or Slo()
        self._bins: list[Bin] = []
        self._zero_s = self._last_s = 0.0
        self._samples = {
            name: Samples() for name in ("ttft", "itl", "itl_token", "tpot", "e2e", "start_lag")
        }
        self.tpot = self._samples["tpot"]
        self._keep_outcomes = keep_outcomes
        self.outcomes: list[Outcome] = []
        self.errors: Counter[str] = Counter()
        self.example_errors: dict[str, str] = {}
        self.categories: dict[str, Counter[str]] = {}
        self.totals: Counter[str] = Counter()
        self.elapsed_s = 0.0
        self.num_running = self.max_running = self.num_skipped = 0
        self.num_received_tokens = 0

    def resume(self, now_s: float) -> None:
        self._zero_s, self._last_s = now_s - self.elapsed_s, now_s

    def pause(self, now_s: float) -> None:
        self._advance(now_s)
        self.elapsed_s = now_s - self._zero_s

    # ------------------------------------------------------------------------------ Watcher

    def begin(self, now_s: float) -> None:
        self._advance(now_s)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)

    def chunk(self, chunk: Chunk, now_s: float) -> None:
        bin_ = self._bin(now_s)
        self.num_received_tokens += chunk.num_tokens
        bin_.tokens += chunk.num_tokens
        bin_.rounds += len(chunk.round_ks)
        bin_.sum_k += sum(chunk.round_ks)
        bin_.proposed += chunk.num_proposed
        bin_.accepted += chunk.num_accepted

    def end(self, outcome: Outcome) -> None:
        self._advance(outcome.end_s)
        self.num_running -= 1
        if self._keep_outcomes:
            self.outcomes.append(outcome)
        self._samples["start_lag"].add(outcome.sent_s - outcome.due_s)
        if outcome.error:
            self._bin(outcome.end_s).failed += 1
            self._fail(outcome)
            return
        self._bin(outcome.end_s).finished += 1
        counts = Counter(
            requests=1,
            tokens=outcome.num_tokens,
            prompt_tokens=outcome.num_prompt_tokens,
            rounds=outcome.num_rounds,
            proposed=outcome.num_proposed,
            accepted=outcome.num_accepted,
            rejections=outcome.num_rejections,
            good=int(self._slo.met_by(outcome)),
        )
        self.totals.update(counts)
        self.categories.setdefault(outcome.ask.category, Counter()).update(counts)
        self._sample(outcome)
        outcome.gaps.clear()  # they are in the samples now

    def skip(self) -> None:
        """A request of the open loop that was due when too many were in flight."""
        self.num_skipped += 1

    def _fail(self, outcome: Outcome) -> None:
        is_known = outcome.error in self.errors or len(self.errors) < MAX_ERROR_CODES
        code = outcome.error if is_known else OTHER_ERRORS
        self.errors[code] += 1
        self.example_errors.setdefault(code, outcome.message)
        outcome.gaps.clear()

    def _sample(self, outcome: Outcome) -> None:
        self._samples["e2e"].add(outcome.latency_s)
        if (ttft_s := outcome.ttft_s) is not None:
            self._samples["ttft"].add(ttft_s)
        if (tpot_s := outcome.tpot_s) is not None:
            self._samples["tpot"].add(tpot_s)
        for gap_s, num_tokens in outcome.gaps:
            self._samples["itl"].add(gap_s)
            self._samples["itl_token"].add(gap_s / num_tokens, num_tokens)

    # ----------------------------------------------------------------------------- timeline

    def _bin(self, now_s: float) -> Bin:
        second = min(MAX_BINS - 1, max(0, int(now_s - self._zero_s)))
        while len(self._bins) <= second:
            self._bins.append(Bin())
        return self._bins[second]

    def _advance(self, now_s: float) -> None:
        """Spread the time since the last change over the seconds in which it lies."""
        while self._last_s < now_s:
            second = int(self._last_s - self._zero_s)
            end_s = self._zero_s + second + 1
            # Rounding may put the end of a second a hair before its beginning.
            until_s = min(now_s, end_s) if end_s > self._last_s else now_s
            self._bin(self._last_s).running_s += self.num_running * (until_s - self._last_s)
            self._last_s = until_s

    def timeline(self) -> list[dict[str, Any]]:
        """A row for each second, the last one as long as it was measured."""
        last = len(self._bins) - 1
        return [
            item.row(second, 1.0 if second < last else max(self.elapsed_s - last, 1e-9))
            for second, item in enumerate(self._bins)
        ]

    # ------------------------------------------------------------------------------ summary

    def summary(self) -> dict[str, Any]:
        """Rates are over the time that was measured, the tail of the last requests included."""
        totals = self.totals
        return {
            "num_requests": totals["requests"] + self.errors.total(),
            "num_ok": totals["requests"],
            "num_failed": self.errors.total(),
            "errors": dict(self.errors.most_common()),
            "example_errors": self.example_errors,
            "num_skipped": self.num_skipped,
            "duration_s": round(self.elapsed_s, 4),
            "max_running": self.max_running,
            "prompt_tokens": totals["prompt_tokens"],
            "output_tokens": totals["tokens"],
            "tokens_per_s": ratio(totals["tokens"], self.elapsed_s),
            "requests_per_s": ratio(totals["requests"], self.elapsed_s),
            **{f"{name}_ms": samples.summary(MS) for name, samples in self._samples.items()},
            "speculation": self._speculation(totals),
            "categories": {
                name: {"num_ok": counts["requests"], "output_tokens": counts["tokens"]}
                | self._speculation(counts)
                for name, counts in sorted(self.categories.items())
            },
            "goodput": self._goodput(),
        }

    def quantiles(self) -> dict[str, list[float]]:
        """Percentiles 0 to 100 in milliseconds: the CDFs."""
        return {f"{name}_ms": self._samples[name].quantiles(MS) for name in ("ttft", "itl", "e2e")}

    @staticmethod
    def _speculation(counts: Counter[str]) -> dict[str, Any]:
        """`token_acceptance_rate`: how often a draft token is accepted whose predecessors in the
        window were: of the draft alone, whatever K and however full the windows. A window shows
        its accepted tokens and at most one rejection; null where the service shows no rounds."""
        num_tried = counts["accepted"] + counts["rejections"]
        has_rounds = counts["rejections"] > 0 or counts["accepted"] == counts["proposed"]
        return {
            "rounds": counts["rounds"],
            "proposed": counts["proposed"],
            "accepted": counts["accepted"],
            "acceptance_rate": ratio(counts["accepted"], counts["proposed"]),
            "token_acceptance_rate": ratio(counts["accepted"], num_tried) if has_rounds else None,
            "mean_acceptance_length": (
                ratio(counts["rounds"] + counts["accepted"], counts["rounds"])
            ),
        }

    def _goodput(self) -> dict[str, Any] | None:
        if not self._slo.is_given:
            return None
        num_requests = self.totals["requests"] + self.errors.total() + self.num_skipped
        return {
            "slo_ttft_ms": self._slo.ttft_ms,
            "slo_itl_ms": self._slo.itl_ms,
            "requests_per_s": ratio(self.totals["good"], self.elapsed_s),
            "share": ratio(self.totals["good"], num_requests),
        }
