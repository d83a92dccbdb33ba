"""Which methods a configuration can offer, and where drafts are deployed."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.app import build_app
from paceline.config import AppConfig, ModelConfig, Offer, SpeculationConfig
from paceline.config.live import LiveTargetConfig, check_user_config
from paceline.config.offered import NO_DRAFTS, NO_HEADS, SWITCHED_OFF
from paceline.methods import METHODS, SpeculationMethod


def app_of(method: str, deploy: str = "auto", **more: Any) -> AppConfig:
    data = {"speculation": {"method": method}, "draft": {"deploy": deploy}, **more}
    return AppConfig.model_validate(data)


@pytest.mark.parametrize(
    ("method", "deploy", "has_drafts"),
    [
        ("model", "auto", True),
        ("hybrid", "auto", True),
        ("auto", "auto", True),
        ("auto", "never", False),
        ("ngram", "auto", False),
        ("suffix", "auto", False),
        ("suffix", "always", True),
        ("ngram", "never", False),
        ("off", "auto", False),
        ("off", "never", False),
    ],
)
def test_where_drafts_are_deployed(method: str, deploy: str, has_drafts: bool) -> None:
    (pool,) = app_of(method, deploy).pools
    assert pool.offer.has_drafts is has_drafts
    assert ("DraftReplica" in pool.deployments) is has_drafts
    (handles,) = build_app(pool.config)._bound_deployment.init_args[1]
    assert (handles.draft is not None) is has_drafts
    assert handles.offer == pool.offer


@pytest.mark.parametrize(
    ("method", "deploy", "said"),
    [
        ("model", "never", "speculation.method model needs draft replicas, but models.m.draft."),
        ("hybrid", "never", "speculation.method hybrid needs draft replicas, but models.m.draft."),
        ("off", "always", "models.m.draft.deploy is always, but models.m.speculation.method is"),
        ("medusa", "auto", "medusa, but models.m.target.medusa names no heads"),
        ("ngram", "sometimes", "Input should be 'auto', 'always' or 'never'"),
    ],
)
def test_contradictions_are_refused_in_every_pool(method: str, deploy: str, said: str) -> None:
    pool = {"speculation": {"method": method}, "draft": {"deploy": deploy}}
    with pytest.raises(ValidationError, match=said):
        AppConfig.model_validate({"models": {"m": pool}})
    with pytest.raises(ValidationError, match=said.replace("models.m.", "")):
        AppConfig.model_validate(pool)


def test_without_drafts_no_text_has_to_fit_into_their_messages() -> None:
    long = {"target": {"model": {"max_model_len": 900_000}}}
    assert app_of("ngram", **long).pools
    with pytest.raises(ValidationError, match="max_message_bytes"):
        app_of("model", **long)


@pytest.mark.parametrize(
    ("offer", "refused"),
    [
        (Offer("model", True, True), {}),
        (Offer("auto", True, False), {"medusa": NO_HEADS}),
        (
            Offer("suffix", False, False),
            {"model": NO_DRAFTS, "hybrid": NO_DRAFTS, "medusa": NO_HEADS},
        ),
        (Offer("off", False, True), {m: SWITCHED_OFF for m in METHODS if m != "off"}),
    ],
)
def test_what_a_request_may_ask_for(offer: Offer, refused: dict[str, str]) -> None:
    assert {m: reason for m, reason in offer.reasons().items() if reason} == refused
    assert tuple(offer.reasons()) == METHODS


@pytest.mark.parametrize(
    ("deployed", "live", "said"),
    [
        ("off", "ngram", "args.speculation.method is off: choose another one there"),
        ("ngram", "hybrid", NO_DRAFTS),
        ("model", "medusa", NO_HEADS),
    ],
)
def test_what_cannot_be_switched_to_in_a_running_service(
    deployed: str, live: str, said: str
) -> None:
    config = app_of(deployed)
    with pytest.raises(ValidationError, match=said):
        check_user_config("TargetReplica", {"method": live}, config)
    with pytest.raises(ValidationError, match=said):
        LiveTargetConfig.of({"method": live}, config.pools[0].offer)


@pytest.mark.parametrize("live", ["ngram", "suffix", "hybrid", "auto", "off"])
def test_what_can_be_switched_to(live: SpeculationMethod) -> None:
    check_user_config("TargetReplica", {"method": live}, app_of("model"))


# Each with its own edge, the nearest value outside of it, and what is said of that.
EDGES = [
    ("prompt_lookup_min", 1, 0, "greater than or equal to 1"),
    ("prompt_lookup_max", 16, 17, "less than or equal to 16"),
    ("suffix_decoding_max_tree_depth", 2, 1, "greater than or equal to 2"),
    ("suffix_decoding_max_tree_depth", 128, 129, "less than or equal to 128"),
    ("suffix_decoding_max_cached_tokens", 0, -1, "greater than or equal to 0"),
    ("suffix_decoding_max_cached_tokens", 1_000_000, 1_000_001, "or equal to 1000000"),
    ("suffix_decoding_max_spec_factor", 8.0, 8.1, "less than or equal to 8"),
    ("suffix_decoding_max_spec_factor", 0.1, 0.0, "greater than 0"),
    ("suffix_decoding_min_token_prob", 0.0, -0.1, "greater than or equal to 0"),
    ("suffix_decoding_min_token_prob", 1.0, 1.1, "less than or equal to 1"),
    ("hybrid_lookup", "ngram", "medusa", "'ngram' or 'suffix'"),
    ("medusa_max_nodes", 1, 0, "greater than or equal to 1"),
    ("medusa_max_nodes", 64, 65, "less than or equal to 64"),
]


@pytest.mark.parametrize(("name", "fits", "outside", "said"), EDGES)
def test_settings_of_the_methods_are_bounded(name: str, fits: Any, outside: Any, said: str) -> None:
    assert getattr(SpeculationConfig.model_validate({name: fits}), name) == fits
    with pytest.raises(ValidationError, match=said):
        SpeculationConfig.model_validate({name: outside})


def test_a_lookup_needs_a_length() -> None:
    SpeculationConfig(prompt_lookup_min=3, prompt_lookup_max=3)
    with pytest.raises(ValidationError, match="prompt_lookup_min <= prompt_lookup_max"):
        SpeculationConfig(prompt_lookup_min=4, prompt_lookup_max=3)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"medusa": "/nope"}, "the heads of model toy are named toy"),
        ({"medusa": "org/heads", "model": {"source": "timed"}}, "model timed are named toy"),
    ],
)
def test_heads_that_a_target_cannot_have(target: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AppConfig.model_validate({"models": {"m": {"target": target}}})


@pytest.mark.parametrize("ranks", [1, 3])
def test_heads_go_with_any_number_of_ranks(ranks: int) -> None:
    model = {"source": "org/m", "tensor_parallel_size": ranks}
    (pool,) = app_of("medusa", target={"medusa": "org/heads", "model": model}).pools
    assert pool.offer.has_heads


@pytest.mark.parametrize("name", ["source", "target_tokenizer"])
def test_names_of_models_are_bounded(name: str) -> None:
    assert getattr(ModelConfig.model_validate({name: "x" * 1024}), name)
    with pytest.raises(ValidationError, match="at most 1024 characters"):
        ModelConfig.model_validate({name: "x" * 1025})


def test_heads_are_offered_where_the_target_names_them() -> None:
    (pool,) = app_of("medusa", target={"medusa": "toy"}).pools
    assert pool.offer == Offer("medusa", has_drafts=False, has_heads=True)
    assert app_of("model").pools[0].offer.has_heads is False
