"""A draft with a tokenizer of its own in a real fleet: the target's text stays the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import ModelConfig, SpeculationConfig
from paceline.draft.driver import DraftDriver
from paceline.engine.base import Engine
from paceline.engine.loader import load_engine
from paceline.engine.timed import TimedEngine
from paceline.engine.vocabulary import Vocabulary
from paceline.engine.worker import EngineWorker
from paceline.generation import GenerateRequest, SpeculationRequest
from paceline.sampling.params import SamplingParams
from paceline.target.driver import TargetDriver
from paceline.testing.loopback import Loopback
from tests.rpc import fleet
from tests.rpc.audit_world import lockstep
from tests.rpc.traced import Patient
from tests.unit.engine.two_tokenizers import DRAFT_TEXT, TARGET_TEXT, save_related_pair

SEEDS = range(1, 6)
MAX_TOKENS = 32
PATIENT = {"lookahead": "fixed", "max_lone_wait_ms": 1000.0}
# A draft that is no faster than its target would be of no use to it.
STEP_MS = 20.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_related_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def prompts(folders: dict[str, Path]) -> list[tuple[int, ...]]:
    """What the draft cuts alike, what it does not, a control token and half a character."""
    target = Vocabulary(folders["target"])
    texts = [TARGET_TEXT[1], DRAFT_TEXT[0], TARGET_TEXT[3]]
    prompts = [tuple(target.encode(text.encode())[:30]) for text in texts]
    marks = (target.specials["<|end|>"], target.specials["<|user|>"])
    half = target.encode("世".encode()[:2])
    return [*prompts, (*marks, *prompts[0], *half)]


def load(folders: dict[str, Path], name: str, **fields: object) -> Engine:
    given = {
        "source": str(folders[name]),
        "max_model_len": 256,
        "num_kv_blocks": 256,
        "device": "cpu",
        **fields,
    }
    if name == "draft":
        given["target_tokenizer"] = str(folders["target"])
    return load_engine(
        ModelConfig.model_validate(given),
        folders[name],
        draft_top_n=64 if name == "draft" else None,
    )


def requests(
    prompts: list[tuple[int, ...]], draft_tokens: int, **sampling: Any
) -> list[GenerateRequest]:
    """Each prompt greedily and with each seed."""
    return [
        GenerateRequest(
            f"{index}-{seed}-{draft_tokens}",
            prompt,
            MAX_TOKENS,
            SamplingParams(temperature=0.8 if seed else 0.0, seed=seed, **sampling),
            speculation=SpeculationRequest("model" if draft_tokens else "off", draft_tokens),
        )
        for index, prompt in enumerate(prompts)
        for seed in (0, *SEEDS)
    ]


@pytest.mark.parametrize("fan_out", [0, 2])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_texts_are_the_targets_own(
    fan_out: int, penalty: float, folders: dict[str, Path], prompts: list[tuple[int, ...]]
) -> None:
    target, draft = load(folders, "target"), load(folders, "draft")
    config = SpeculationConfig(max_num_speculative_tokens=4, max_draft_ahead=8)
    runs = []
    for draft_tokens in (0, 4):
        loopback = Loopback(target, draft, config, fan_out=fan_out)
        given = requests(prompts, draft_tokens, repetition_penalty=penalty)
        runs.append(loopback.run(given))
    assert [run.token_ids for run in runs[1]] == [run.token_ids for run in runs[0]]
    num_proposed = sum(run.num_draft_tokens for run in runs[1])
    num_accepted = sum(run.num_accepted_tokens for run in runs[1])
    assert num_accepted > 0.3 * num_proposed > 100
    draft.check_integrity()
    assert draft.stats().num_free_blocks == draft.info.num_blocks


async def test_in_a_fleet(folders: dict[str, Path], prompts: list[tuple[int, ...]]) -> None:
    """Handshake and all: the target is told its own vocabulary."""
    settings = fleet.config(**PATIENT)
    slow = TimedEngine(load(folders, "target"), base_ms=STEP_MS)
    workers = [EngineWorker(slow), EngineWorker(load(folders, "draft"))]
    target = TargetDriver(workers[0], settings, "target", "target-boot")
    draft = DraftDriver(workers[1], settings.draft, settings.rpc, "draft", "draft-boot")
    assert draft.hello.model_id == str(folders["draft"])
    async with target, draft:
        target.scheduler.policy.lone = Patient(1_000_000)  # however slow this machine is
        few = requests(prompts, 0)[:: len(SEEDS)]
        alone = [fleet.tokens(await fleet.collect(target, request)) for request in few]
        draft.set_targets([target.server.address])
        await fleet.until(lambda: target.num_links > 0)
        few = requests(prompts, 4)[:: len(SEEDS)]
        rounds = [await fleet.collect(target, request) for request in few]
        assert list(map(fleet.tokens, rounds)) == alone
        assert sum(map(fleet.accepted, rounds)) > 10
        await fleet.until_free(draft)


@pytest.mark.parametrize("mode", ["rejection", "block"])
async def test_laws_in_the_rejection_modes(mode: str, folders: dict[str, Path]) -> None:
    """The audit, which replays what was verified, finds nothing: what the draft states about a
    token over the target's ids is the law that it was drawn from."""
    audited = lockstep(load(folders, "target"), load(folders, "draft"), mode)
    for _ in range(3):
        await audited.ask(temperature=0.8, ignore_eos=True)
        await audited.audited()
    assert (audited.has_alarm, audited.counts.num_requests) == (False, 3)
    assert audited.num_accepted > 10


async def test_a_text_that_outgrows_the_draft(
    folders: dict[str, Path], prompts: list[tuple[int, ...]]
) -> None:
    """Its translation does, while the text itself would fit: it goes on without proposals, and the
    draft is as good as before for others."""
    settings = fleet.config(**PATIENT)
    foreign = Vocabulary(folders["target"]).encode("你好世界 你好世界 你好".encode())
    workers = [
        EngineWorker(TimedEngine(load(folders, "target"), base_ms=STEP_MS)),
        EngineWorker(load(folders, "draft", max_model_len=120)),
    ]
    target = TargetDriver(workers[0], settings, "target", "target-boot")
    draft = DraftDriver(workers[1], settings.draft, settings.rpc, "draft", "draft-boot")
    long = (*foreign * 20,)[:80]
    assert len(long) + 8 < workers[1].info.max_model_len < 120
    async with target, draft:
        target.scheduler.policy.lone = Patient(1_000_000)  # however slow this machine is
        draft.set_targets([target.server.address])
        await fleet.until(lambda: target.num_links > 0)
        for index in range(8):
            wanted = fleet.request(f"long-{index}", prompt=long, max_tokens=12, draft_tokens=4)
            deltas = await fleet.collect(target, wanted)
            assert (len(fleet.tokens(deltas)), fleet.proposed(deltas)) == (12, 0)
        desk = target.scheduler.drafts
        assert desk.counts["given_up"] > 0
        assert set(desk.pool.breaker_states().values()) == {"closed"}
        assert all(link.strikes == 0 for link in desk.pool.links().values())
        wanted = fleet.request("short", prompt=prompts[0], max_tokens=12, draft_tokens=4)
        assert fleet.proposed(await fleet.collect(target, wanted)) > 0
        assert draft.table.stats.num_evicted == 0
