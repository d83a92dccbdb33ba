"""Log-probabilities of given tokens under the model's raw logits, with the most likely ids.

Knows rows of logits and ids; no sampling parameter (the raw law is reported), no text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.generation import TokenLogprobs

# Stands for minus infinity, which JSON cannot say (OpenAI's and vLLM's number for it).
MIN_LOGPROB = -9999.0
# Rows are taken in parts of at most so many logits, so that float32 copies stay small (64 MiB).
_MAX_LOGITS = 1 << 24


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """One entry per row of logits [len(token_ids), vocab_size], for that row's token.

    `num_top` 0 gives no top list, more than the vocabulary gives all of it. Logarithms are
    float32 and finite: never above 0, never below MIN_LOGPROB. NaN logits count as minus infinity
    and a row without any finite one has MIN_LOGPROB everywhere.
    """
    if logits.shape[0] != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens do not fit {logits.shape[0]} rows")
    if num_top < 0:
        raise ValueError(f"num_top must be >= 0, got {num_top}")
    num_at_once = max(1, _MAX_LOGITS // max(1, logits.shape[1]))
    entries: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), num_at_once):
        part = slice(start, start + num_at_once)
        entries += _part_logprobs(logits[part], token_ids[part], num_top)
    return entries


def _part_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    limit = torch.finfo(torch.float32).max
    logits = torch.nan_to_num(logits.float(), nan=float("-inf"), posinf=limit, neginf=float("-inf"))
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = logits.gather(1, ids)
    ranks = (logits > chosen).sum(dim=1) + 1
    top_ids = _top_ids(logits, min(num_top, logits.shape[1]))
    # log_softmax(logits) at few ids, without a whole row of it
    scale = logits.logsumexp(dim=1, keepdim=True)
    logprobs = torch.cat((chosen, logits.gather(1, top_ids)), dim=1) - scale
    logprobs = torch.nan_to_num(logprobs, nan=MIN_LOGPROB).clamp(MIN_LOGPROB, 0.0)
    return [
        TokenLogprobs(token_id, values[0], rank, tuple(zip(top, values[1:], strict=True)))
        for token_id, values, rank, top in zip(
            token_ids, logprobs.tolist(), ranks.tolist(), top_ids.tolist(), strict=True
        )
    ]


def _top_ids(logits: torch.Tensor, num_top: int) -> torch.Tensor:
    """int64 [rows, num_top] in descending order of logits, ties by lowest id.

    `topk` picks any of the ids that tie with the last place; such rows are done over.
    """
    if num_top == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    top = logits.topk(num_top)
    num_reached = (logits >= top.values[:, -1:]).sum(dim=1)
    chosen = top.indices.clone()
    for row in (num_reached > num_top).nonzero()[:, 0].tolist():
        last = top.values[row, -1]
        above = (logits[row] > last).nonzero()[:, 0]
        tied = (logits[row] == last).nonzero()[:, 0]
        chosen[row] = torch.cat((above, tied[: num_top - above.numel()]))
    chosen = chosen.sort(dim=1).values
    order = logits.gather(1, chosen).sort(dim=1, descending=True, stable=True).indices
    return chosen.gather(1, order)
