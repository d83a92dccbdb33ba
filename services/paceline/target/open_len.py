"""How long a text may be to travel to a draft in one message. Pure."""

from __future__ import annotations

from paceline.config import RpcConfig
from paceline.sampling.params import SamplingParams

_OPEN_OVERHEAD_BYTES = 1024
_TOKEN_BYTES = 5
_BIAS_BYTES = 20
_MAX_CHAR_BYTES = 4


def max_open_len(config: RpcConfig, sampling: SamplingParams) -> int:
    """An OpenSession carries every token (5 bytes each at most) and must fit one message."""
    overhead = _OPEN_OVERHEAD_BYTES + _BIAS_BYTES * len(sampling.logit_bias)
    overhead += _TOKEN_BYTES * len(sampling.stop_token_ids)
    grammar = sampling.grammar
    overhead += len(grammar) if grammar.isascii() else _MAX_CHAR_BYTES * len(grammar)
    room = (config.max_message_bytes - overhead) // _TOKEN_BYTES
    return min(config.max_tokens_per_item, room)
