"""The audit in a whole service: planted bugs are caught, a right service raises nothing."""

from __future__ import annotations

import logging

import pytest

from tests.rpc.audit_world import (
    INFO,
    DraftNoise,
    NearDraft,
    OffByOne,
    Rounding,
    SharedNoise,
    drivers,
    lockstep,
)

NUM_REQUESTS = 200
# Of a right service; more of them say the same for longer.
NUM_RIGHT = 40
TEMPERATURES = {"greedy": 0.0, "coupled": 1.0, "rejection": 1.0, "block": 1.0}
MODES = list(TEMPERATURES)


def deployed(mode: str) -> str:
    return "coupled" if mode == "greedy" else mode


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("mode", MODES)
async def test_a_right_service_raises_nothing(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    audited = lockstep(mode=deployed(mode))
    for _ in range(NUM_RIGHT):
        await audited.ask(temperature=TEMPERATURES[mode])
        await audited.audited()
    assert not audited.has_alarm
    assert (audited.counts.num_requests, audited.counts.num_ties) == (NUM_RIGHT, 0)
    assert audited.counts.num_tokens > 20 * NUM_RIGHT
    assert audited.num_accepted > 5 * NUM_RIGHT
    assert errors(caplog) == []


@pytest.mark.parametrize("mode", MODES)
async def test_verification_off_by_one_is_caught(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    audited = lockstep(target=OffByOne(INFO), mode=deployed(mode))
    await audited.until_alarm(NUM_REQUESTS, temperature=TEMPERATURES[mode])
    assert len(errors(caplog)) == 1


@pytest.mark.parametrize("power", [0.0, 0.5, 2.0], ids=["alike", "flatter", "sharper"])
@pytest.mark.parametrize("mode", ["rejection", "block"])
async def test_draft_noise_that_is_not_its_law_is_caught(
    mode: str, power: float, caplog: pytest.LogCaptureFixture
) -> None:
    audited = lockstep(draft=DraftNoise(INFO, power), mode=mode)
    await audited.until_alarm(NUM_REQUESTS, temperature=1.0)
    assert audited.counts.e_value >= audited.service.audit.alarm_at == 1000.0
    assert len(errors(caplog)) == 1


async def test_noise_shared_by_draft_and_target_is_caught() -> None:
    """Both laws are right, and what comes out is not."""
    draft = NearDraft(INFO, spread=2.0)
    audited = lockstep(target=SharedNoise(INFO), draft=draft, mode="rejection")
    await audited.until_alarm(NUM_REQUESTS, temperature=1.0)


@pytest.mark.parametrize("mode", ["greedy", "rejection"])
async def test_over_the_wire(mode: str) -> None:
    """Real drivers and streams: right first, then wrong."""
    temperature = TEMPERATURES[mode]
    async with drivers(mode=deployed(mode)) as audited:
        for _ in range(20):
            await audited.ask(temperature=temperature)
            await audited.audited()
        assert not audited.has_alarm
        assert audited.counts.num_requests == 20
        assert audited.num_accepted > 20
    async with drivers(target=OffByOne(INFO), mode=deployed(mode)) as audited:
        await audited.until_alarm(NUM_REQUESTS, temperature=temperature)


@pytest.mark.parametrize(("mode", "error"), [("greedy", 1e-4), ("coupled", 0.02)])
async def test_a_float_tie_is_no_mismatch(
    mode: str, error: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Texts part all the time, and each time the target says that a hair would have done it; with
    a tolerance finer than its errors it says that it would not."""
    temperature = TEMPERATURES[mode]
    audited = lockstep(target=Rounding(INFO, error), tie_tolerance=5 * error)
    for _ in range(40):
        await audited.ask(temperature=temperature)
        await audited.audited()
    assert audited.counts.num_ties > 5
    assert audited.counts.num_mismatches == 0
    assert errors(caplog) == []
    strict = lockstep(target=Rounding(INFO, error), tie_tolerance=error / 100)
    await strict.until_alarm(NUM_REQUESTS, temperature=temperature)


@pytest.mark.parametrize("mode", ["rejection", "block"])
async def test_rounding_is_no_other_law(mode: str) -> None:
    audited = lockstep(target=Rounding(INFO, 0.02), mode=mode, tie_tolerance=0.1)
    for _ in range(60):
        await audited.ask(temperature=0.8)
        await audited.audited()
    assert audited.counts.num_tokens > 1000
    assert audited.counts.e_value < 10.0
