"""Context rules at their borders, and defaults."""

from __future__ import annotations

import pytest

from paceline.config import GatewayConfig, ModelConfig
from paceline.engine.loader import toy_info
from paceline.errors import ContextLengthError, RequestError
from paceline.gateway.chat import ChatBody
from paceline.gateway.openai import CompletionBody, GenerationBody
from paceline.gateway.plan import Endpoint, Plan, Planner
from paceline.gateway.tokenizer import ToyTokenizer

MAX_LEN = 32
PLANNER = Planner(GatewayConfig(max_tokens_default=8), ToyTokenizer(), MAX_LEN)


def plan(body: GenerationBody) -> Plan:
    (planned,) = PLANNER.plans(body, "id", random_seeds=[5])
    return planned


def text(prompt: str | list[int], max_tokens: int | None = None) -> CompletionBody:
    return CompletionBody(model="toy", prompt=prompt, max_tokens=max_tokens)


def chat(content: str, max_tokens: int | None = None) -> ChatBody:
    return ChatBody.model_validate(
        {
            "model": "toy",
            "messages": [{"role": "user", "content": content}],
            "max_completion_tokens": max_tokens,
        }
    )


def test_every_id_of_the_toy_engine_may_be_in_a_prompt() -> None:
    """Gateway and engine mean the same vocabulary, its end-of-text id included."""
    info, tokenizer = toy_info(ModelConfig()), ToyTokenizer()
    assert tokenizer.vocab_size == info.vocab_size == 257
    assert plan(text([0, 255, 256])).request.prompt_token_ids == (0, 255, 256)
    specials = [i for i in range(info.vocab_size) if tokenizer.is_special(i)]
    assert specials == list(info.eos_token_ids)


@pytest.mark.parametrize(
    ("num_prompt", "asked", "granted"),
    [
        (1, None, 8),
        (24, None, 8),
        (25, None, 7),
        (31, None, 1),
        (31, 1, 1),
        (1, 31, 31),
        (8, 24, 24),
    ],
)
def test_completion_fits(num_prompt: int, asked: int | None, granted: int) -> None:
    planned = plan(text("x" * num_prompt, asked))
    assert planned.request.max_tokens == granted
    assert planned.num_prompt_tokens == num_prompt
    assert plan(text([1] * num_prompt, asked)).request.max_tokens == granted


@pytest.mark.parametrize(
    ("num_prompt", "asked", "param"),
    [(32, None, "prompt"), (33, 1, "prompt"), (31, 2, "max_tokens"), (1, 32, "max_tokens")],
)
def test_completion_does_not_fit(num_prompt: int, asked: int | None, param: str) -> None:
    for prompt in ("x" * num_prompt, [1] * num_prompt):
        with pytest.raises(ContextLengthError) as caught:
            plan(text(prompt, asked))
        assert (caught.value.status, caught.value.param) == (400, param)
        assert caught.value.code == "context_length_exceeded"


def test_chat_takes_the_rest_of_the_context() -> None:
    overhead = len("user: \nassistant: ")
    planned = plan(chat("x"))
    assert planned.endpoint is Endpoint.CHAT
    assert planned.request.max_tokens == MAX_LEN - overhead - 1
    assert plan(chat("x", 3)).request.max_tokens == 3
    last = MAX_LEN - overhead - 1
    assert plan(chat("x" * last)).request.max_tokens == 1
    with pytest.raises(ContextLengthError, match="The prompt has 32 tokens"):
        plan(chat("x" * (last + 1)))


@pytest.mark.parametrize(
    ("seed", "key"), [(0, 0), (5, 5), (-1, 2**64 - 1), (-(2**63), 2**63), (2**63 - 1, 2**63 - 1)]
)
def test_seed_is_mapped_to_u64(seed: int, key: int) -> None:
    body = CompletionBody(model="toy", prompt="x", seed=seed)
    assert plan(body).request.sampling.seed == key


def test_no_seed_draws_one() -> None:
    assert plan(text("x")).request.sampling.seed == 5


@pytest.mark.parametrize(("top_k", "kept"), [(None, 0), (-1, 0), (0, 0), (1, 1), (50, 50)])
def test_top_k(top_k: int | None, kept: int) -> None:
    body = CompletionBody(model="toy", prompt="x", top_k=top_k)
    assert plan(body).request.sampling.top_k == kept


def test_stop_strings_are_distinct_and_within_limits() -> None:
    body = CompletionBody(model="toy", prompt="x", stop=["b", "a", "b"])
    assert plan(body).stop == ("b", "a")
    assert plan(CompletionBody(model="toy", prompt="x", stop=["x" * 256] * 4)).stop == ("x" * 256,)


def test_long_text_is_refused_before_it_is_tokenized() -> None:
    class Untouchable(ToyTokenizer):
        def encode(self, text: str) -> list[int]:
            raise AssertionError(text)

    planner = Planner(GatewayConfig(), Untouchable(), MAX_LEN)
    for body in (text("é" * 17), chat("é" * 17)):
        with pytest.raises(ContextLengthError, match="The prompt of 34 bytes"):
            planner.plans(body, "id", [0])


def test_other_model() -> None:
    with pytest.raises(RequestError) as caught:
        plan(CompletionBody(model="other", prompt="x"))
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
