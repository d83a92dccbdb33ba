"""Medusa heads (Cai et al. 2024) beside a target: guesses from its final hidden states.

Only what they cost and how often they are right depends on them, never a token: the target verifies
whatever they guess. So they are held and computed in the model's own type (beside quantized weights
too), not reproducibly, and from a row's most likely `HEAD_TOP_N` tokens alone.
Knows modules and rows of hidden states; no cache, no request and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from paceline.engine.base import StepResult
from paceline.engine.keyed_noise import gumbel, make_keys, token_words
from paceline.engine.logit_filters import mask_scaled
from paceline.engine.medusa_folder import HeadTensors, MedusaTensors, read_medusa
from paceline.engine.packed_linear import pack_linears
from paceline.engine.pass_results import PassPart
from paceline.engine.step_rows import deciding_row, head_sampling
from paceline.errors import ConfigError
from paceline.sampling.params import SamplingParams

HEAD_TOP_N = 64
ROWS_HINT = 4  # a few heads of one sequence


class MedusaHead(torch.nn.Module):
    """ResBlocks, then a linear layer: its own output layer, or what comes before the target's."""

    def __init__(self, tensors: HeadTensors) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(_linear(*block) for block in tensors.blocks)
        last = tensors.map if tensors.output is None else tensors.output
        self.last = torch.nn.Identity() if last is None else _linear(last)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + F.silu(block(hidden))
        result: torch.Tensor = self.last(hidden)
        return result


class MedusaHeads(torch.nn.Module):
    """hidden [rows, hidden_size] -> logits [heads, rows, width of the target's output layer].

    `output`: the target's output layer; a whole one for heads that need it, see `medusa_folder`.
    After `attach`, `final_hidden` [samples, hidden_size] is what went into the output layer last.
    """

    draft_vocab: torch.Tensor | None

    def __init__(self, tensors: MedusaTensors, output: torch.nn.Linear) -> None:
        super().__init__()
        weight = output.weight.detach()
        # for `pack_linears`, which asks a model
        self.dtype, self.device = weight.dtype, weight.device
        self.num_heads, self._width = len(tensors.heads), weight.shape[0]
        heads = torch.nn.ModuleList(MedusaHead(each) for each in tensors.heads)
        self.heads = heads.to(self.device)
        self.register_buffer("draft_vocab", tensors.draft_vocab)
        self.output: torch.nn.Module | None = None
        if tensors.needs_output:
            ids = slice(None) if tensors.draft_vocab is None else tensors.draft_vocab
            bias = None if output.bias is None else output.bias.detach()[ids]
            self.output = _linear(weight[ids], bias)
        self.final_hidden: torch.Tensor | None = None
        self.to(self.device)
        pack_linears(self, ROWS_HINT)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        states = torch.stack([head(hidden) for head in self.heads])
        if self.output is None:
            return states
        logits: torch.Tensor = self.output(states)
        if self.draft_vocab is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self._width), float("-inf"))
        full[..., self.draft_vocab] = logits
        return full

    def attach(self, hf_model: Any) -> None:
        """Look at what goes into the output layer, in each forward from now on. Call it when no
        layer will be replaced any more."""
        layer = hf_model.get_output_embeddings()

        def keep(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            self.final_hidden = arguments[0].reshape(-1, arguments[0].shape[-1])

        layer.register_forward_pre_hook(keep, prepend=True)


def read_heads(hf_model: Any, folder: Path) -> MedusaTensors:
    """The heads in `folder` for a loaded model; `ConfigError` if they do not fit it. Call it before
    weights are packed."""
    output = hf_model.get_output_embeddings()
    if type(output) is not torch.nn.Linear:
        raise ConfigError(
            f"{type(hf_model).__name__} has no plain output layer: Medusa heads are not supported"
        )
    width, hidden_size = output.weight.shape
    return read_medusa(folder, hidden_size, width, output.weight.dtype)


@dataclass(frozen=True, slots=True)
class HeadRow:
    """How a row of a head's logits becomes candidates; `output_index`: of the place, for noise."""

    sampling: SamplingParams
    output_index: int


class HeadSampler:
    """From rows of a pass to `StepResult.head_token_ids`.

    `head_logits`: rows of the pass's logits -> logits [heads, rows, width] of the heads.
    """

    def __init__(
        self,
        num_heads: int,
        vocab_size: int,
        head_logits: Callable[[Sequence[int]], torch.Tensor],
    ) -> None:
        self._num_heads, self._vocab_size = num_heads, vocab_size
        self._head_logits = head_logits

    def add(self, parts: Sequence[PassPart], results: Sequence[StepResult]) -> None:
        """Fill in the candidates of the items that ask for them; call it right after the pass."""
        asked = [
            (part, result)
            for part, result in zip(parts, results, strict=True)
            if part.item.num_head_candidates and part.rows
        ]
        if not asked:
            return
        deciding = [
            deciding_row(part.item, result.token_ids, result.num_accepted) for part, result in asked
        ]
        logits = self._head_logits(
            [part.sampled[row] for (part, _), row in zip(asked, deciding, strict=True)]
        )
        # head 0 guesses what comes after the token of the deciding row
        rows = [
            HeadRow(head_sampling(part.item.sampling), part.rows[row].output_index + 1 + head)
            for head in range(self._num_heads)
            for (part, _), row in zip(asked, deciding, strict=True)
        ]
        num_best = max(part.item.num_head_candidates for part, _ in asked)
        ranks = rank_rows(logits[..., : self._vocab_size].flatten(0, 1), rows, num_best)
        for place, (part, result) in enumerate(asked):
            count = part.item.num_head_candidates
            result.head_token_ids = tuple(best[:count] for best in ranks[place :: len(asked)])


def rank_rows(
    logits: torch.Tensor, rows: Sequence[HeadRow], num_best: int
) -> list[tuple[int, ...]]:
    """The `num_best` best ids of each row of logits [rows, vocab_size], lowest id on ties.

    What `BatchedSampler.rank` does, from the row's HEAD_TOP_N most likely ids alone: only they are
    filtered, and have noise. Fewer where fewer are possible, none where the row holds NaN.
    """
    if any(row.sampling.logit_bias for row in rows):
        logits = logits.to(torch.float64, copy=True)
        for values, row in zip(logits, rows, strict=True):
            for token_id, bias in row.sampling.logit_bias:
                values[token_id : token_id + 1] += bias  # nothing beyond the vocabulary
    top = logits.topk(min(HEAD_TOP_N, logits.shape[1]))
    # the rest is too little for a GPU
    scores, token_ids = top.values.double().cpu(), top.indices.cpu()
    if not all(row.sampling.is_greedy for row in rows):
        keys = make_keys(
            [(row.sampling.seed, row.sampling.choice, row.output_index) for row in rows],
            token_ids.device,
        )
        noise = gumbel(token_words(token_ids, keys))
        for place, row in enumerate(rows):
            if not row.sampling.is_greedy:
                scaled = (scores[place] - scores[place].max()) / row.sampling.temperature
                scores[place] = mask_scaled(scaled, row.sampling) + noise[place]
    ranks = []
    for listed, ids in zip(scores.tolist(), token_ids.tolist(), strict=True):
        order = sorted((-score, i) for score, i in zip(listed, ids, strict=True) if isfinite(score))
        has_nan = any(map(isnan, listed))
        ranks.append(() if has_nan else tuple(token_id for _, token_id in order[:num_best]))
    return ranks


def _linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.nn.Linear:
    rows, columns = weight.shape
    linear = torch.nn.Linear(columns, rows, bias=bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return linear
