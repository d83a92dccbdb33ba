"""LoRA adapters of a target, by model name, on Ray Serve: greedy texts are those that PEFT writes,
with a draft that knows no adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.cli import cluster, servefile
from paceline.gateway import templates
from tests.e2e.structured import save_model
from tests.serve.conftest import Service, poll
from tests.unit.engine.adapters import peft_quiet, save_adapter

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("ignore")]

DEPLOYED = Path(__file__).parents[2] / "deploy/serve/smollm2.yaml"
BASE, ADAPTERS = "tiny", ("tiny-one", "org/two")
PROMPT = "a circle at "
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
MAX_TOKENS = 120


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of the model itself, and of its adapters by their names."""
    out = tmp_path_factory.mktemp("adapted")
    made = {BASE: save_model(out / "base", 11)}
    for seed, name in enumerate(ADAPTERS):
        made[name] = save_adapter(made[BASE], out / f"adapter{seed}", seed=seed)
    return made


def serve_file(folders: dict[str, Path], to: Path) -> servefile.ServeFile:
    """The deployed file with the tiny model on both sides."""
    data = yaml.safe_load(DEPLOYED.read_text(encoding="utf-8"))
    args = data["applications"][0]["args"]
    args["gateway"]["served_model_name"] = BASE
    for side in ("target", "draft"):
        args[side]["model"] = {
            "source": str(folders[BASE]), "device": "cpu", "num_threads": 1,
            "dtype": "float32", "max_model_len": 512, "num_kv_blocks": 256,
        }  # fmt: skip
    # so small a model would not wait for a draft
    args["speculation"] = {"num_speculative_tokens": 4, "lookahead": "fixed"}
    del args["target"]["medusa"]  # heads of another model
    args["target"]["adapters"] = {name: str(folders[name]) for name in ADAPTERS}
    to.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return servefile.load(to)


@pytest.fixture(scope="module")
def service(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    file = serve_file(folders, tmp_path_factory.mktemp("serve") / "adapters.yaml")
    port = cluster.free_port("127.0.0.1")
    with cluster.local_service(file, "127.0.0.1", port, lambda status: None) as url:
        running = Service(url, model=BASE)
        running.wait_for_draft()
        yield running


@pytest.fixture(scope="module")
def client(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)


class Reference:
    """What transformers and PEFT write, with nothing of ours."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folders[BASE])
        self.tokenizer.chat_template = templates.read("smollm2-tools")
        self.models = {}
        for name, folder in folders.items():
            model = AutoModelForCausalLM.from_pretrained(folders[BASE])
            self.models[name] = model if name == BASE else PeftModel.from_pretrained(model, folder)

    def complete(self, name: str) -> str:
        return self._write(name, self.tokenizer(PROMPT, return_tensors="pt"))

    def chat(self, name: str) -> str:
        return self._write(
            name,
            self.tokenizer.apply_chat_template(
                MESSAGES, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            ),
        )

    def _write(self, name: str, prompt: Any) -> str:
        model = self.models[name].eval()
        padding = range(len(self.tokenizer), model.config.vocab_size)
        with torch.inference_mode():
            ids = model.generate(
                input_ids=prompt["input_ids"],
                attention_mask=prompt["attention_mask"],
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                suppress_tokens=list(padding),
                pad_token_id=0,
            )[0, prompt["input_ids"].shape[1] :]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> Iterator[Reference]:
    with peft_quiet():
        yield Reference(folders)


def test_adapters_are_listed_with_their_model(client: openai.OpenAI) -> None:
    listed = [model.model_dump() for model in client.models.list()]
    assert [(m["id"], m["parent"]) for m in listed] == [
        (BASE, None), *((name, BASE) for name in ADAPTERS),
    ]  # fmt: skip
    assert client.models.retrieve(ADAPTERS[1]).model_dump() == listed[2]


def test_a_completion_is_what_the_adapter_alone_writes(service: Service, alone: Reference) -> None:
    """A model this small may be done before a draft has said anything: then it is asked again."""
    texts: dict[str, str] = {}
    counts: Counter[str] = Counter()

    def has_proposals(name: str) -> bool:
        answer = service.complete(model=name, prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0)
        assert answer["model"] == name
        texts[name] = answer["choices"][0]["text"]
        assert texts[name] == alone.complete(name)
        speculation = answer["usage"]["speculation"]
        counts.update({each: speculation[each] for each in ("proposed", "accepted")})
        return bool(speculation["proposed"])

    for name in (BASE, *ADAPTERS):
        poll(lambda name=name: has_proposals(name))
    assert len(set(texts.values())) == len(texts), "each has its own text"
    assert 0 < counts["accepted"] < counts["proposed"], "the draft knows the model alone"


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_chat_streams_what_the_adapter_alone_writes(
    client: openai.OpenAI, alone: Reference, name: str
) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0}
    chunks = list(client.chat.completions.create(model=name, stream=True, **body))
    assert {chunk.model for chunk in chunks} == {name}
    assert len(chunks) > 3
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == alone.chat(name)
    assert streamed != alone.chat(BASE)
    base = client.chat.completions.create(model=BASE, **body)
    assert base.choices[0].message.content == alone.chat(BASE)


def test_no_such_adapter(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="two"):
        client.completions.create(model="two", prompt=PROMPT)
