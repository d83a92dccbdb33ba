"""What the doctor says of methods."""

from __future__ import annotations

from paceline.cli.doctor_methods import check_methods
from paceline.config import Offer


def test_everything_is_offered() -> None:
    found = check_methods("toy", Offer("auto", has_drafts=True, has_heads=True))
    assert (found.name, found.status, found.fix) == ("toy methods", "ok", "")
    assert found.fact == (
        "requests may ask for model, ngram, suffix, medusa, hybrid, auto (default), off"
    )


def test_what_is_missing_comes_with_its_reason_and_what_to_set() -> None:
    found = check_methods("toy", Offer("ngram", has_drafts=False, has_heads=False))
    assert found.fact == (
        "requests may ask for ngram (default), suffix, auto, off; not for model, hybrid: this "
        "model has no draft replicas (draft.deploy: always, and a draft.model); not for medusa: "
        "this model has no Medusa heads (target.medusa: the folder of its heads)"
    )


def test_off_is_off_for_all() -> None:
    found = check_methods("toy", Offer("off", has_drafts=False))
    assert found.fact == (
        "requests may ask for off (default); not for model, ngram, suffix, medusa, hybrid, auto: "
        "speculation is off in this deployment (speculation.method: auto, or another one)"
    )
