"""Every method, greedy and coupled, 20 texts each: the text is that of plain decoding."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from paceline.engine.toy import ToyEngine
from paceline.generation import Resumption, SpeculationRequest
from paceline.methods import METHODS
from paceline.sampling.params import SamplingParams
from tests.unit.target.conftest import INFO, Rig

NUM_TEXTS, LENGTH = 20, 40
HEADS = replace(INFO, num_heads=3, num_blocks=512)


def requests(rig, method, is_greedy):
    """Prompts that repeat themselves, so that looking them up is right at times."""
    for seed in range(NUM_TEXTS):
        prompt = (*(1 + (seed * 7 + i) % 50 for i in range(6)), *(1 + seed, 2, 3) * 2)
        temperature = 0.0 if is_greedy else 0.8
        sampling = SamplingParams(temperature=temperature, seed=seed)
        asked = SpeculationRequest(method)
        yield replace(rig.request(prompt, LENGTH), sampling=sampling, speculation=asked)


@cache
def text_of(prompt, seed):
    return Rig(info=HEADS).oracle(prompt, LENGTH, seed=seed)


def plain(request):
    seed = None if request.sampling.is_greedy else request.sampling.seed
    return text_of(request.prompt_token_ids, seed)


@pytest.mark.parametrize("lookahead", ["adaptive", "fixed"])
@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_text_equals_plain_decoding(make_rig, method, is_greedy, lookahead):
    rig = make_rig(info=HEADS, speculation={"lookahead": lookahead})
    rig.engine = ToyEngine(HEADS, head_error_rate=0.4)
    rig.add_draft(1, error_rate=0.3)
    wanted = list(requests(rig, method, is_greedy))
    ids = [rig.submit(request)[0] for request in wanted]
    ids += [rig.submit(request)[0] for request in wanted]  # their texts are known by then
    rig.run(2)
    for session_id, request in zip(ids, wanted * 2, strict=True):
        assert rig.out[session_id] == plain(request)
    seen = Counter(delta.source for deltas in rig.deltas.values() for delta in deltas)
    assert set(seen) - {""} <= {
        "model": {"model"},
        "hybrid": {"model", "suffix"},
        "auto": {"model", "suffix", "ngram", "medusa"},
        "off": set(),
    }.get(method, {method})
    rig.check_clean()


@pytest.mark.parametrize("method", METHODS)
def test_a_text_that_began_elsewhere_goes_on_the_same(make_rig, method):
    rig = make_rig(info=HEADS)
    rig.engine = ToyEngine(HEADS, head_error_rate=0.4)
    rig.add_draft(1, error_rate=0.3)
    for request in requests(rig, method, is_greedy=False):
        text = plain(request)
        done = request.sampling.seed % LENGTH
        resumed = replace(request, resumption=Resumption(1, (tuple(text[:done]),)))
        [session_id] = rig.submit(resumed)
        rig.run(2)
        assert [*text[:done], *rig.out[session_id]] == text
    rig.check_clean()
