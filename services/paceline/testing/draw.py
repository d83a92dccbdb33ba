"""The schedule of a seed: topology and requests, then one of many kinds of trouble.

It does not run anything. The same seed gives the same scenario on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from paceline.generation import GenerateRequest
from paceline.methods import METHODS, SpeculationMethod
from paceline.protocol.alternates import MAX_ALTERNATES
from paceline.protocol.target_session import MAX_UNTOLD
from paceline.testing.faults import FaultPlan
from paceline.testing.scenario import (
    ADJUSTED,
    COUPLED,
    GREEDY,
    LAWFUL,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    MESSAGE_KINDS,
    MIN_TARGET_BLOCKS,
    NO_FAULTS,
    NUM_PROMPTS,
    OFF,
    PENALISED,
    Client,
    Scenario,
)

NUM_BURST = 10
_METHODS = 0x50C1A1  # whatever


def draw_scenario(seed: int) -> Scenario:
    rng = Random(seed)
    num_drafts = rng.choice((1, 2, 2, 3))
    max_draft_ahead = rng.choice((1, 4, 8, 8, 12))
    trouble = rng.choice(_TROUBLES)
    is_of_targets = trouble in _TARGET_TROUBLES
    num_targets = rng.choice((1, 2, 2, 3) if is_of_targets else (1, 1, 2))
    num_clients = rng.choice((1, 1, 2, 3))
    scenario = Scenario(
        seed=seed,
        num_targets=num_targets,
        draft_errors=tuple(rng.choice((0.0, 0.0, 0.1, 0.3)) for _ in range(num_drafts)),
        clients=tuple(_draw_client(rng, i, num_targets, is_of_targets) for i in range(num_clients)),
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
        gateway_us=rng.choice((20, 300, 1500)),
        is_controlled=rng.random() < 0.3,
        targets_per_draft=rng.choice((1, 2, 8)),
        skew_permille=rng.choice((0, 0, 1, 100)),
        checks_recovery=rng.random() < 0.25,
    )
    scenario = trouble(rng, scenario)
    faults = replace(
        scenario.faults, num_aborts=rng.choice((0, 0, 1)), horizon_us=scenario.pass_us * 16
    )
    scenario = _draw_methods(Random(seed ^ _METHODS), scenario)
    return replace(
        scenario,
        faults=faults,
        lookahead=rng.choice(("fixed", "adaptive", "random", "random")),
        max_fan_out=rng.choice((0, 0, 0, 0, 1, 2, 3)),
        max_untold=rng.choice((2, 4, MAX_UNTOLD)),
        max_alternates=rng.choice((3, MAX_ALTERNATES, MAX_ALTERNATES)),
    )


# -- requests -------------------------------------------------------------------------------


def _draw_client(rng: Random, index: int, num_targets: int, is_picky: bool) -> Client:
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
    request = _draw_parameters(rng, request, rng.random() * (0.4 if is_picky else 1.0))
    return Client(rng.randrange(num_targets), rng.randrange(6_000), request)


def _draw_parameters(rng: Random, request: GenerateRequest, roll: float) -> GenerateRequest:
    if roll < 0.06:
        request = replace(request, sampling=COUPLED)
    elif roll < 0.10 and request.max_tokens >= PENALISED.min_tokens:
        request = replace(request, sampling=PENALISED)
    elif roll < 0.13 and request.max_tokens >= ADJUSTED.min_tokens:
        request = replace(request, sampling=ADJUSTED)
    elif roll < 0.17:
        request = replace(request, sampling=COUPLED, speculation=rng.choice(LAWFUL))
    elif roll < 0.27:
        request = replace(request, speculation=OFF)
    if rng.random() < 0.05:
        return replace(request, num_logprobs=2, num_prompt_logprobs=1)
    return request


def _draw_methods(rng: Random, scenario: Scenario) -> Scenario:
    """Where proposals come from, by a stream of its own: all else is as if it were not drawn."""
    num_heads = rng.choice((0, 0, 2, 3))
    methods = [method for method in METHODS if num_heads or method != "medusa"]
    clients = []
    for client in scenario.clients:
        request = client.request
        if request.speculation != OFF and rng.random() < 0.5:
            asked = replace(request.speculation, method=rng.choice(methods))
            client = replace(client, request=replace(request, speculation=asked))
        clients.append(client)
    of_deployments: tuple[SpeculationMethod, ...] = ("model", "model", "hybrid", "auto")
    method = rng.choice(of_deployments)
    return replace(scenario, clients=tuple(clients), num_heads=num_heads, method=method)


# -- trouble --------------------------------------------------------------------------------


def _none(rng: Random, scenario: Scenario) -> Scenario:
    return replace(scenario, faults=NO_FAULTS)


def _no_drafts(rng: Random, scenario: Scenario) -> Scenario:
    return replace(scenario, are_drafts_up=False)


def _lossy(rng: Random, scenario: Scenario) -> Scenario:
    return replace(scenario, faults=FaultPlan(drop=_rate(rng), kinds=_kinds(rng)))


def _disorder(rng: Random, scenario: Scenario) -> Scenario:
    rate = _rate(rng)
    return replace(scenario, faults=FaultPlan(duplicate=rate, delay=rate / 4, kinds=_kinds(rng)))


def _lies(rng: Random, scenario: Scenario) -> Scenario:
    faults = FaultPlan(corrupt=_rate(rng), kinds=frozenset({"DraftTokens"}))
    return replace(scenario, faults=faults)


def _bad_links(rng: Random, scenario: Scenario) -> Scenario:
    straggle = rng.choice((0.0, 0.8))
    faults = FaultPlan(delay=_rate(rng) / 4, straggle=straggle, num_cuts=3, num_partitions=1)
    return replace(scenario, faults=replace(faults, num_one_ways=rng.choice((0, 2))))


def _draft_kills(rng: Random, scenario: Scenario) -> Scenario:
    faults = FaultPlan(num_kills=rng.choice((1, 2, 4)), restart_share=0.7, straggle=0.5)
    return replace(scenario, faults=faults)


def _draft_troubles(rng: Random, scenario: Scenario) -> Scenario:
    return replace(scenario, faults=replace(_MIX, num_slow_drafts=1))


def _draft_moods(rng: Random, scenario: Scenario) -> Scenario:
    """Drafts that go, refuse or dawdle, all of it by the rules."""
    faults = FaultPlan(
        num_drains=rng.choice((0, 1, 2)),
        num_busy=rng.choice((0, 1, 3)),
        num_slow_drafts=rng.choice((0, 1)),
        num_one_ways=rng.choice((0, 0, 2)),
    )
    errors = (scenario.draft_errors * 2)[:3]
    return replace(scenario, faults=faults, draft_errors=errors)


def _controller(rng: Random, scenario: Scenario) -> Scenario:
    faults = FaultPlan(num_controller_kills=rng.choice((1, 2)), num_kills=rng.choice((0, 1)))
    # Fewer streams than pairs, so that who serves whom has to be decided.
    errors = (scenario.draft_errors * 2)[:3]
    return replace(
        scenario,
        faults=faults,
        is_controlled=True,
        num_targets=rng.choice((2, 3)),
        targets_per_draft=rng.choice((1, 1, 2)),
        draft_errors=errors,
    )


def _overload(rng: Random, scenario: Scenario) -> Scenario:
    """A burst, far above what the targets have places for."""
    burst = tuple(_draw_burst(rng, index, scenario.num_targets) for index in range(NUM_BURST))
    return replace(
        scenario,
        clients=burst,
        max_num_seqs=rng.choice((1, 2)),
        max_queued_seqs=rng.choice((1, 2, 3)),
        max_queue_us=rng.choice((20_000, 60_000_000)),
        is_overload=True,
        faults=FaultPlan(num_kills=rng.choice((0, 1)), num_busy=rng.choice((0, 1))),
    )


def _draw_burst(rng: Random, index: int, num_targets: int) -> Client:
    client = _draw_client(rng, index, num_targets, False)
    request = replace(client.request, n=min(client.request.n, 2))
    return replace(client, request=request, start_us=index * 10)


def _target_kills(rng: Random, scenario: Scenario) -> Scenario:
    faults = FaultPlan(
        num_target_kills=rng.choice((1, 1, 2, 4)), target_restart_share=rng.choice((0.5, 1.0))
    )
    return replace(scenario, faults=faults)


def _target_hangs(rng: Random, scenario: Scenario) -> Scenario:
    faults = FaultPlan(
        num_hangs=rng.choice((0, 1, 2)),
        num_gateway_partitions=rng.choice((0, 1, 2)),
        num_slow_targets=rng.choice((0, 1)),
    )
    return replace(scenario, faults=faults)


def _engine_breaks(rng: Random, scenario: Scenario) -> Scenario:
    faults = FaultPlan(num_breaks=rng.choice((0, 1, 2)), num_failed_passes=rng.choice((0, 1, 1, 4)))
    return replace(scenario, faults=faults)


def _poison(rng: Random, scenario: Scenario) -> Scenario:
    first, *others = scenario.clients
    request = replace(first.request, n=1)
    poisoned = replace(first, request=request, poison_at=rng.choice((0, 0, 3)))
    return replace(scenario, clients=(poisoned, *others))


def _everything(rng: Random, scenario: Scenario) -> Scenario:
    faults = replace(
        _MIX,
        num_target_kills=rng.choice((0, 1)),
        num_hangs=1,
        num_breaks=rng.choice((0, 1)),
        num_failed_passes=rng.choice((0, 2)),
        num_gateway_partitions=1,
        num_slow_targets=rng.choice((0, 1)),
        num_drains=1,
        num_busy=1,
        num_one_ways=1,
        num_controller_kills=1,
    )
    return replace(scenario, faults=faults)


_MIX = FaultPlan(
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


def _rate(rng: Random) -> float:
    return rng.choice((0.05, 0.2, 0.5))


def _kinds(rng: Random) -> frozenset[str]:
    return frozenset(rng.sample(MESSAGE_KINDS, rng.choice((1, 2, 6))))


_TARGET_TROUBLES = (_target_kills, _target_hangs, _engine_breaks, _poison, _everything)
_TROUBLES: tuple[Callable[[Random, Scenario], Scenario], ...] = (
    *(_none, _no_drafts, _lossy, _disorder, _lies, _bad_links, _draft_kills, _draft_troubles),
    *(_draft_moods, _controller, _overload),
    *(_target_kills, *_TARGET_TROUBLES),
)
