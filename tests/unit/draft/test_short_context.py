"""A draft whose context is shorter than the target's: drafting stops, the request goes on.

seen in peers, no. 28: draft max_len 64, target 256, prompt 60, max_tokens 150.
"""

from dataclasses import replace

import pytest

from paceline.config import SpeculationConfig
from paceline.engine.base import EngineInfo
from paceline.engine.toy import ToyEngine
from paceline.generation import GenerateRequest
from paceline.sampling.params import SamplingParams
from paceline.testing.loopback import Loopback

TARGET = EngineInfo("toy", 64, 256, 16, 64)
SAMPLINGS = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=4)]


def run(draft, request):
    loopback = Loopback(ToyEngine(TARGET), draft, SpeculationConfig())
    (result,) = loopback.run([request])
    return loopback, result


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "coupled"])
@pytest.mark.parametrize(
    ("prompt_len", "num_drafted"), [(60, 4), (63, 1), (64, 0), (65, 0), (200, 0)]
)
def test_drafting_stops_by_itself(sampling, prompt_len, num_drafted):
    """The draft is always right, so it is asked for all that its 64 tokens allow."""
    prompt = tuple(1 + i % 60 for i in range(prompt_len))
    room = 256 - prompt_len
    request = GenerateRequest("r", prompt, min(150, room), sampling, ignore_eos=True)
    draft = ToyEngine(replace(TARGET, max_model_len=64))
    loopback, result = run(draft, request)
    _, alone = run(None, request)
    assert result.token_ids == alone.token_ids
    assert len(result.token_ids) == min(150, room)
    assert loopback.table.stats.num_drafted_tokens == num_drafted
    # the first of them came too late: the prefill pass wrote that token
    assert result.num_draft_tokens == result.num_accepted_tokens == max(0, num_drafted - 1)
    assert loopback.table.stats.num_evicted == 0
    assert draft.stats().num_free_blocks == TARGET.num_blocks
