"""From a validated body to the request that the target gets: tokens, limits and defaults.

Synchronous, because a tokenizer is: callers run it in a thread. Knows no HTTP framework, no
target and no clock; ids and seeds of requests come in as arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from paceline.config import GatewayConfig, Offer
from paceline.config.offered import REFUSED_CODE
from paceline.errors import RequestError
from paceline.gateway.chat import ChatBody, ToolOffer
from paceline.gateway.echo import token_offsets
from paceline.gateway.openai import (
    MAX_ECHO_CHARS,
    MAX_SENTENCE_CHARS,
    CompletionBody,
    GenerationBody,
    SpeculationOptions,
    clip,
)
from paceline.gateway.output_grammar import after_reasoning, form_grammar
from paceline.gateway.output_parser import OutputFormat
from paceline.gateway.prompts import Prompt, PromptReader
from paceline.gateway.tokenizer import Tokenizer
from paceline.gateway.tools import ToolMode
from paceline.generation import GenerateRequest, SpeculationRequest
from paceline.sampling.params import MAX_SEED, SamplingParams, VerificationMode


class Endpoint(StrEnum):
    """Which of the two OpenAI shapes a request and its answer have."""

    COMPLETIONS = "completions"
    CHAT = "chat"


BODY_TYPES: Mapping[Endpoint, type[GenerationBody]] = {
    Endpoint.COMPLETIONS: CompletionBody,
    Endpoint.CHAT: ChatBody,
}
DEFAULT_OFFER = Offer()
# Of the served models, in the sentence of a 404.
MAX_NAMED_MODELS = 3
ID_PREFIXES: Mapping[Endpoint, str] = {Endpoint.COMPLETIONS: "cmpl", Endpoint.CHAT: "chatcmpl"}


@dataclass(frozen=True, slots=True)
class Plan:
    """One prompt of a request, ready to run. `answer_id` is the id that the client sees; its
    choices are those from `first_choice` on, of `num_choices` in the whole answer."""

    endpoint: Endpoint
    answer_id: str
    first_choice: int
    num_choices: int
    request: GenerateRequest
    model: str
    stop: tuple[str, ...]
    includes_stop: bool
    is_stream: bool
    include_usage: bool
    include_rounds: bool
    # Log-probabilities that the client asked for: of tokens (echoed ones too), of the prompt.
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    # The prompt's text when it comes first in every choice, and where its tokens begin in it
    # (only when their log-probabilities are shown).
    echo: str | None = None
    prompt_offsets: tuple[int, ...] = ()
    # The prompt was only to be echoed: the token that the target makes is dropped.
    is_prompt_only: bool = False
    # vLLM's: every chunk of a stream has the counts so far.
    continuous_usage: bool = False
    # What the text of a choice may hold beside content, and how the client chose among tools.
    output: OutputFormat = field(default_factory=OutputFormat)
    tool_mode: ToolMode | None = None
    # The client chose the seed: the same noise may come again in other requests.
    is_seeded: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer shows log-probabilities of any token."""
        return self.num_logprobs is not None or self.num_prompt_logprobs is not None

    def salted(self, cache_salt: int) -> Plan:
        """The same, finding only prompts with this salt in the prefix cache."""
        return replace(self, request=replace(self.request, cache_salt=cache_salt))

    def traced(self, traceparent: str) -> Plan:
        """The same, as a part of this trace."""
        return replace(self, request=replace(self.request, traceparent=traceparent))

    def named(self, http_request_id: str) -> Plan:
        """The same, under this name in log lines."""
        return replace(self, request=replace(self.request, http_request_id=http_request_id))


class Planner:
    """Applies the limits and defaults of one served model."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        max_model_len: int,
        model: str | None = None,
        adapter: str = "",
        offer: Offer = DEFAULT_OFFER,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._reader = PromptReader(tokenizer, max_model_len, config.max_messages)
        self._model = config.served_model_name if model is None else model
        self._adapter = adapter
        self._offer = offer

    def plans(
        self, body: GenerationBody, answer_id: str, random_seeds: Sequence[int]
    ) -> tuple[Plan, ...]:
        """One for each prompt. A random seed for each, too: for a request that has none.

        Raises RequestError: 404 for another model, 400 for everything over a limit.
        """
        if body.model != self._model:
            raise model_not_found(body.model, [self._model])
        check_num_choices(self._config, body)
        self._check_method(body)
        self._check_stop(body.stop)
        self._check_logprobs(body)
        self._check_token_ids(body.stop_token_ids, "stop_token_ids")
        self._check_token_ids(body.logit_bias, "logit_bias")
        offer = body.offer if isinstance(body, ChatBody) else None
        if offer is not None and self._tokenizer.tool_format is None:
            raise RequestError(
                "This model's chat template has no tools.", "tools", "unsupported_parameter"
            )
        tokens = self._tokenizer.marker_tokens
        form = form_grammar(body.structured, offer, self._tokenizer.tool_format, tokens)
        self._check_grammar(form, "tools" if offer else body.structured.first or "messages")
        return tuple(
            self._plan(body, offer, form, prompt, answer_id, index, random_seeds[index])
            for index, prompt in enumerate(self._reader.read(body))
        )

    def _plan(
        self,
        body: GenerationBody,
        offer: ToolOffer | None,
        form: str,
        prompt: Prompt,
        answer_id: str,
        index: int,
        random_seed: int,
    ) -> Plan:
        echo, offsets = self._echo(body, prompt)
        output = self._output(body, offer, prompt.token_ids)
        grammar = after_reasoning(form, output, self._tokenizer.marker_tokens)
        options = body.stream_options
        request_id = answer_id if body.num_prompts == 1 else f"{answer_id}-{index}"
        first_choice = index * body.num_choices
        return Plan(
            endpoint=Endpoint.CHAT if isinstance(body, ChatBody) else Endpoint.COMPLETIONS,
            answer_id=answer_id,
            first_choice=first_choice,
            num_choices=body.num_prompts * body.num_choices,
            request=replace(
                self._request(body, prompt, grammar, request_id, random_seed),
                answer_id=answer_id,
                first_choice=first_choice,
            ),
            model=self._model,
            stop=tuple(dict.fromkeys(body.stop)),
            includes_stop=bool(body.include_stop_str_in_output),
            is_stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            include_rounds=bool(body.speculation and body.speculation.include_rounds),
            num_logprobs=body.num_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            echo=echo,
            prompt_offsets=offsets,
            is_prompt_only=body.requested_max_tokens == 0,
            continuous_usage=bool(options and options.continuous_usage_stats),
            output=output,
            tool_mode=offer.mode if offer else None,
            is_seeded=body.seed is not None,
        )

    def _output(
        self, body: GenerationBody, offer: ToolOffer | None, prompt: list[int]
    ) -> OutputFormat:
        if not isinstance(body, ChatBody):
            return OutputFormat()
        has_reasoning = self._tokenizer.has_reasoning
        return OutputFormat(
            self._tokenizer.tool_format if offer else None,
            frozenset(function.name for function in offer.functions) if offer else frozenset(),
            has_reasoning,
            has_reasoning and self._tokenizer.ends_in_reasoning(prompt),
        )

    def _check_grammar(self, grammar: str, param: str) -> None:
        """Raises RequestError for a grammar that the tokenizer cannot follow."""
        if not grammar:
            return
        limit = self._config.max_grammar_bytes
        if len(grammar.encode(errors="replace")) > limit:
            raise RequestError(
                f"The grammar of '{param}' is larger than {limit} bytes.", param, "too_long"
            )
        try:
            self._tokenizer.check_grammar(grammar)
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise RequestError(
                clip(f"'{param}' cannot be followed: {reason}", MAX_SENTENCE_CHARS - 1).rstrip(".")
                + ".",
                param,
                "invalid_value",
            ) from error

    def _request(
        self,
        body: GenerationBody,
        prompt: Prompt,
        grammar: str,
        request_id: str,
        random_seed: int,
    ) -> GenerateRequest:
        max_tokens = self._max_tokens(body, prompt)
        if body.min_tokens is not None and body.min_tokens > max_tokens:
            raise RequestError(
                f"'min_tokens' is {body.min_tokens}, but at most {max_tokens} tokens are wanted.",
                "min_tokens",
                "invalid_value",
            )
        speculation = body.speculation or SpeculationOptions()
        scores_prompt = isinstance(body, CompletionBody) and body.echo
        wanted = (body.num_logprobs if scores_prompt else None, body.prompt_logprobs)
        return GenerateRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt.token_ids),
            # For a prompt that is only echoed the target makes one token, which nobody sees.
            max_tokens=max(max_tokens, 1),
            sampling=_sampling(body, random_seed, grammar),
            stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids)),
            speculation=SpeculationRequest(
                method=speculation.method,
                max_tokens=speculation.max_tokens,
                mode=VerificationMode(speculation.mode) if speculation.mode else None,
                lookahead=speculation.lookahead,
            ),
            ignore_eos=bool(body.ignore_eos),
            n=body.num_choices,
            num_logprobs=body.num_logprobs,
            num_prompt_logprobs=max((num for num in wanted if num is not None), default=None),
            adapter=self._adapter,
        )

    def _echo(self, body: GenerationBody, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if not isinstance(body, CompletionBody) or not body.echo:
            return None, ()
        ids, text = prompt.token_ids, prompt.text
        if text is None:
            text = self._tokenizer.decode(ids)
        return text, () if body.num_logprobs is None else token_offsets(ids, text, self._tokenizer)

    def _check_method(self, body: GenerationBody) -> None:
        method = body.speculation.method if body.speculation else None
        if method is not None and (sentence := self._offer.refusal(method)):
            raise RequestError(sentence, "speculation.method", REFUSED_CODE)

    def _check_stop(self, stops: list[str]) -> None:
        if len(stops) > self._config.max_stop_strings:
            limit = self._config.max_stop_strings
            raise RequestError(f"At most {limit} stop strings are allowed.", "stop", "too_many")
        if any(len(stop) > self._config.max_stop_chars for stop in stops):
            limit = self._config.max_stop_chars
            raise RequestError(
                f"A stop string may have at most {limit} characters.", "stop", "too_long"
            )

    def _check_logprobs(self, body: GenerationBody) -> None:
        limit = self._config.max_logprobs
        name = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        for param, num in ((name, body.num_logprobs), ("prompt_logprobs", body.prompt_logprobs)):
            if num is not None and num > limit:
                raise RequestError(f"'{param}' may be at most {limit} here.", param, "too_many")

    def _check_token_ids(self, token_ids: Collection[int], param: str) -> None:
        """Raises RequestError for too many, and for ids that stand for nothing."""
        limits = {
            "stop_token_ids": self._config.max_stop_token_ids,
            "logit_bias": self._config.max_logit_biases,
        }
        if len(token_ids) > limits[param]:
            raise RequestError(
                f"'{param}' may have at most {limits[param]} token ids.", param, "too_many"
            )
        for token_id in token_ids:
            if not self._tokenizer.has_token(token_id):
                raise RequestError(
                    f"'{param}' names {token_id}, which is no token of this model.",
                    param,
                    "invalid_value",
                )

    def _max_tokens(self, body: GenerationBody, prompt: Prompt) -> int:
        num_prompt_tokens = len(prompt.token_ids)
        rest = self._max_model_len - num_prompt_tokens
        limit = self._config.max_tokens
        requested = body.requested_max_tokens
        if requested is None:
            is_chat = isinstance(body, ChatBody)
            return min(rest, limit if is_chat else min(limit, self._config.max_tokens_default))
        if requested > limit:
            param = body.max_tokens_param
            raise RequestError(f"'{param}' may be at most {limit} here.", param, "too_many")
        if requested > rest:
            raise self._reader.too_long(
                f"{prompt.name} has {num_prompt_tokens} tokens and max_tokens is {requested}",
                "max_tokens",
            )
        return requested


def check_num_choices(config: GatewayConfig, body: GenerationBody) -> int:
    """How many choices the request wants, of all its prompts. Raises RequestError for more than
    ever fit."""
    if body.num_prompts > config.max_prompts:
        raise RequestError(
            f"At most {config.max_prompts} prompts are allowed in one request.",
            "prompt",
            "too_many",
        )
    limit = min(config.max_n, config.max_concurrent_requests)
    if body.num_choices > limit:
        raise RequestError(f"'n' may be at most {limit} here.", "n", "too_many")
    num_choices = body.num_prompts * body.num_choices
    if num_choices > config.max_concurrent_requests:
        raise RequestError(
            f"'n' times the number of prompts is {num_choices}, but may be at most "
            f"{config.max_concurrent_requests} here.",
            "prompt",
            "too_many",
        )
    return num_choices


def model_not_found(model: str, served: Collection[str]) -> RequestError:
    """The 404 of a model that is not served here; names some that are."""
    names = ", ".join(f"'{name}'" for name in list(served)[:MAX_NAMED_MODELS])
    more = ", ..." if len(served) > MAX_NAMED_MODELS else ""
    return RequestError(
        f"The model '{clip(model, MAX_ECHO_CHARS)}' does not exist; this deployment serves "
        f"{names}{more}.",
        "model",
        "model_not_found",
        404,
    )


def _sampling(body: GenerationBody, random_seed: int, grammar: str) -> SamplingParams:
    seed = random_seed if body.seed is None else body.seed
    return SamplingParams(
        temperature=body.effective_temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        seed=seed & MAX_SEED,  # two's complement: -1 is the largest u64
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=tuple(sorted(body.logit_bias.items())),
        min_tokens=body.min_tokens or 0,
        grammar=grammar,
    )
