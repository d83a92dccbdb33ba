"""What the prefix cache is worth, as a ratio inside one run on one machine.

    python -m tests.e2e.numbers prefix        # time to first token, prefix-cache hit / miss

Starts the demo's service (deploy/serve/smollm2.yaml). The comparison with transformers is
`python -m tests.e2e.pair speed`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from paceline.cli.cluster import free_port, local_service
from paceline.cli.servefile import load

SERVE_FILE = "deploy/serve/smollm2.yaml"
TARGET = "smollm2-135m"
HOST = "127.0.0.1"
PREFIX_TOKENS = 700


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("prefix",))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    port = free_port(HOST)
    with local_service(load(Path(SERVE_FILE)), HOST, port, lambda _: None) as url:
        asyncio.run(measure_prefix(url, options.repeats))


if __name__ == "__main__":
    main()
