"""Makes a failing schedule small, and writes it as text that replays it.

A candidate counts only if it breaks the same rule. Chance moves when a scenario changes, so each
candidate is tried with a few sources of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import TypeAdapter

from paceline.generation import SpeculationRequest
from paceline.testing.cluster import DEFAULT_PARTS, FAILURES, run_scenario
from paceline.testing.faults import CHANCES, NUMBERS, FaultPlan
from paceline.testing.invariants import InvariantError
from paceline.testing.scenario import GREEDY, Client, Scenario
from paceline.testing.world import Parts

MAX_TRIES = 400
NUM_CHANCES = 3
_CODEC = TypeAdapter(Scenario)

Value = TypeVar("Value", Scenario, FaultPlan)


def to_json(scenario: Scenario) -> str:
    """One line; what has its default is left out."""
    return _CODEC.dump_json(scenario, exclude_defaults=True).decode()


def from_json(text: str) -> Scenario:
    """Raises pydantic's ValidationError (a ValueError)."""
    return _CODEC.validate_json(text)


def broken_rule(scenario: Scenario, parts: Parts = DEFAULT_PARTS) -> str | None:
    """Run it; the rule that it breaks, without the case's details."""
    try:
        run_scenario(scenario, parts)
    except InvariantError as broken:
        return str(broken).split(":")[0]
    except FAILURES as broken:
        return type(broken).__name__
    return None


def shrink(
    scenario: Scenario, rule_of: Callable[[Scenario], str | None], max_tries: int = MAX_TRIES
) -> tuple[Scenario, int]:
    """A smaller scenario that breaks the rule that this one breaks, and the runs that it took."""
    rule, num_tries = rule_of(scenario), 1
    is_smaller = rule is not None
    while is_smaller:
        is_smaller = False
        for candidate in _candidates(scenario):
            for chance in range(NUM_CHANCES):
                if num_tries >= max_tries:
                    return scenario, num_tries
                num_tries += 1
                attempt = replace(candidate, seed=candidate.seed if chance == 0 else chance)
                if rule_of(attempt) == rule:
                    scenario, is_smaller = attempt, True
                    break
            if is_smaller:
                break
    return scenario, num_tries


# -- smaller ones, the largest steps first ----------------------------------------------------


def _candidates(scenario: Scenario) -> Iterator[Scenario]:
    for candidate in (
        *_fewer_clients(scenario),
        *_fewer_faults(scenario),
        *_fewer_replicas(scenario),
        *_plainer(scenario),
        *_smaller_requests(scenario),
    ):
        if candidate != scenario:
            yield candidate


def _with(value: Value, name: str, part: Any) -> Value:
    parts: dict[str, Any] = {name: part}
    return replace(value, **parts)


def _fewer_clients(scenario: Scenario) -> Iterator[Scenario]:
    clients = scenario.clients
    for index in range(len(clients) if len(clients) > 1 else 0):
        yield replace(scenario, clients=clients[:index] + clients[index + 1 :])


def _fewer_faults(scenario: Scenario) -> Iterator[Scenario]:
    plan = scenario.faults
    for name in (*NUMBERS, *CHANCES):
        if getattr(plan, name):
            yield replace(scenario, faults=_with(plan, name, 0))
    for name in NUMBERS:
        if getattr(plan, name) > 1:
            yield replace(scenario, faults=_with(plan, name, getattr(plan, name) - 1))


def _fewer_replicas(scenario: Scenario) -> Iterator[Scenario]:
    if scenario.num_drafts > 1:
        yield replace(scenario, draft_errors=scenario.draft_errors[:-1])
    if scenario.num_targets > 1:
        num = scenario.num_targets - 1
        clients = tuple(replace(c, target_id=min(c.target_id, num - 1)) for c in scenario.clients)
        yield replace(scenario, num_targets=num, clients=clients)


def _plainer(scenario: Scenario) -> Iterator[Scenario]:
    """One field after the other as `Scenario` has it by itself."""
    fields = Scenario.__dataclass_fields__
    for name in (
        *("are_drafts_up", "is_controlled", "skew_permille", "gateway_us", "max_lone_wait_ms"),
        *("kv_watermark", "target_num_blocks", "max_num_seqs", "max_rows_per_pass"),
        *("draft_rows_per_pass", "draft_num_blocks", "draft_max_sessions", "draft_max_len"),
        *("targets_per_draft", "engine_seed", "max_queued_seqs", "max_queue_us", "pass_us"),
        *("draft_us", "checks_recovery", "lookahead", "max_fan_out", "max_untold"),
        *("max_alternates", "method", "num_heads"),
    ):
        yield _with(scenario, name, fields[name].default)
    yield replace(scenario, draft_errors=(0.0,) * scenario.num_drafts)


def _smaller_requests(scenario: Scenario) -> Iterator[Scenario]:
    for index, client in enumerate(scenario.clients):
        for smaller in _smaller_clients(client):
            clients = (*scenario.clients[:index], smaller, *scenario.clients[index + 1 :])
            yield replace(scenario, clients=clients)


def _smaller_clients(client: Client) -> Iterator[Client]:
    request = client.request
    yield replace(client, start_us=0)
    yield replace(client, poison_at=None)
    prompt = request.prompt_token_ids
    least = max(1, request.sampling.min_tokens)
    for smaller in (
        replace(request, n=1),
        replace(request, num_logprobs=None, num_prompt_logprobs=None),
        replace(request, sampling=GREEDY, speculation=SpeculationRequest()),
        replace(request, prompt_token_ids=prompt[: max(1, len(prompt) // 2)]),
        replace(request, max_tokens=max(least, request.max_tokens // 2)),
        replace(request, max_tokens=max(least, request.max_tokens - 1)),
    ):
        yield replace(client, request=smaller)
