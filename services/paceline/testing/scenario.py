"""One simulated schedule as a value: topology, requests, speeds and faults.

It does not run anything. `draw.draw_scenario` makes one from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from paceline.config import RpcConfig, SpeculationConfig, TargetConfig
from paceline.engine.base import EngineInfo, StepItem
from paceline.engine.toy import ToyEngine
from paceline.generation import GenerateRequest, SpeculationRequest
from paceline.methods import SpeculationMethod
from paceline.protocol.alternates import MAX_ALTERNATES
from paceline.protocol.messages import REJECTION_MODES
from paceline.protocol.target_session import MAX_UNTOLD
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.testing.faults import FaultPlan

VOCAB_SIZE = 24
EOS_TOKEN_ID = 0
MAX_MODEL_LEN = 64
MAX_TOKENS = 16
BLOCK_SIZE = 4
NUM_PROMPTS = 8
ALIVE_US = 5_000
SILENCE_US = 16_000
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
    """One request, with a gateway of its own: when it comes, and which target is tried first.

    `poison_at`: the target that is to compute this output token dies of it (None: none does).
    """

    target_id: int
    start_us: int
    request: GenerateRequest
    poison_at: int | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """`draft_errors[i]` is the share of contexts in which draft i disagrees with the targets.

    `skew_permille`: every process has a clock of its own, whose rate is off by at most so much.
    `is_controlled`: drafts dial whom the controller names, else everybody. `gateway_us`: the way
    between a gateway and a target. `is_overload`: the requests are meant to be too many.
    `checks_recovery`: after the faults one more request must be helped by a draft.
    `lookahead`: the configuration's, or "random" (`random_lookahead`). `method`: the deployment's;
    `num_heads`: of the targets. `max_untold` and
    `max_alternates` are the session's bounds, at the simulation's pace.
    """

    seed: int
    num_targets: int
    draft_errors: tuple[float, ...]
    clients: tuple[Client, ...]
    faults: FaultPlan = NO_FAULTS
    engine_seed: int = 0
    num_speculative_tokens: int = 4
    max_draft_ahead: int = 8
    max_num_seqs: int = 8
    max_queued_seqs: int = 128
    max_queue_us: int = 60_000_000
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
    is_controlled: bool = False
    targets_per_draft: int = 8
    skew_permille: int = 0
    gateway_us: int = 0
    max_retries: int = 2
    is_overload: bool = False
    checks_recovery: bool = False
    lookahead: Literal["adaptive", "fixed", "random"] = "fixed"
    method: SpeculationMethod = "model"
    num_heads: int = 0
    max_fan_out: int = 0
    max_untold: int = MAX_UNTOLD
    max_alternates: int = MAX_ALTERNATES

    @property
    def num_drafts(self) -> int:
        return len(self.draft_errors)

    @property
    def target(self) -> TargetConfig:
        return target_config(
            self.max_num_seqs,
            self.max_queued_seqs,
            self.max_queue_us,
            self.max_rows_per_pass,
            self.kv_watermark,
        )

    @property
    def speculation(self) -> SpeculationConfig:
        return speculation_config(
            self.num_speculative_tokens,
            self.max_draft_ahead,
            self.max_lone_wait_ms,
            "adaptive" if self.lookahead == "adaptive" else "fixed",
            self.max_fan_out,
            self.method,
        )

    @property
    def rpc(self) -> RpcConfig:
        return rpc_config(self.open_timeout_us)

    def target_info(self) -> EngineInfo:
        info = engine_info("toy-target", self.target_num_blocks, MAX_MODEL_LEN)
        return replace(info, num_heads=self.num_heads)

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
def target_config(
    max_num_seqs: int,
    max_queued_seqs: int,
    max_queue_us: int,
    max_rows_per_pass: int,
    kv_watermark: float,
) -> TargetConfig:
    return TargetConfig(
        max_num_seqs=max_num_seqs,
        max_queued_seqs=max_queued_seqs,
        max_queue_s=max_queue_us / 1e6,
        max_rows_per_pass=max_rows_per_pass,
        kv_watermark=kv_watermark,
    )


@lru_cache
def speculation_config(
    num_speculative_tokens: int,
    max_draft_ahead: int,
    max_lone_wait_ms: float,
    lookahead: Literal["adaptive", "fixed"],
    max_fan_out: int,
    method: SpeculationMethod,
) -> SpeculationConfig:
    return SpeculationConfig(
        method=method,
        num_speculative_tokens=num_speculative_tokens,
        max_num_speculative_tokens=num_speculative_tokens,
        max_draft_ahead=max_draft_ahead,
        max_lone_wait_ms=max_lone_wait_ms,
        lookahead=lookahead,
        max_fan_out=max_fan_out,
    )


@lru_cache
def rpc_config(open_timeout_us: int) -> RpcConfig:
    """Limits at the simulation's pace, where a request lives some 30 ms."""
    return RpcConfig(
        open_timeout_s=open_timeout_us / 1e6,
        stall_timeout_s=2 * open_timeout_us / 1e6,
        redial_min_s=0.002,
        redial_max_s=0.016,
        breaker_failures=2,
        breaker_min_s=0.008,
        breaker_max_s=0.064,
        max_remote_errors=2,
    )


def is_lawful(request: GenerateRequest) -> bool:
    """Whether the text depends on the drafts (its law does not)."""
    return request.speculation.mode in REJECTION_MODES


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
