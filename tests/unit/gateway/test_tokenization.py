"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from paceline.config import ApiKeyConfig
from paceline.gateway.service import ServedModel
from paceline.gateway.tokenizer import HuggingFaceTokenizer, ToyTokenizer

TO, FROM = "/tokenize", "/detokenize"
HI = {"role": "user", "content": "hi"}


async def test_a_prompt(harness: Any) -> None:
    answer = await harness.post(TO, {"prompt": "hé"})
    assert answer.status_code == 200
    assert answer.json() == {
        "count": 3, "max_model_len": 64, "tokens": [104, 195, 169], "token_strs": None
    }  # fmt: skip
    answer = await harness.post(TO, {"model": "toy", "prompt": "hé", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["h", "\ufffd", "\ufffd"]
    assert (await harness.post(TO, {"prompt": ""})).json()["tokens"] == []
    # Longer than the model's context: that is what people want to know.
    assert (await harness.post(TO, {"prompt": "x" * 100})).json()["count"] == 100
    assert harness.targets.requests == []
    assert await harness.is_idle()


async def test_messages(harness: Any) -> None:
    """As many tokens as the same messages cost in a request."""
    harness.targets.script = []
    for messages in ([HI], [{"role": "system", "content": "s"}, HI]):
        count = (await harness.post(TO, {"messages": messages})).json()["count"]
        await harness.post("/v1/chat/completions", {"model": "toy", "messages": messages})
        assert count == len(harness.targets.requests[-1].prompt_token_ids)
        less = {"messages": messages, "add_generation_prompt": False}
        bare = (await harness.post(TO, less)).json()
        assert bare["count"] == count - len("assistant: ")
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = (await harness.post(TO, {"messages": [HI], "tools": tools})).json()["tokens"]
    assert b'"name": "f"' in bytes(with_tools)


async def test_there_and_back(harness: Any) -> None:
    text = "h\u00e9llo \U0001f600\u2028 \x00"
    tokens = (await harness.post(TO, {"prompt": text})).json()["tokens"]
    answer = await harness.post(FROM, {"tokens": tokens})
    assert answer.json() == {"prompt": text}
    assert (await harness.post(FROM, {"tokens": []})).json() == {"prompt": ""}
    assert (await harness.post(FROM, {"tokens": [195]})).json() == {"prompt": "\ufffd"}


BAD: list[tuple[str, Any, int, str | None, str]] = [
    (TO, {}, 400, "prompt", "Give either a 'prompt' or 'messages'."),
    (TO, {"prompt": "x", "messages": [HI]}, 400, "prompt", "either"),
    (TO, {"prompt": 5}, 400, "prompt", "string"),
    (TO, {"prompt": ["a"]}, 400, "prompt", "string"),
    (TO, {"messages": []}, 400, "messages", "at least 1"),
    (TO, {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role", "role"),
    (TO, {"messages": [HI] * 5}, 400, "messages", "At most 4"),
    (TO, {"messages": [HI], "add_special_tokens": True}, 400, "add_special_tokens", "only"),
    (TO, {"prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, 400,
     "tools", "only allowed with 'messages'"),
    (TO, {"prompt": "x", "add_generation_prompt": True}, 400, "add_generation_prompt", "only"),
    (TO, {"messages": [HI], "continue_final_message": True}, 400, "continue_final_message", ""),
    (TO, {"prompt": "x", "chat_template": "y"}, 400, "chat_template", "Unknown parameter"),
    (TO, {"prompt": "x", "model": "other"}, 404, "model", "does not exist"),
    (TO, {"prompt": "x", "return_token_strs": 1}, 400, "return_token_strs", "true or false"),
    (TO, b"{", 400, None, "not valid JSON"),
    (TO, b'{"prompt":"\\ud800"}', 400, None, "not valid JSON"),
    (TO, b"[]", 400, None, "object"),
    (TO, {"prompt": "x" * 2048}, 413, None, "larger"),
    (FROM, {}, 400, "tokens", "Missing"),
    (FROM, {"tokens": "ab"}, 400, "tokens", "list of token ids"),
    (FROM, {"tokens": [1.0]}, 400, "tokens", "list of token ids"),
    (FROM, {"tokens": [True]}, 400, "tokens", "list of token ids"),
    (FROM, {"tokens": [-1]}, 400, "tokens", "list of token ids"),
    (FROM, {"tokens": [10**30]}, 400, "tokens", "list of token ids"),
    (FROM, {"tokens": [257]}, 400, "tokens", "no token of this model"),
    (FROM, {"tokens": [1], "model": "other"}, 404, "model", "does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param", "says"), BAD)
async def test_refused(
    path: str, body: Any, status: int, param: str | None, says: str, make_harness: Any
) -> None:
    harness = make_harness(max_body_bytes=2048, max_messages=4)
    answer = await harness.post(path, body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert await harness.is_idle()


async def test_several_models(make_harness: Any) -> None:
    second = ServedModel("second", ToyTokenizer(), make_harness().targets, 99)
    harness = make_harness(more_models=[second])
    answer = await harness.post(TO, {"model": "second", "prompt": "x"})
    assert answer.json()["max_model_len"] == 99
    for path, body in ((TO, {"prompt": "x"}), (FROM, {"tokens": [1]})):
        answer = await harness.post(path, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "missing_required_parameter"


class Held(ToyTokenizer):
    """Works until it is let go."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_working = asyncio.Event()
        self.gate = threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.loop.call_soon_threadsafe(self.is_working.set)
        assert self.gate.wait(20)
        return super().encode(text, add_special_tokens)


async def test_work_takes_a_place_and_not_the_loop(make_harness: Any) -> None:
    tokenizer = Held()
    harness = make_harness(tokenizer=tokenizer, max_concurrent_requests=1)
    first = asyncio.ensure_future(harness.post(TO, {"prompt": "x"}))
    await tokenizer.is_working.wait()
    assert harness.service.num_in_progress == 1
    assert (await harness.post(TO, {"prompt": "x"})).status_code == 429
    assert (await harness.get("/health")).status_code == 200
    tokenizer.gate.set()
    assert (await first).status_code == 200
    assert await harness.is_idle()


async def test_places_and_keys(make_harness: Any) -> None:
    digest = hashlib.sha256(b"sk-a").hexdigest()
    key = ApiKeyConfig(name="a", sha256=digest, max_concurrent_requests=1)
    harness = make_harness(api_keys=(key,), max_concurrent_requests=2)
    sent = {"authorization": "Bearer sk-a"}
    for path, body in ((TO, {"prompt": "x"}), (FROM, {"tokens": [1]})):
        assert (await harness.post(path, body)).status_code == 401
        assert (await harness.post(path, body, headers=sent)).status_code == 200
        with harness.service.room.take(2):
            assert (await harness.post(path, body, headers=sent)).status_code == 429
    assert await harness.is_idle()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer whose texts begin with a control token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


async def test_a_models_own_tokenizer(make_harness: Any, folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    harness = make_harness(tokenizer=tokenizer)
    whole = (await harness.post(TO, {"prompt": "hello", "return_token_strs": True})).json()
    assert whole["token_strs"] == ["<s>", "hello"]
    for flag, tokens in ((True, whole["tokens"]), (False, whole["tokens"][1:])):
        body = {"prompt": "hello", "add_special_tokens": flag}
        assert (await harness.post(TO, body)).json()["tokens"] == tokens
    # Control tokens are shown as they are spelt, here and in no answer.
    answer = await harness.post(FROM, {"tokens": whole["tokens"]})
    assert answer.json() == {"prompt": "<s>hello"}
    assert tokenizer.decode(whole["tokens"]) == "hello"
