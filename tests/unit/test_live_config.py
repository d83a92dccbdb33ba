"""`user_config`: what it changes, what it refuses, and what stays in force then."""

import logging

import pytest
from pydantic import ValidationError

from paceline.config import AppConfig, ControllerConfig, SpeculationConfig
from paceline.config.live import LiveControllerConfig, LiveTargetConfig, check_user_config
from paceline.errors import ConfigError
from paceline.live_config import LiveConfig

BASE = SpeculationConfig(num_speculative_tokens=3, max_draft_ahead=32)


class Taken(list):
    """A target's knobs, and every configuration that was taken."""

    def __init__(self):
        self.live = LiveConfig("TargetReplica", BASE, LiveTargetConfig.model_validate, self.append)


@pytest.fixture
def taken():
    return Taken()


def test_what_is_given_changes_the_rest_is_what_args_say(taken):
    taken.live.apply(None)
    assert taken == [BASE]
    taken.live.apply({"num_speculative_tokens": 8, "lookahead": "fixed"})
    changed = {"num_speculative_tokens": 8, "lookahead": "fixed"}
    assert taken[-1] == BASE.model_copy(update=changed)
    taken.live.apply({"method": "off"})
    assert taken[-1] == BASE.model_copy(update={"method": "off"}), "not on top of the last one"
    taken.live.apply(None)
    assert taken[-1] == BASE, "user_config was taken out of the file"


BAD = [
    ({"num_speculative_tokens": 0}, "num_speculative_tokens: "),
    ({"num_speculative_tokens": True}, "num_speculative_tokens: "),
    ({"lookahead": "clever"}, "lookahead: "),
    ({"k": 3}, "unknown key k"),
    ({"num_speculative_tokens": 20}, "num_speculative_tokens <= max_num_speculative_tokens"),
    (["a list"], "dictionary"),
    ("text", "dictionary"),
]


@pytest.mark.parametrize(("user_config", "said"), BAD)
def test_at_the_start_nonsense_raises_a_sentence(taken, user_config, said):
    with pytest.raises(ConfigError, match=r"^user_config of TargetReplica: ") as caught:
        taken.live.apply(user_config)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert taken == []


@pytest.mark.parametrize(("user_config", "said"), BAD)
def test_later_nonsense_is_logged_and_the_values_before_stay(taken, user_config, said, caplog):
    caplog.set_level(logging.INFO, logger="paceline")
    taken.live.apply({"num_speculative_tokens": 5})
    taken.live.apply(user_config)
    assert [config.num_speculative_tokens for config in taken] == [5]
    assert said in taken.live.error
    assert said in caplog.text
    taken.live.apply({"num_speculative_tokens": 6})
    assert taken[-1].num_speculative_tokens == 6
    assert taken.live.error == ""


def test_the_controllers():
    base, taken = ControllerConfig(), []
    live = LiveConfig("Controller", base, LiveControllerConfig.model_validate, taken.append)
    live.apply({"max_draft_utilization": 0.5, "drafts_per_target": 2})
    live.apply({"heartbeat_timeout_s": 9})
    changed = {"max_draft_utilization": 0.5, "drafts_per_target": 2}
    assert taken == [base.model_copy(update=changed)]
    assert live.error == "user_config of Controller: unknown key heartbeat_timeout_s"


def test_every_knob_is_a_field_of_what_it_changes():
    assert set(LiveTargetConfig.model_fields) < set(SpeculationConfig.model_fields)
    assert set(LiveControllerConfig.model_fields) < set(ControllerConfig.model_fields)


def test_a_file_can_be_checked_before_anything_starts():
    config = AppConfig()
    check_user_config("TargetReplica", {"num_speculative_tokens": 3}, config)
    check_user_config("Controller", {"drafts_per_target": 2}, config)
    for deployment in ("TargetReplica", "Controller"):
        with pytest.raises(ValidationError):
            check_user_config(deployment, {"k": 3}, config)
    with pytest.raises(ValidationError, match="num_speculative_tokens <="):
        check_user_config("TargetReplica", {"num_speculative_tokens": 64}, config)
    with pytest.raises(ValueError, match="DraftReplica takes no user_config"):
        check_user_config("DraftReplica", {}, config)
