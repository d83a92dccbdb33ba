"""Requests at a target's door: what can never run here is refused, the rest becomes sequences.

The gateway checks most of it too, but a target trusts nobody. Pure; knows no queue, no pass and
no other request.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.config import SpeculationConfig, TargetConfig
from paceline.engine.base import EngineInfo
from paceline.errors import ContextLengthError, RequestError
from paceline.generation import GenerateRequest
from paceline.protocol.target_session import TargetSession
from paceline.protocol.token_log import TokenLog
from paceline.sampling.params import MAX_STOP_TOKEN_IDS, SamplingParams, VerificationMode
from paceline.target.sequence import Sequence


class Intake:
    """`check` raises `RequestError`; `sequences` makes the n sequences of a checked request."""

    def __init__(
        self, info: EngineInfo, target: TargetConfig, speculation: SpeculationConfig
    ) -> None:
        self._info = info
        self._target = target
        self._speculation = speculation

    def check(self, request: GenerateRequest) -> None:
        self._check_lengths(request)
        self._check_ids(request)
        self._check_sampling(request)

    def sequences(
        self, request: GenerateRequest, first_session_id: int, now_us: int
    ) -> list[Sequence]:
        """Choice i has session id `first_session_id` + i."""
        log = TokenLog(request.prompt_token_ids)  # milliseconds for a long prompt: once for all
        group: list[Sequence] = []
        for choice in range(request.n):
            own_log = log.copy() if group else log
            sequence = self._sequence(request, first_session_id + choice, choice, own_log)
            sequence.ready_us = now_us
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
        for name, param, token_ids in (
            ("prompt token ids", "prompt", request.prompt_token_ids),
            ("stop token ids", "stop_token_ids", request.stop_token_ids),
            ("logit bias ids", "logit_bias", [i for i, _ in request.sampling.logit_bias]),
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
            fitting = VerificationMode.GREEDY if sampling.is_greedy else self._speculation.mode
            raise RequestError(
                f"speculation.mode {mode} does not fit temperature {sampling.temperature};"
                f" it would be {fitting}",
                "speculation.mode",
            )

    # -- sequences --------------------------------------------------------------------------

    def _sequence(
        self, request: GenerateRequest, session_id: int, choice: int, log: TokenLog
    ) -> Sequence:
        max_draft = self._max_draft(request)
        session = TargetSession(
            session_id,
            request.prompt_token_ids,
            sampling=self._sampling(request, choice),
            mode=self._mode(request),
            max_tokens=request.max_tokens,
            max_len=self._info.max_model_len,
            stop_token_ids=frozenset(self._stop_ids(request)),
            max_draft_ahead=self._max_draft_ahead(max_draft),
            log=log,
        )
        return Sequence(session, request, max_draft, choice)

    def _stop_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        """Whatever ends the sequence, each once, ascending."""
        eos = () if request.ignore_eos else self._info.eos_token_ids
        return tuple(sorted({*request.stop_token_ids, *eos}))

    def _sampling(self, request: GenerateRequest, choice: int) -> SamplingParams:
        sampling = request.sampling
        held_back = self._stop_ids(request) if sampling.min_tokens else ()
        return replace(sampling, choice=choice, stop_token_ids=held_back)

    def _mode(self, request: GenerateRequest) -> VerificationMode:
        if request.sampling.is_greedy:
            return VerificationMode.GREEDY
        return request.speculation.mode or VerificationMode(self._speculation.mode)

    def _max_draft(self, request: GenerateRequest) -> int:
        if self._speculation.method == "off" or request.speculation.method == "off":
            return 0
        asked = request.speculation.max_tokens
        wanted = self._speculation.num_speculative_tokens if asked is None else asked
        return min(wanted, self._speculation.max_num_speculative_tokens)

    def _max_draft_ahead(self, max_draft: int) -> int:
        """Credit: what this pass verifies, its bonus, and what the next one could.

        A proposal further ahead is a longer bet that no pass can use any sooner.
        """
        return min(self._speculation.max_draft_ahead, 2 * max_draft + 1)
