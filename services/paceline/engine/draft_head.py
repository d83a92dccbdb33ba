"""An output layer that computes only part of the vocabulary, for small drafts.

A small draft spends more time in its output layer than in all of its layers together. Only a
draft may be cut like this: the tokens that are left out can never be proposed, which costs a
little acceptance and never correctness.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from paceline.engine.json_files import read_json
from paceline.engine.vocabulary import MAX_TOKEN_IDS
from paceline.errors import ConfigError

DRAFT_VOCAB = "draft_vocab.json"


class SubsetHead(torch.nn.Module):
    """The rows `token_ids` of an output layer; every other logit is -inf, the width is kept."""

    token_ids: torch.Tensor

    def __init__(self, head: torch.nn.Linear, token_ids: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("token_ids", token_ids.to(head.weight.device))
        rows = head.weight.detach()[self.token_ids]
        self.rows = torch.nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        self.rows.weight = torch.nn.Parameter(rows.clone(), requires_grad=False)
        self.out_features = head.out_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = hidden.new_full((*hidden.shape[:-1], self.out_features), float("-inf"))
        logits[..., self.token_ids] = self.rows(hidden)
        return logits


def read_draft_vocab(folder: Path) -> list[int] | None:
    """The ids that the folder's draft may propose, ascending; None: all. `ConfigError` for a file
    that lists no ids; whether the model has them is for `cut_head`."""
    path = folder / DRAFT_VOCAB
    if not path.is_file():
        return None
    fix = "build or download the draft again"
    token_ids = read_json(path, fix)
    if not _are_rows(token_ids, MAX_TOKEN_IDS):
        raise ConfigError(f"{path} is no list of ascending token ids: {fix}")
    return list(token_ids)


def cut_head(hf_model: Any, folder: Path, common_ids: Sequence[int] | None = None) -> None:
    """Cut the model's output layer to the ids in the folder's `draft_vocab.json`, if it has one.

    `common_ids`: those of them that the target's tokenizer has too; none but these are computed.
    """
    token_ids = read_draft_vocab(folder)
    head = hf_model.get_output_embeddings()
    if token_ids is not None and (
        head.bias is not None or not _are_rows(token_ids, head.out_features)
    ):
        raise ConfigError(
            f"{folder / DRAFT_VOCAB} does not fit the model: build or download the draft again"
        )
    if common_ids is not None and head.bias is None:  # with a bias all are computed
        token_ids = sorted(common_ids)
    if token_ids is not None:
        hf_model.set_output_embeddings(SubsetHead(head, torch.tensor(token_ids)))


def _are_rows(token_ids: Any, num_rows: int) -> bool:
    """A non-empty list of ascending row numbers."""
    if not isinstance(token_ids, list) or not all(type(i) is int for i in token_ids):
        return False
    is_ascending = all(left < right for left, right in pairwise(token_ids))
    return is_ascending and bool(token_ids) and token_ids[0] >= 0 and token_ids[-1] < num_rows
