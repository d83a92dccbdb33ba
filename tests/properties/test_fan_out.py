"""Branches change no token, whatever they foresee, and a foreseen correction costs no round trip.

Both ends in lock-step with as many branches as they may have, over toy engines and a tiny model:
any slip of a promotion, of a cache or of an adopted window would show in a text.
"""

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.config import ModelConfig, SpeculationConfig, TargetConfig
from paceline.engine.base import EngineInfo, StepItem
from paceline.engine.loader import load_engine
from paceline.engine.toy import ToyEngine
from paceline.generation import GenerateRequest, SpeculationRequest
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.testing.loopback import Loopback
from paceline.testing.world import NearMissToyEngine

torch.set_num_threads(1)

VOCAB_SIZE = 61
INFO = EngineInfo("toy", VOCAB_SIZE, max_model_len=400, block_size=4, num_blocks=800)
PROMPT = (3, 17, 42, 5, 9)
NUM_TOKENS = 64
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "coupled": SamplingParams(temperature=0.8, seed=20260101),
    "greedy-penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4
    ),
    "everything": SamplingParams(
        temperature=0.9,
        seed=17,
        min_p=0.02,
        presence_penalty=0.7,
        repetition_penalty=1.1,
        logit_bias=((4, 2.0), (11, -3.0)),
    ),
}


def request(sampling, index=0, *, num_tokens=NUM_TOKENS, mode=None):
    prompt = (*PROMPT, *[1 + index] * index)
    asked = SpeculationRequest(mode=mode)
    return GenerateRequest(
        f"r{index}", prompt, num_tokens, sampling, speculation=asked, ignore_eos=True
    )


def plain(engine, sampling, num_tokens=NUM_TOKENS, index=0):
    """Without any draft, one token a pass."""
    rows, start, out = request(sampling, index).prompt_token_ids, 0, []
    engine.add(1)
    for output_index in range(num_tokens):
        [result] = engine.step([StepItem(1, start, tuple(rows), 1, sampling, output_index)])
        start, rows = start + len(rows), result.token_ids
        out += result.token_ids
    engine.free(1)
    return out


def near_miss(error_rate=0.3, **changes):
    return NearMissToyEngine(replace(INFO, **changes), error_rate=error_rate)


def loopback(target, draft, fan_out, *, k=4, config=None):
    speculation = SpeculationConfig(
        num_speculative_tokens=k, max_num_speculative_tokens=k, max_draft_ahead=2 * k + 1
    )
    return Loopback(target, draft, speculation, config, fan_out)


def counts(loop):
    return loop.scheduler.drafts.counts


@pytest.mark.parametrize("fan_out", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_no_token_changes(sampling, fan_out):
    target, draft = ToyEngine(INFO), near_miss()
    loop = loopback(target, draft, fan_out)
    [run] = loop.run([request(sampling)])
    assert run.token_ids == plain(ToyEngine(INFO), sampling)
    assert counts(loop)["adopted"] == loop.table.stats.num_promoted > 0
    assert counts(loop)["remote_error"] == counts(loop)["nack"] == counts(loop)["flood"] == 0
    for engine in (target, draft):
        engine.check_integrity()
        assert engine.stats().num_sequences == 0


@pytest.mark.parametrize("k", [1, 2, 8])
def test_at_any_k(k):
    loop = loopback(ToyEngine(INFO), near_miss(), 2, k=k)
    [run] = loop.run([request(SAMPLINGS["greedy"])])
    assert run.token_ids == plain(ToyEngine(INFO), SAMPLINGS["greedy"])
    assert counts(loop)["adopted"] > 0


def test_many_sequences_that_take_turns():
    """A small cache on both sides: preemptions, evictions and branches given back."""
    target = ToyEngine(replace(INFO, num_blocks=36))
    draft = near_miss(num_blocks=64)
    loop = loopback(target, draft, 2, config=TargetConfig(max_num_seqs=6))
    samplings = list(SAMPLINGS.values())
    requests = [request(samplings[i % 4], i, num_tokens=24) for i in range(12)]
    for index, run in enumerate(loop.run(requests)):
        assert run.token_ids == plain(ToyEngine(INFO), samplings[index % 4], 24, index)
    assert loop.scheduler.stats.num_preemptions > 0
    assert loop.table.stats.num_branches > 20
    assert counts(loop)["adopted"] > 0
    draft.check_integrity()
    assert (draft.stats().num_sequences, draft.stats().num_free_blocks) == (0, 64)


def test_a_foreseen_correction_leaves_no_empty_window():
    """Lock-step fills every window anyway: here the draft may propose only every second pass."""
    outcomes = {}
    for fan_out in (0, 2):
        loop = loopback(ToyEngine(INFO), near_miss(), fan_out)
        propose, num_steps = loop.propose, [0]

        def every_second(propose=propose, num_steps=num_steps, loop=loop):
            num_steps[0] += 1
            (propose if num_steps[0] % 2 else loop._deliver)()

        loop.propose = every_second
        [run] = loop.run([request(SAMPLINGS["greedy"])])
        assert run.token_ids == plain(ToyEngine(INFO), SAMPLINGS["greedy"])
        empty = [delta for delta in run.deltas[1:] if delta.num_draft_tokens == 0]
        outcomes[fan_out] = (len(empty), len(run.deltas))
    assert outcomes[2][0] < outcomes[0][0]
    assert outcomes[2][1] < outcomes[0][1]


@pytest.mark.parametrize("mode", [VerificationMode.REJECTION, VerificationMode.BLOCK])
def test_never_in_the_rejection_modes(mode):
    loop = loopback(ToyEngine(INFO), near_miss(), 2)
    [run] = loop.run([request(SAMPLINGS["coupled"], mode=mode)])
    assert len(run.token_ids) == NUM_TOKENS
    assert counts(loop)["alternate"] == counts(loop)["adopted"] == 0
    assert loop.table.stats.num_branches == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny target, and a draft that is the same with noise on its weights."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=400,
        initializer_range=0.3,
    )
    model, out = LlamaForCausalLM(config), {}
    ids = {f"t{token_id}": token_id for token_id in range(VOCAB_SIZE)}
    for name, noise in (("target", 0.0), ("draft", 0.05)):
        folder = tmp_path_factory.mktemp(name)
        with torch.no_grad():
            for weight in model.parameters():
                weight += noise * torch.randn_like(weight)
        model.save_pretrained(folder)
        text = json.dumps({"model": {"vocab": ids}})
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        out[name] = folder
    return out


def tiny(folder):
    config = ModelConfig(
        source="tiny", max_model_len=400, block_size=4, num_kv_blocks=400, device="cpu"
    )
    return load_engine(config, folder)


@pytest.mark.parametrize("name", ["greedy", "coupled"])
def test_a_torch_pair(folders, name):
    sampling = SAMPLINGS[name]
    loop = loopback(tiny(folders["target"]), tiny(folders["draft"]), 2)
    [run] = loop.run([request(sampling, num_tokens=32)])
    assert run.token_ids == plain(tiny(folders["target"]), sampling, 32)
    assert run.num_accepted_tokens > 0
    assert counts(loop)["adopted"] > 0
