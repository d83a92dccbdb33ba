"""One simulated schedule as a value: topology, requests, speeds and faults, all from one seed.

It does not run anything. The same seed gives the same scenario on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from paceline.config import RpcConfig, SpeculationConfig, TargetConfig
from paceline.engine.base import EngineInfo, StepItem
from paceline.engine.toy import ToyEngine
from paceline.generation import GenerateRequest, SpeculationRequest
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.testing.faults import FaultPlan

VOCAB_SIZE = 24
EOS_TOKEN_ID = 0
MAX_MODEL_LEN = 64
MAX_TOKENS = 16
BLOCK_SIZE = 4
NUM_PROMPTS = 8
# The longest prompt and its answer, in blocks: no target may hold less.
MIN_TARGET_BLOCKS = -(-(2 * NUM_PROMPTS - 1 + MAX_TOKENS) // BLOCK_SIZE)

MESSAGE_KINDS = ("OpenSession", "Opened", "DraftTokens", "Verdict", "Nack", "CloseSession")
NO_FAULTS = FaultPlan()
ON = SpeculationRequest()
OFF = SpeculationRequest(method="off")
GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=0.8, seed=7)
PENALISED = SamplingParams(
    temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.3, min_tokens=8
)
ADJUSTED = SamplingParams(
    temperature=0.9,
    seed=9,
    top_p=0.95,
    min_p=0.01,
    presence_penalty=1.0,
    logit_bias=((EOS_TOKEN_ID, 2.0), (3, -1.5)),
    min_tokens=4,
)
LAWFUL = (
    SpeculationRequest(mode=VerificationMode.REJECTION),
    SpeculationRequest(mode=VerificationMode.BLOCK),
)


@dataclass(frozen=True, slots=True)
class Client:
    """One request: when it comes and to which target."""

    target_id: int
    start_us: int
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Scenario:
    """`draft_errors[i]` is the share of contexts in which draft i disagrees with the targets."""

    seed: int
    num_targets: int
    draft_errors: tuple[float, ...]
    clients: tuple[Client, ...]
    faults: FaultPlan = NO_FAULTS
    engine_seed: int = 0
    num_speculative_tokens: int = 4
    max_draft_ahead: int = 8
    max_num_seqs: int = 8
    max_rows_per_pass: int = 64
    target_num_blocks: int = 256
    kv_watermark: float = 0.0
    draft_rows_per_pass: int = 64
    draft_num_blocks: int = 64
    draft_max_sessions: int = 8
    draft_max_len: int = MAX_MODEL_LEN
    max_lone_wait_ms: float = 0.0
    pass_us: int = 1000
    draft_us: int = 300
    open_timeout_us: int = 20_000
    session_idle_us: int = 5_000_000
    are_drafts_up: bool = True

    @property
    def num_drafts(self) -> int:
        return len(self.draft_errors)

    @property
    def target(self) -> TargetConfig:
        return target_config(self.max_num_seqs, self.max_rows_per_pass, self.kv_watermark)

    @property
    def speculation(self) -> SpeculationConfig:
        return speculation_config(
            self.num_speculative_tokens, self.max_draft_ahead, self.max_lone_wait_ms
        )

    @property
    def rpc(self) -> RpcConfig:
        return rpc_config(self.open_timeout_us)

    def target_info(self) -> EngineInfo:
        return engine_info("toy-target", self.target_num_blocks, MAX_MODEL_LEN)

    def draft_info(self) -> EngineInfo:
        return engine_info("toy-draft", self.draft_num_blocks, self.draft_max_len)


def engine_info(model_id: str, num_blocks: int, max_model_len: int) -> EngineInfo:
    return EngineInfo(
        model_id=model_id,
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        eos_token_ids=(EOS_TOKEN_ID,),
    )


@lru_cache
def target_config(max_num_seqs: int, max_rows_per_pass: int, kv_watermark: float) -> TargetConfig:
    return TargetConfig(
        max_num_seqs=max_num_seqs, max_rows_per_pass=max_rows_per_pass, kv_watermark=kv_watermark
    )


@lru_cache
def speculation_config(
    num_speculative_tokens: int, max_draft_ahead: int, max_lone_wait_ms: float
) -> SpeculationConfig:
    return SpeculationConfig(
        num_speculative_tokens=num_speculative_tokens,
        max_num_speculative_tokens=num_speculative_tokens,
        max_draft_ahead=max_draft_ahead,
        max_lone_wait_ms=max_lone_wait_ms,
    )


@lru_cache
def rpc_config(open_timeout_us: int) -> RpcConfig:
    """Limits at the simulation's pace, where a request lives some 30 ms."""
    return RpcConfig(open_timeout_s=open_timeout_us / 1e6, redial_min_s=0.002, redial_max_s=0.016)


def is_lawful(request: GenerateRequest) -> bool:
    """Whether the text depends on the drafts (its law does not)."""
    return request.speculation in LAWFUL


def target_only(engine_seed: int, request: GenerateRequest, choice: int = 0) -> tuple[int, ...]:
    """What the target writes when no draft exists: plain decoding, one token a pass."""
    stops = set(request.stop_token_ids) | (set() if request.ignore_eos else {EOS_TOKEN_ID})
    held_back = tuple(sorted(stops)) if request.sampling.min_tokens else ()
    sampling = replace(request.sampling, choice=choice, stop_token_ids=held_back)
    room = MAX_MODEL_LEN - len(request.prompt_token_ids)
    text = _plain_text(engine_seed, request.prompt_token_ids, sampling)
    text = text[: min(request.max_tokens, room)]
    ends = [index for index, token_id in enumerate(text) if token_id in stops]
    return text[: ends[0] + 1] if ends else text


@lru_cache(maxsize=1 << 10)
def _plain_text(
    engine_seed: int, prompt: tuple[int, ...], sampling: SamplingParams
) -> tuple[int, ...]:
    engine = ToyEngine(engine_info("oracle", 64, MAX_MODEL_LEN), seed=engine_seed)
    engine.add(1)
    output: list[int] = []
    rows, start = prompt, 0
    while start + len(rows) < MAX_MODEL_LEN:
        item = StepItem(1, start, rows, 1, sampling, len(output))
        token_id = engine.step([item])[0].token_ids[0]
        start, rows = start + len(rows), (token_id,)
        output.append(token_id)
    return tuple(output)


def draw_scenario(seed: int) -> Scenario:
    """The schedule of a seed: topology and requests, then one of several kinds of trouble."""
    rng = Random(seed)
    num_targets = rng.choice((1, 1, 2))
    num_drafts = rng.choice((1, 2, 2, 3))
    max_draft_ahead = rng.choice((1, 4, 8, 8, 12))
    scenario = Scenario(
        seed=seed,
        num_targets=num_targets,
        draft_errors=tuple(rng.choice((0.0, 0.0, 0.1, 0.3)) for _ in range(num_drafts)),
        clients=tuple(_draw_client(rng, i, num_targets) for i in range(rng.choice((1, 1, 2, 3)))),
        engine_seed=rng.randrange(4),
        num_speculative_tokens=min(max_draft_ahead, rng.choice((1, 2, 4, 8))),
        max_draft_ahead=max_draft_ahead,
        max_num_seqs=rng.choice((1, 2, 8, 8)),
        max_rows_per_pass=rng.choice((16, 64)),
        target_num_blocks=rng.choice((MIN_TARGET_BLOCKS, MIN_TARGET_BLOCKS + 4, 256, 256)),
        kv_watermark=rng.choice((0.0, 0.2)),
        draft_rows_per_pass=rng.choice((3, 64)),
        draft_num_blocks=rng.choice((12, 64, 64)),
        draft_max_sessions=rng.choice((1, 8, 8)),
        draft_max_len=rng.choice((20, *[MAX_MODEL_LEN] * 4)),
        max_lone_wait_ms=rng.choice((0.0, 5.0)),
        pass_us=rng.choice((400, 2000, 5000, 5000)),
        draft_us=rng.choice((50, 100, 300)),
        open_timeout_us=rng.choice((4_000, 20_000)),
    )
    faults, are_drafts_up = _draw_trouble(rng)
    faults = replace(faults, horizon_us=scenario.pass_us * 16)
    return replace(scenario, faults=faults, are_drafts_up=are_drafts_up)


def _draw_client(rng: Random, index: int, num_targets: int) -> Client:
    # prompts come from a small pool, so that `target_only` is mostly remembered
    prompt_seed = rng.randrange(NUM_PROMPTS)
    length = 1 + 2 * prompt_seed
    request = GenerateRequest(
        request_id=f"request-{index}",
        prompt_token_ids=tuple(1 + (prompt_seed * 5 + i) % 23 for i in range(length)),
        max_tokens=rng.choice((1, 9, 13, MAX_TOKENS, MAX_TOKENS)),
        sampling=GREEDY,
        ignore_eos=rng.random() < 0.7,
        n=rng.choice((*[1] * 9, 2, 3)),
    )
    return Client(rng.randrange(num_targets), rng.randrange(6_000), _draw_parameters(rng, request))


def _draw_parameters(rng: Random, request: GenerateRequest) -> GenerateRequest:
    roll = rng.random()
    if roll < 0.06:
        request = replace(request, sampling=COUPLED)
    elif roll < 0.10 and request.max_tokens >= PENALISED.min_tokens:
        request = replace(request, sampling=PENALISED)
    elif roll < 0.13 and request.max_tokens >= ADJUSTED.min_tokens:
        request = replace(request, sampling=ADJUSTED)
    elif roll < 0.145:
        request = replace(request, sampling=COUPLED, speculation=rng.choice(LAWFUL))
    elif roll < 0.25:
        request = replace(request, speculation=OFF)
    if rng.random() < 0.05:
        return replace(request, num_logprobs=2, num_prompt_logprobs=1)
    return request


def _draw_trouble(rng: Random) -> tuple[FaultPlan, bool]:
    kinds = frozenset(rng.sample(MESSAGE_KINDS, rng.choice((1, 2, 6))))
    rate = rng.choice((0.05, 0.2, 0.5))
    trouble = rng.randrange(8)
    if trouble == 0:
        return NO_FAULTS, True
    if trouble == 1:
        return NO_FAULTS, False
    if trouble == 2:
        lossy = FaultPlan(drop=rate, kinds=kinds)
    elif trouble == 3:
        lossy = FaultPlan(duplicate=rate, delay=rate / 4, kinds=kinds)
    elif trouble == 4:
        lossy = FaultPlan(corrupt=rate, kinds=frozenset({"DraftTokens"}))
    elif trouble == 5:
        lossy = FaultPlan(
            delay=rate / 4, straggle=rng.choice((0.0, 0.8)), num_cuts=2, num_partitions=1
        )
    elif trouble == 6:
        lossy = FaultPlan(num_kills=rng.choice((1, 2, 4)), restart_share=0.7, straggle=0.5)
    else:
        lossy = FaultPlan(
            drop=0.05,
            duplicate=0.05,
            delay=0.03,
            corrupt=0.03,
            straggle=0.5,
            stall=0.05,
            num_partitions=1,
            num_cuts=1,
            num_kills=1,
        )
    return replace(lossy, num_aborts=rng.choice((0, 0, 1))), True
