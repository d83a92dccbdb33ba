"""A draft in training: a few layers, final norm and a square map around the target's embeddings.

The draft keeps the target's embeddings and output layer as they are. It learns a few layers that
start as layers of the target, the final norm, and a square map in front of the output layer,
which starts as the least-squares fit from the draft's to the target's hidden states. (The map is
folded into the output layer when the draft is composed: it costs nothing at run time.)

Knows Llama models only. How training proceeds is `distill`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel

from paceline.engine.fused_loss import blended_divergence

FIT_CHATS = 100


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what is trained; goes into the asset's draft.json."""

    layers: tuple[int, ...]  # of the target, that the draft starts from
    vocab: int = 8192  # tokens that the draft can propose
    held_out: int = 64  # chats at the end of the file that are never trained on
    skip: int = 20  # first positions of a chat without loss: every chat begins alike
    batch_tokens: int = 1300
    rate: float = 1e-3
    map_rate: float = 2e-3
    weight_decay: float = 0.01
    hidden_weight: float = 0.2
    overlap: float = 0.5
    decay_share: float = 0.3  # last part of the time, in which the rate falls to zero
    average: float = 0.99  # of the weights over steps
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Example:
    """A chat with the target's last hidden states (after the final norm), bfloat16."""

    ids: torch.Tensor
    hidden: torch.Tensor


class Student(torch.nn.Module):
    """Layers, final norm and head map; the embeddings are the target's and stay fixed."""

    def __init__(self, target: Any, layers: Sequence[int]) -> None:
        super().__init__()
        config = LlamaConfig(**target.config.to_dict())
        config.num_hidden_layers = len(layers)
        config.layer_types = None
        self.trunk = LlamaModel(config)
        self.trunk.embed_tokens = target.model.embed_tokens.requires_grad_(False)
        for layer, source in zip(self.trunk.layers, layers, strict=True):
            layer.load_state_dict(target.model.layers[source].state_dict())
        self.head_map = torch.nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        """Final-norm output, float32 [batch, length, hidden]."""
        with torch.autocast("cpu", torch.bfloat16):
            states = self.trunk(input_ids=ids, use_cache=False).last_hidden_state
        result: torch.Tensor = states.float()
        return result

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The draft's guess of the target's last hidden state."""
        guess: torch.Tensor = self.head_map(self.features(ids))
        return guess

    def trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}


@torch.no_grad()
def fit_head_map(student: Student, examples: Sequence[Example], skip: int) -> None:
    """Ridge regression from the draft's features to the target's hidden states.

    The least-squares map is the same for every metric, so it is also best in squared logit error.
    """
    size = student.head_map.in_features
    gram, cross = torch.zeros(size, size), torch.zeros(size, size)
    for example in examples:
        features = student.features(example.ids[None])[0, skip:]
        gram += features.T @ features
        cross += features.T @ example.hidden[skip:].float()
    gram += 1e-2 * gram.diagonal().mean() * torch.eye(size)
    student.head_map.weight.copy_(torch.linalg.solve(gram, cross).T)


@torch.inference_mode()
def choose_vocab(head: torch.Tensor, examples: Sequence[Example], recipe: Recipe) -> torch.Tensor:
    """Ascending ids of the tokens with the largest mean target probability plus frequency."""
    mass, count, rows = torch.zeros(len(head)), torch.zeros(len(head)), 0
    for example in examples[: 2 * FIT_CHATS]:
        logits = torch.nn.functional.linear(example.hidden[recipe.skip :], head.bfloat16())
        mass += logits.float().softmax(dim=-1).sum(dim=0)
        rows += len(logits)
    for example in examples:
        count += torch.bincount(example.ids, minlength=len(head))
    return (mass / rows + count / count.sum()).topk(recipe.vocab).indices.sort().values


class Loss:
    """Of a position: (1 - w) KL(target, draft) - w log(overlap of the two laws) + c |error|^2.

    w rises from 0 to `Recipe.overlap`; c is `Recipe.hidden_weight`; the error is that of the hidden
    state, measured in the logits that it causes. `rows` is the output layer of the vocabulary.
    """

    def __init__(self, rows: torch.Tensor, recipe: Recipe) -> None:
        self._rows = rows.bfloat16()
        self._recipe = recipe
        centered = rows - rows.mean(dim=0)  # softmax does not see a shift of all logits
        metric = centered.T @ centered / len(rows)
        ridge = 1e-6 * metric.diagonal().mean() * torch.eye(len(metric))
        self._factor = torch.linalg.cholesky(metric + ridge)

    def __call__(
        self, guess: torch.Tensor, hidden: torch.Tensor, done: float
    ) -> tuple[torch.Tensor, float]:
        """The loss, and the KL part as a number; `done` is the share of the run in [0, 1]."""
        weight = self._recipe.overlap * min(1.0, 2.0 * done)
        loss, divergence = blended_divergence(guess, hidden, self._rows, weight)
        error = (guess - hidden.float()) @ self._factor
        loss = loss + self._recipe.hidden_weight * error.square().sum(dim=-1).mean()
        return loss, divergence
