"""What the toy model says alone: one engine in this process, no service around it.

The text depends on prompt, parameters and seed, and on nothing that a service does. So this is a
reference that no bug of the service can bend.
"""

from __future__ import annotations

from chaos.traffic import Outcome, Request
from paceline.config import ModelConfig
from paceline.engine.base import StepItem
from paceline.engine.loader import load_source
from paceline.gateway.tokenizer import load_tokenizer
from paceline.sampling.params import SamplingParams


def references(model: ModelConfig, requests: list[Request]) -> list[Outcome]:
    """One finished outcome for each: plain completions of `max_tokens` tokens."""
    fast = model.model_copy(update={"toy_step_ms": 0.0, "toy_row_ms": 0.0})
    engine = load_source(fast)
    tokenizer = load_tokenizer(model.source)
    found = []
    for number, request in enumerate(requests, 1):
        body = request.body
        sampling = SamplingParams(temperature=body["temperature"], seed=body["seed"])
        rows, start = tuple(tokenizer.encode(body["prompt"])), 0
        token_ids: list[int] = []
        engine.add(number)
        while len(token_ids) < body["max_tokens"]:
            item = StepItem(number, start, rows, 1, sampling, output_index=len(token_ids))
            (result,) = engine.step([item])
            start, rows = start + len(rows), result.token_ids
            token_ids += rows
        engine.free(number)
        found.append(Outcome(request, [tokenizer.decode(token_ids)], [[]], is_done=True))
    return found
