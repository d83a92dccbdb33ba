"""The rows of tests/unit/test_limits.py for metrics, reports and what shows them."""

from __future__ import annotations

_PAGE = "unit/gateway/test_metrics_page.py"
_SNAPSHOT = "unit/metrics/test_snapshot.py"

METRICS_CONSTANTS: dict[str, str] = {
    "fleet_reports:MAX_BREAKERS": "unit/test_fleet_reports.py::test_breakers_are_bounded",
    "fleet_reports:MAX_SENTENCE_CHARS": (
        "unit/test_fleet_reports.py::test_an_explanation_is_bounded"
    ),
    "target.fleet_reporter:CEILINGS_EXPIRE_S": (
        "unit/test_fleet_reporters.py::test_the_last_word_stays_but_its_ceilings_expire"
    ),
    "gateway.metrics:MAX_POSITION": "unit/gateway/test_metrics.py::test_positions_are_bounded",
    "gateway.metrics:MAX_CODES": "unit/gateway/test_metrics.py::test_codes_are_bounded",
    "gateway.metrics_page:METRICS_TIMEOUT_S": (
        f"{_PAGE}::test_a_controller_that_hangs_costs_its_part"
    ),
    "gateway.fleet:FLEET_TIMEOUT_S": (
        "unit/gateway/test_fleet.py::test_a_controller_that_is_gone_or_hangs_is_a_503"
    ),
    "metrics.snapshot:MAX_SERIES": f"{_SNAPSHOT}::test_series_are_bounded",
    "metrics.snapshot:MAX_LABEL_CHARS": f"{_SNAPSHOT}::test_nonsense_is_left_out",
    "metrics.snapshot:MAX_VALUE": f"{_SNAPSHOT}::test_nonsense_is_left_out",
    "metrics.target_catalog:MAX_POSITION": ("unit/target/test_stats.py::test_places_are_bounded"),
    "ray_metrics:EXPORT_INTERVAL_S": (
        "unit/metrics/test_ray_metrics.py::test_no_more_often_than_is_of_use"
    ),
}
