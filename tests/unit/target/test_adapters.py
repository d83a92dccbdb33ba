"""A request's adapter: known or refused, in every pass of its sequences, also after a loss."""

from dataclasses import replace

import pytest

from paceline.config import ModelConfig, SpeculationConfig, TargetConfig
from paceline.engine.loader import load_engine
from paceline.engine.toy import ToyEngine
from paceline.errors import ConfigError, RequestError
from paceline.generation import GenerateRequest, Resumption
from paceline.protocol.lookahead import AcceptanceClass
from paceline.rank_actors import load_replica_engine
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.testing.loopback import Loopback

NAMES = ("", "one", "two")
ADAPTERS = {"one": "anywhere", "two": "anywhere else"}
MODEL = ModelConfig(block_size=4, max_model_len=512)
GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple(range(40, 60))


def request(adapter, **changes):
    made = GenerateRequest("r", PROMPT, 30, GREEDY, ignore_eos=True, adapter=adapter)
    return replace(made, **changes)


def toy(**fields):
    return load_engine(MODEL.model_copy(update=fields), adapters=ADAPTERS)


def alone(adapter, **changes):
    [run] = Loopback(toy(), None, SpeculationConfig()).run([request(adapter, **changes)])
    return run.token_ids


def test_an_unknown_adapter_is_a_404(make_rig):
    with pytest.raises(RequestError) as caught:
        make_rig().submit(request("three", prompt_token_ids=(1, 2)))
    refusal = caught.value
    assert (refusal.status, refusal.code, refusal.param) == (404, "model_not_found", "model")
    assert "'three' does not exist" in str(refusal)


def test_each_adapter_writes_its_own_text():
    texts = {name: alone(name) for name in NAMES}
    assert len({tuple(text) for text in texts.values()}) == 3
    engine = toy()
    assert isinstance(engine, ToyEngine)
    for name, text in texts.items():
        for end in range(len(text)):
            logits = engine.logits((*PROMPT, *text[:end]), name)
            assert logits[text[end]] == max(logits)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_draft_without_adapters(num_tokens):
    speculation = SpeculationConfig(num_speculative_tokens=num_tokens)
    pair = Loopback(toy(), load_engine(MODEL), speculation)
    runs = pair.run([request(name, request_id=name) for name in (*NAMES, "one")])
    for name, run in zip((*NAMES, "one"), runs, strict=True):
        assert run.token_ids == alone(name)
        assert run.num_draft_tokens > 0
    [plain, one, *_] = runs
    assert 0 < one.num_accepted_tokens < one.num_draft_tokens
    assert plain.num_accepted_tokens == plain.num_draft_tokens
    names = {kind.draft_model for kind in pair.scheduler.policy.class_counts()}
    assert names == {"toy", "one by toy", "two by toy"}


def test_choices_and_preemptions_keep_it():
    scarce = Loopback(toy(num_kv_blocks=30), None, SpeculationConfig())
    sampling = SamplingParams(temperature=0.8, seed=3)
    wanted = [request(name, request_id=name, n=2, sampling=sampling) for name in NAMES]
    runs = scarce.run(wanted)
    assert scarce.scheduler.stats.num_preemptions > 0
    for each, run in zip(wanted, runs, strict=True):
        [expected] = Loopback(toy(), None, SpeculationConfig()).run([each])
        assert [run.text(0), run.text(1)] == [expected.text(0), expected.text(1)]


def test_a_resumed_request_keeps_it():
    whole = alone("two")
    resumed = alone("two", resumption=Resumption(1, (tuple(whole[:11]),)))
    assert whole[:11] + resumed == whole


def test_the_prefix_cache_is_not_shared():
    loopback = Loopback(toy(), None, SpeculationConfig(), TargetConfig(model=MODEL))
    found = []
    for name, salt in [("", 0), ("one", 0), ("two", 0), ("one", 7), ("one", 0), ("one", 7)]:
        before = loopback.scheduler.stats.num_prefix_tokens
        [run] = loopback.run([request(name, cache_salt=salt)])
        found.append(loopback.scheduler.stats.num_prefix_tokens - before)
        assert run.token_ids == alone(name)
    assert found == [0, 0, 0, 0, 16, 16]


async def test_ranks_cannot_share_adapters():
    model = ModelConfig(source="a/folder", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="do not go together yet: set tensor_parallel_size: 1"):
        await load_replica_engine(model, adapters=ADAPTERS)


def test_a_class_is_named_for_the_adapter_within_bounds():
    def name(draft_model, adapter):
        return AcceptanceClass.of(draft_model, VerificationMode.GREEDY, 0.0, adapter).draft_model

    assert name("small", "one") != name("small", "two")
    assert name("", "one") == ""  # no draft yet
    assert name("small", "") == "small"
    assert len(name("d" * 256, "a" * 128)) == 256
