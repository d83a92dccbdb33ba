"""Requests at a target's door: what can never run here is refused, the rest becomes sequences.

The gateway checks most of it too, but a target trusts nobody. Pure; knows no queue, no pass and
no other request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.config import Offer, SpeculationConfig, TargetConfig
from paceline.config.offered import REFUSED_CODE
from paceline.engine.base import EngineInfo
from paceline.errors import ContextLengthError, RequestError
from paceline.generation import GenerateRequest
from paceline.protocol.lookahead import AcceptanceClass, SequenceLookahead
from paceline.protocol.messages import REJECTION_MODES
from paceline.protocol.target_session import TargetSession
from paceline.protocol.token_log import TokenLog
from paceline.sampling.params import (
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    VerificationMode,
)
from paceline.target.round_clock import NO_TRACES, RoundTracer
from paceline.target.sequence import Sequence

_US = 1_000_000
# Odd, so that no two attempts below 2**64 give the same seed.
_SEED_STEP = 0x9E3779B97F4A7C15


class Intake:
    """`check` raises `RequestError`; `sequences` makes the sequences of a checked request, one
    for each choice that is to run."""

    def __init__(
        self, info: EngineInfo, target: TargetConfig, speculation: SpeculationConfig
    ) -> None:
        self._info = info
        self._target = target
        self.speculation = speculation

    def check(self, request: GenerateRequest) -> None:
        """Any thread may do it; a grammar may take seconds."""
        self._check_adapter(request)
        self._check_lengths(request)
        self._check_ids(request)
        self._check_sampling(request)
        self._check_method(request)
        self._check_resumption(request)
        self._check_grammar(request)

    def sequences(
        self,
        request: GenerateRequest,
        first_session_id: int,
        now_us: int,
        traces: Mapping[int, RoundTracer] = NO_TRACES,
    ) -> list[Sequence]:
        """Choice i has session id `first_session_id` + i, and is traced by `traces[i]`."""
        log = TokenLog(request.prompt_token_ids)  # milliseconds for a long prompt: once for all
        group: list[Sequence] = []
        outputs = living_outputs(request)
        for choice, output in outputs.items():
            own_log = log.copy() if len(group) + 1 < len(outputs) else log
            sequence = self._sequence(request, first_session_id + choice, choice, own_log, output)
            sequence.ready_us = now_us
            sequence.clock.start(now_us)
            sequence.trace = traces.get(choice)
            sequence.queue_deadline_us = now_us + int(self._target.max_queue_s * _US)
            if group:
                sequence.leader = group[0]
                sequence.num_shared_tokens = self.num_shared_tokens(request)
            group.append(sequence)
        return group

    def num_shared_tokens(self, request: GenerateRequest) -> int:
        """Whole blocks of the prompt; its last token is computed by each choice for itself."""
        if not self._target.model.enable_prefix_caching:
            return 0
        block_size = self._info.block_size
        return (len(request.prompt_token_ids) - 1) // block_size * block_size

    # -- checks -----------------------------------------------------------------------------

    def _check_adapter(self, request: GenerateRequest) -> None:
        if request.adapter and request.adapter not in self._info.adapters:
            raise RequestError(
                f"the model {request.adapter!r} does not exist: this deployment has no adapter of"
                " that name",
                "model",
                "model_not_found",
                404,
            )

    def _check_lengths(self, request: GenerateRequest) -> None:
        info, prompt_len = self._info, len(request.prompt_token_ids)
        if prompt_len == 0 or request.max_tokens < 1:
            raise RequestError("a request needs a prompt token and max_tokens >= 1", "prompt")
        if prompt_len >= info.max_model_len:
            raise ContextLengthError(
                f"the prompt has {prompt_len} tokens; this model's context is"
                f" {info.max_model_len}, of which one is for the answer",
                "prompt",
                "context_length_exceeded",
            )
        end_len = min(prompt_len + request.max_tokens, info.max_model_len)
        if -(-end_len // info.block_size) > info.num_blocks:
            raise ContextLengthError(
                f"prompt + max_tokens need {end_len} tokens of KV cache; this deployment holds"
                f" {info.num_blocks * info.block_size}",
                "max_tokens",
                "context_length_exceeded",
                limit="model.num_kv_blocks",
            )
        num_places = self._target.max_num_seqs + self._target.max_queued_seqs
        if not 1 <= request.n <= num_places:
            raise RequestError(
                f"n must be in [1, {num_places}] here (target.max_num_seqs + max_queued_seqs),"
                f" got {request.n}",
                "n",
            )

    def _check_ids(self, request: GenerateRequest) -> None:
        vocab_size = self._info.vocab_size
        resumed = [] if request.resumption is None else request.resumption.outputs
        for name, param, token_ids in (
            ("prompt token ids", "prompt", request.prompt_token_ids),
            ("stop token ids", "stop_token_ids", request.stop_token_ids),
            ("logit bias ids", "logit_bias", [i for i, _ in request.sampling.logit_bias]),
            *(("output token ids", "resumption", output or ()) for output in resumed),
        ):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                raise RequestError(f"{name} must be in [0, {vocab_size})", param)
        if len(self._stop_ids(request)) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"at most {MAX_STOP_TOKEN_IDS} token ids can end a sequence, EOS included",
                "stop_token_ids",
            )

    def _check_sampling(self, request: GenerateRequest) -> None:
        sampling = request.sampling
        if sampling.min_tokens > request.max_tokens:
            raise RequestError(
                f"min_tokens {sampling.min_tokens} is more than max_tokens {request.max_tokens}",
                "min_tokens",
            )
        for name in ("num_logprobs", "num_prompt_logprobs"):
            if (getattr(request, name) or 0) < 0:
                raise RequestError(f"{name} must be >= 0, got {getattr(request, name)}", "logprobs")
        mode = request.speculation.mode
        if mode is not None and (mode is VerificationMode.GREEDY) != sampling.is_greedy:
            fitting = VerificationMode.GREEDY if sampling.is_greedy else self.speculation.mode
            raise RequestError(
                f"speculation.mode {mode} does not fit temperature {sampling.temperature};"
                f" it would be {fitting}",
                "speculation.mode",
            )

    def _check_method(self, request: GenerateRequest) -> None:
        """As the gateway refuses it, but by what holds now. Which drafts there are is not known
        here, so `model` is plain decoding without one; so it is where speculation was switched off
        in the running service (`user_config`): a switch for emergencies must break no client. One
        that runs already, elsewhere, goes on without what this target has not."""
        method = request.speculation.method
        if method in (None, "model") or request.resumption is not None:
            return
        offer = Offer(self.speculation.method, has_heads=self._info.num_heads > 0)
        if sentence := offer.refusal(method):
            raise RequestError(sentence, "speculation.method", REFUSED_CODE)

    def _check_grammar(self, request: GenerateRequest) -> None:
        grammar, grammars = request.sampling.grammar, self._info.grammars
        if not grammar:
            return
        if grammars is None:
            raise RequestError(
                "this model's tokenizer cannot be used for structured output", "response_format"
            )
        if request.ignore_eos:
            raise RequestError(
                "ignore_eos does not go with structured output, which EOS ends", "ignore_eos"
            )
        try:
            for output in set(living_outputs(request).values()):
                grammars.check(grammar, output)
        except ValueError as error:
            raise RequestError(
                f"the grammar of this output cannot be used: {error}", "response_format"
            ) from error

    def _check_resumption(self, request: GenerateRequest) -> None:
        resumption = request.resumption
        if resumption is None:
            return
        if resumption.attempt < 1 or len(resumption.outputs) != request.n:
            raise RequestError(
                "a resumption needs attempt >= 1 and an output for each of the"
                f" {request.n} choices",
                "resumption",
            )
        living = living_outputs(request).values()
        if not living:
            raise RequestError("every choice of this request has ended", "resumption")
        room = self._info.max_model_len - len(request.prompt_token_ids)
        max_tokens, stop_ids = min(request.max_tokens, room), {*self._stop_ids(request)}
        for output in living:
            if len(output) >= max_tokens or not stop_ids.isdisjoint(output):
                raise RequestError(
                    "a choice whose output has come to its end cannot be resumed", "resumption"
                )

    # -- sequences --------------------------------------------------------------------------

    def _sequence(
        self,
        request: GenerateRequest,
        session_id: int,
        choice: int,
        log: TokenLog,
        output: tuple[int, ...],
    ) -> Sequence:
        mode = self._mode(request)
        sampling = self._sampling(request, choice)
        session = TargetSession(
            session_id,
            request.prompt_token_ids,
            sampling=sampling,
            mode=mode,
            max_tokens=request.max_tokens,
            max_len=self._info.max_model_len,
            stop_token_ids=frozenset(self._stop_ids(request)),
            log=log,
            output_token_ids=output,
        )
        wanted = request.speculation
        lookahead = SequenceLookahead(
            AcceptanceClass.of("", mode, sampling.temperature),
            0 if wanted.method == "off" else wanted.max_tokens,
            is_fixed=wanted.lookahead == "fixed",
        )
        return Sequence(session, request, lookahead, choice)

    def _stop_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        """Whatever ends the sequence, each once, ascending."""
        eos = () if request.ignore_eos else self._info.eos_token_ids
        return tuple(sorted({*request.stop_token_ids, *eos}))

    def _sampling(self, request: GenerateRequest, choice: int) -> SamplingParams:
        sampling = request.sampling
        held_back = self._stop_ids(request) if sampling.min_tokens else ()
        seed = self._seed(request)
        return replace(sampling, choice=choice, stop_token_ids=held_back, seed=seed)

    def _seed(self, request: GenerateRequest) -> int:
        """Each attempt in a rejection mode has noise of its own.

        There the noise is keyed by the round, and a resumed sequence counts rounds from 0 again:
        with the old seed it would meet noise that its tokens so far were drawn with, and what is
        drawn next would depend on them beyond the model's law (C3). New noise given the tokens so
        far is what the law asks for. Greedy has no noise; coupled noise is keyed by position, and
        must be that of the tries before to give the same tokens.
        """
        seed, resumption = request.sampling.seed, request.resumption
        if resumption is None or self._mode(request) not in REJECTION_MODES:
            return seed
        return (seed + resumption.attempt * _SEED_STEP) & MAX_SEED

    def _mode(self, request: GenerateRequest) -> VerificationMode:
        if request.sampling.is_greedy:
            return VerificationMode.GREEDY
        return request.speculation.mode or VerificationMode(self.speculation.mode)


def living_outputs(request: GenerateRequest) -> dict[int, tuple[int, ...]]:
    """The choices to run, ascending, and the output that each of them has already."""
    outputs = ((),) * request.n if request.resumption is None else request.resumption.outputs
    return {choice: output for choice, output in enumerate(outputs) if output is not None}
