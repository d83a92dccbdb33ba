"""What alerts fire on, by Prometheus' own judgment (`promtool test rules`)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.dashboards.files import RULES_PATH, generated

BREAKER = 'paceline_draft_breaker_state{model_name="m",replica="t",draft="d",state="dark"}'
SPECULATION = 'paceline_speculation_state{model_name="m",replica="t",state="open"}'
PASSES = 'paceline_target_passes_total{model_name="m",replica="t"}'
OTHER_PASSES = 'paceline_target_passes_total{model_name="m",replica="other"}'


def firing(folder: Path, alert: str, series: dict[str, str]) -> bool:
    """Whether the alert fires after 30 minutes of such series, a sample a minute."""
    (folder / "rules.yaml").write_text(generated()[RULES_PATH], encoding="utf-8")
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": s, "values": v} for s, v in series.items()],
                "alert_rule_test": [{"eval_time": "30m", "alertname": alert, "exp_alerts": []}],
            }
        ],
    }
    (folder / "test.yaml").write_text(json.dumps(test), encoding="utf-8")
    command = ["promtool", "test", "rules", "test.yaml"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0 or f'alertname="{alert}"' in output, output
    return done.returncode != 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's prometheus has it")
@pytest.mark.parametrize(
    ("alert", "state"),
    [("PacelineDraftBreakerOpen", BREAKER), ("PacelineSpeculationRests", SPECULATION)],
)
class TestWhatOnlyWorkCanChange:
    """A target looks at these states when it has something to do, and not before."""

    def test_fires_while_the_target_works(self, tmp_path: Path, alert: str, state: str) -> None:
        assert firing(tmp_path, alert, {state: "1x40", PASSES: "0+60x40"})

    def test_not_while_it_is_idle(self, tmp_path: Path, alert: str, state: str) -> None:
        series = {state: "1x40", PASSES: "60x40", OTHER_PASSES: "0+60x40"}
        assert not firing(tmp_path, alert, series)

    def test_not_while_all_is_well(self, tmp_path: Path, alert: str, state: str) -> None:
        assert not firing(tmp_path, alert, {state: "0x40", PASSES: "0+60x40"})
