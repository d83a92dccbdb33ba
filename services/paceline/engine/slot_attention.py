"""One token a row against a fixed block of keys and values: attention while chats are sampled.

Every row of the batch has a slot, which holds one text from its first token on. When a text ends,
the next one begins in the same slot, behind a prefix that all of them share; what the slot held
before is never read again. So rows of any lengths run side by side and none waits for another.

The contract with transformers is that of `paged_attention`, but nothing is shared or scheduled
here: this serves no requests. Knows slots and positions, not texts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

SLOT_ATTENTION = "paceline_slots"


class SlotCache:
    """Keys and values of every layer, [slots, kv_heads, length, head_dim], made at first use.

    `at` says what the next pass of the model is: None for a prefix ([1, prefix] ids, which goes to
    all slots), else one token for every slot, at these positions.
    """

    def __init__(self, num_slots: int, length: int) -> None:
        self._shape = num_slots, length
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._at: torch.Tensor | None = None
        self._unseen: torch.Tensor | None = None

    @property
    def at(self) -> torch.Tensor | None:
        return self._at

    @at.setter
    def at(self, positions: torch.Tensor) -> None:
        self._at = positions
        seen = torch.arange(int(positions.max()) + 1, device=positions.device)
        self._unseen = (seen > positions[:, None])[:, None, None]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[rows, tokens, heads, head_dim] of query [rows, heads, tokens, head_dim]."""
        if layer not in self._keys:
            num_slots, length = self._shape
            for pool, part in ((self._keys, key), (self._values, value)):
                pool[layer] = part.new_zeros(num_slots, part.shape[1], length, part.shape[3])
        keys, values = self._keys[layer], self._values[layer]
        if self._at is None:
            keys[:, :, : key.shape[2]] = key
            values[:, :, : key.shape[2]] = value
            return _attend_prefix(query, key, value, scale).transpose(1, 2)
        rows = torch.arange(len(keys), device=keys.device)
        keys[rows, :, self._at] = key[:, :, 0]
        values[rows, :, self._at] = value[:, :, 0]
        assert self._unseen is not None
        width = self._unseen.shape[-1]
        # The query heads that share a KV head are more rows of that head: no KV is repeated.
        stacked = query.view(len(keys), keys.shape[1], -1, query.shape[-1])
        scores = (stacked @ keys[:, :, :width].transpose(-1, -2)).float() * scale
        weights = scores.masked_fill_(self._unseen, -torch.inf).softmax(dim=-1)
        attended = weights.to(values.dtype) @ values[:, :, :width]
        return attended.reshape(len(keys), 1, query.shape[1], -1)


def _attend_prefix(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )


def slot_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slots: SlotCache,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer; `slots` is what the model was called with."""
    return slots.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
