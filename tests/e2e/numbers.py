"""The figures of the README's engine section, each as a ratio inside one run on one machine.

    python -m tests.e2e.numbers prefix        # time to first token, prefix-cache hit / miss
    python -m tests.e2e.numbers throughput    # this service / transformers' assisted generation

Both start the demo's service (deploy/serve/smollm2.yaml: a target and a draft process, one thread
each). transformers gets the same pair, the same two threads, and one prompt at a time, since its
assisted generation takes no batch. The two never run at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline import models
from paceline.cli.cluster import free_port, local_service
from paceline.cli.servefile import load

SERVE_FILE = "deploy/serve/smollm2.yaml"
TARGET, DRAFT = "smollm2-135m", "smollm2-135m-draft"
HOST = "127.0.0.1"
NUM_THREADS = 2
PREFIX_TOKENS = 700
PROMPTS = (
    "Why is the sky blue?",
    "Write a short Python function that reverses a list, then explain it.",
    "Tell me a long story about a lighthouse keeper.",
    "List ten uses of a paperclip.",
    "Explain how a bicycle stays upright.",
    "Write a SQL query that counts orders per customer.",
    "Summarize the plot of Romeo and Juliet.",
    "What is the difference between a virus and a bacterium?",
)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


# ------------------------------------------------------------------------------------ prefix


async def time_to_first_token(client: httpx.AsyncClient, prompt: list[int]) -> float:
    """Seconds until the first chunk with text; the rest of the answer is read, too."""
    body = {"model": TARGET, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    began, first = time.perf_counter(), 0.0
    async for _ in stream(client, "/v1/completions", body):
        first = first or time.perf_counter() - began
    return first


async def measure_prefix(url: str, repeats: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        pairs = []
        for repeat in range(repeats + 1):
            # No two prompts share a block: the first token differs.
            prompt = [1000 + repeat, *range(2000, 2000 + PREFIX_TOKENS - 1)]
            miss = await time_to_first_token(client, prompt)
            hit = await time_to_first_token(client, prompt)
            if repeat:  # the first pair warms up
                pairs.append((miss, hit))
    ratios = [hit / miss for miss, hit in pairs]
    miss, hit = (statistics.median(times) for times in zip(*pairs, strict=True))
    say(
        f"prefix: {PREFIX_TOKENS} tokens, median of {repeats}: miss {miss * 1000:.0f} ms,"
        f" hit {hit * 1000:.0f} ms, hit / miss {statistics.median(ratios):.3f}"
        f" ({min(ratios):.3f}-{max(ratios):.3f})"
    )


# -------------------------------------------------------------------------------- throughput


async def ask(client: httpx.AsyncClient, prompt: str, max_tokens: int, method: str) -> int:
    body = {
        "model": TARGET,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "speculation": {"method": method},
    }
    response = await client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    num_tokens: int = response.json()["usage"]["completion_tokens"]
    return num_tokens


async def service_rate(url: str, concurrency: int, max_tokens: int, method: str) -> float:
    """Output tokens per second with so many requests always in progress."""
    waiting = list(PROMPTS)
    total = 0

    async def worker(client: httpx.AsyncClient) -> None:
        nonlocal total
        while waiting:
            num_tokens = await ask(client, waiting.pop(), max_tokens, method)
            total += num_tokens  # not `total += await`: that reads before it waits

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        began = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(concurrency)))
        return total / (time.perf_counter() - began)


async def measure_service(url: str, max_tokens: int) -> dict[tuple[int, str], float]:
    await service_rate(url, 8, 16, "model")  # warm up
    rates = {}
    for concurrency in (1, 4, 8):
        for method in ("off", "model"):  # side by side, on the same machine state
            rate = await service_rate(url, concurrency, max_tokens, method)
            rates[concurrency, method] = rate
            say(f"paceline, concurrency {concurrency}, method {method}: {rate:.1f} tokens/s")
    return rates


def transformers_rates(max_tokens: int) -> dict[str, float]:
    """Output tokens per second, one prompt after the other, alone and assisted."""
    torch.set_num_threads(NUM_THREADS)
    folders = [models.resolve(name) for name in (TARGET, DRAFT)]
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    target = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    draft = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.bfloat16)
    kinds: dict[str, dict[str, Any]] = {"alone": {}, "assisted": {"assistant_model": draft}}
    rates = {}
    for kind, extra in kinds.items():
        _generate(target, tokenizer, PROMPTS[:1], 16, extra)  # warm up
        began = time.perf_counter()
        total = _generate(target, tokenizer, PROMPTS, max_tokens, extra)
        rates[kind] = total / (time.perf_counter() - began)
        say(f"transformers, one at a time, {kind}: {rates[kind]:.1f} tokens/s")
    return rates


def _generate(
    model: Any, tokenizer: Any, prompts: Sequence[str], max_tokens: int, extra: dict[str, Any]
) -> int:
    total = 0
    for prompt in prompts:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.inference_mode():
            output = model.generate(
                **encoded,
                **extra,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
            )
        total += output.shape[1] - encoded["input_ids"].shape[1]
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("prefix", "throughput"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    theirs = transformers_rates(options.max_tokens) if options.what == "throughput" else {}
    port = free_port(HOST)
    with local_service(load(Path(SERVE_FILE)), HOST, port, lambda _: None) as url:
        if options.what == "prefix":
            asyncio.run(measure_prefix(url, options.repeats))
            return
        rates = asyncio.run(measure_service(url, options.max_tokens))
    for concurrency in (1, 4, 8):
        best = max(theirs.values())
        say(
            f"concurrency {concurrency}: paceline with draft / transformers assisted"
            f" {rates[concurrency, 'model'] / theirs['assisted']:.2f}, / its better way"
            f" {rates[concurrency, 'model'] / best:.2f}; with draft / without"
            f" {rates[concurrency, 'model'] / rates[concurrency, 'off']:.2f}"
        )


if __name__ == "__main__":
    main()
