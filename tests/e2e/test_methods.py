"""Real weights, every method at once in one service: the same tokens as without speculation."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline import models
from paceline.cli.fetch import fetch
from paceline.methods import METHODS
from paceline.token_bytes import TokenSpelling
from tests.e2e.conftest import Server
from tests.method_sources import SOURCES
from tests.serve.conftest import poll

pytestmark = [pytest.mark.model, pytest.mark.serve, pytest.mark.timeout(1200)]

MODEL = "smollm2-135m"
ANSWER_S = 300.0
MAX_TOKENS = 32
PROMPTS = {
    "chat": "Explain in two sentences why the sky is blue.",
    "repeats": "Repeat this list exactly, and nothing else: red apple, green pear, red apple, "
    "yellow plum, red apple, green pear, red apple, yellow plum, red apple, green pear.",
    "code": "Write a Python class Point with the methods get_x, get_y, set_x and set_y.",
}
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 5},
}
METRIC = "paceline_spec_decode_num_{}_tokens_per_source_total"
Counts = Counter[tuple[str, str]]


@pytest.fixture(scope="module")
def ids() -> dict[bytes, int]:
    """The vocabulary by spelling: an answer names its tokens by their bytes."""
    folder = fetch(MODEL, models.no_progress)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    spelling = TokenSpelling(tokenizer["decoder"])
    names = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    found = {spelling.encode(name): token_id for name, token_id in names.items()}
    assert len(found) == len(names), "no two are spelled alike"
    return found


def ask(server: Server, method: str, prompt: str, law: str) -> dict[str, Any]:
    # fixed: on a busy machine the controller may find that drafting does not pay
    speculation = {"method": method, "lookahead": "fixed", "max_tokens": 3, "include_rounds": True}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPTS[prompt]}],
        "max_tokens": MAX_TOKENS,
        "logprobs": True,
        "speculation": speculation,
        **LAWS[law],
    }
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=ANSWER_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def written(answer: dict[str, Any], ids: dict[bytes, int]) -> tuple[str, str, list[int]]:
    """The text, why it ended, and its token ids."""
    [choice] = answer["choices"]
    spelled = [bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]]
    return choice["message"]["content"], choice["finish_reason"], [ids[each] for each in spelled]


def counted(server: Server) -> Counts:
    """(draft or accepted, source): tokens, as /metrics says."""
    page = httpx.get(f"{server.url}/metrics", timeout=ANSWER_S).text
    return Counter(
        {
            (kind, sample.labels["source"]): int(sample.value)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            for kind in ("draft", "accepted")
            if sample.name == METRIC.format(kind) and sample.labels["source"]
        }
    )


def told(answer: dict[str, Any]) -> Counts:
    """The same of one answer, as its rounds say."""
    counts: Counts = Counter()
    for each in answer["speculation"]["rounds"]:
        if each["proposed"]:
            counts["draft", each["source"]] += each["proposed"]
            counts["accepted", each["source"]] += each["accepted"]
    return counts


def test_requests_of_all_methods_at_once_write_what_off_writes_alone(
    server: Server, ids: dict[bytes, int]
) -> None:
    """And each method does something: what it proposed was partly accepted, and was counted."""
    cases = list(product(PROMPTS, LAWS))
    alone = {case: written(ask(server, "off", *case), ids) for case in cases}
    assert len({text for text, _, _ in alone.values()}) == len(cases)
    before = counted(server)
    work = list(product(METHODS, cases))
    with ThreadPoolExecutor(len(work)) as threads:
        answers = list(threads.map(lambda each: ask(server, each[0], *each[1]), work))
    found = {method: Counts() for method in METHODS}
    for (method, case), answer in zip(work, answers, strict=True):
        assert written(answer, ids) == alone[case], (method, case)
        found[method] += told(answer)
    for method, counts in found.items():
        assert {source for _, source in counts} <= SOURCES[method]
        num_accepted = sum(num for (kind, _), num in counts.items() if kind == "accepted")
        assert (num_accepted > 0) is (method != "off"), (method, counts)
    total = sum(found.values(), Counts())
    poll(lambda: counted(server) - before == total)  # replicas report every quarter of a second
