"""A target and a draft of two ranks each, on Ray: texts of one process, and ranks that are lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.cli import cluster, servefile
from paceline.config import ModelConfig
from paceline.engine.base import Engine, StepItem
from paceline.engine.loader import load_engine
from paceline.sampling.params import SamplingParams
from tests.serve.conftest import WAIT_S, Service, poll

pytestmark = [
    pytest.mark.serve,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        torch.accelerator.is_available(),
        reason="ranks take the GPU; hide it: CUDA_VISIBLE_DEVICES=''",
    ),
]

DEPLOYED = Path(__file__).parents[2] / "deploy/serve/smollm2-tp3.yaml"
VOCAB_SIZE = 128
TIMEOUT_S = 3.0
SHARED = {"tensor_parallel_size": 2, "tensor_parallel_timeout_s": TIMEOUT_S}


def save_model(folder: Path) -> Path:
    """A random Llama whose token i spells " wi", and that ends no text by itself."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({f"Ġw{i}": i for i in range(VOCAB_SIZE)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    return folder


def model_fields(folder: Path) -> dict[str, Any]:
    return {"source": str(folder), "device": "cpu", "max_model_len": 512, "num_kv_blocks": 256}


def save_heads(folder: Path) -> Path:
    """Medusa heads that guess what the target's own output layer says: right where it repeats."""
    tensors = {}
    for head in range(3):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(64, 64)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(64)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    config = '{"medusa_num_heads": 3, "medusa_num_layers": 1}'
    (folder / "config.json").write_text(config, encoding="utf-8")
    return folder


def serve_file(folder: Path, heads: Path, to: Path) -> servefile.ServeFile:
    """The deployed file with this model for both sides, two ranks each; the target has heads."""
    data = yaml.safe_load(DEPLOYED.read_text(encoding="utf-8"))
    app = data["applications"][0]
    app["args"]["gateway"]["served_model_name"] = "tiny"
    for side in ("target", "draft"):
        app["args"][side]["model"] = {**model_fields(folder), **SHARED}
    app["args"]["target"]["medusa"] = str(heads)
    for deployment in app["deployments"]:
        if deployment["name"] in ("TargetReplica", "DraftReplica"):
            deployment["placement_group_bundles"] = [{"CPU": 0.1}] * 2
            deployment["placement_group_strategy"] = "STRICT_PACK"
    to.write_text(yaml.safe_dump(data), encoding="utf-8")
    return servefile.load(to)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    heads = save_heads(tmp_path_factory.mktemp("heads"))
    file = serve_file(folder, heads, tmp_path_factory.mktemp("serve") / "two.yaml")
    port = cluster.free_port("127.0.0.1")
    with cluster.local_service(file, "127.0.0.1", port, lambda status: None) as url:
        running = Service(url, model="tiny")
        running.wait_for_draft()
        yield running


# -- what one process says ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[dict[str, Any]], str]:
    engine = load_engine(ModelConfig(**model_fields(folder)), folder)
    return lambda body: text_alone(engine, body)


def text_alone(engine: Engine, body: dict[str, Any]) -> str:
    sampling = SamplingParams(temperature=body["temperature"], seed=body["seed"])
    engine.add(1)
    rows, start, token_ids = tuple(body["prompt"]), 0, []
    for index in range(body["max_tokens"]):
        (result,) = engine.step([StepItem(1, start, rows, 1, sampling, output_index=index)])
        start, rows = start + len(rows), result.token_ids
        token_ids += rows
    engine.free(1)
    return "".join(f" w{token_id}" for token_id in token_ids)


def request(seed: int, max_tokens: int | None = None) -> dict[str, Any]:
    """Every third one is greedy."""
    return {
        "prompt": [(seed * 37 + i * i) % VOCAB_SIZE for i in range(3 + seed % 20)],
        "max_tokens": max_tokens or 16 + seed % 9,
        "temperature": 0.8 if seed % 3 else 0.0,
        "seed": seed,
    }


@pytest.mark.parametrize(("method", "least"), [("model", 50), ("medusa", 10)])
def test_50_texts_of_two_ranks_equal_those_of_one(
    service: Service, alone: Callable[[dict[str, Any]], str], method: str, least: int
) -> None:
    bodies = [request(seed) for seed in range(50)]
    asked = [{**body, "speculation": {"method": method}} for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: service.complete(**body), asked))
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == [alone(body) for body in bodies]
    assert len(set(texts)) == 50
    speculation = [answer["usage"]["speculation"] for answer in answers]
    assert sum(counts["accepted"] for counts in speculation) > least


# -- lost ranks ---------------------------------------------------------------------------------


def lose_a_rank(service: Service, number: signal.Signals, alone: Callable[..., str]) -> None:
    """Eight requests under way, then `number` to rank 1: each is answered right or refused
    cleanly, another replica comes, and it answers like one process."""
    (before,) = service.target_stats()
    assert len(before["rank_pids"]) == 1
    bodies = [request(seed, max_tokens=300) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(post, service, body) for body in bodies]
        poll(lambda: service.target_stats()[0]["num_running"] == 8)
        os.kill(before["rank_pids"][0], number)
        for body, answer in zip(bodies, answers, strict=True):
            check_answer(answer.result(), body, alone)
    body = request(3)
    recovered = poll(lambda: text_or_none(service, body))
    assert recovered == alone(body)
    (after,) = service.target_stats()
    assert after["replica_id"] != before["replica_id"]
    assert not {after["pid"], *after["rank_pids"]} & {before["pid"], *before["rank_pids"]}
    poll(lambda: not any(is_alive(pid) for pid in (before["pid"], *before["rank_pids"])))


def post(service: Service, body: dict[str, Any]) -> httpx.Response:
    body = {"model": service.model, **body}
    return httpx.post(f"{service.url}/v1/completions", json=body, timeout=WAIT_S)


def check_answer(response: httpx.Response, body: dict[str, Any], alone: Callable[..., str]) -> None:
    if response.status_code == 200:
        assert response.json()["choices"][0]["text"] == alone(body)
    else:
        assert response.status_code == 503, response.text
        assert response.json()["error"]["code"] in ("target_lost", "engine_broken")


def text_or_none(service: Service, body: dict[str, Any]) -> str | None:
    response = post(service, body)
    return response.json()["choices"][0]["text"] if response.status_code == 200 else None


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_hung_rank(service: Service, alone: Callable[[dict[str, Any]], str]) -> None:
    lose_a_rank(service, signal.SIGSTOP, alone)


def test_a_killed_rank_of_both_sides(
    service: Service, alone: Callable[[dict[str, Any]], str]
) -> None:
    before = service.draft_stats()
    os.kill(before["rank_pids"][0], signal.SIGKILL)
    lose_a_rank(service, signal.SIGKILL, alone)
    poll(lambda: new_draft(service, before["pid"]))
    body = request(4, max_tokens=300)
    answer = service.complete(**body)
    assert answer["choices"][0]["text"] == alone(body)
    assert answer["usage"]["speculation"]["accepted"] > 0


def new_draft(service: Service, old_pid: int) -> bool:
    drafts = service.fleet()["drafts"]
    return any(draft["pid"] != old_pid and draft["connected"] for draft in drafts)
