"""A draft in training: a few layers, final norm and two maps around the target's embeddings.

The draft keeps the target's embeddings and output layer as they are. It learns its layers (which
start as layers of the target, or from noise when they have another shape), the final norm, and a
map in front of the output layer, which starts as the least-squares fit from the draft's to the
target's hidden states. A narrower draft learns a second map, from the target's embeddings to its
own width, which starts as their principal directions. (Both maps are folded into the embeddings
and the output layer when the draft is composed: they cost nothing at run time.)

Knows models whose parts are named as Llama's are. How training proceeds is `distill`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModel

from paceline.engine.fused_loss import blended_divergence
from paceline.errors import ConfigError

FIT_CHATS = 100
REJECTION_WEIGHT = 4
# Families whose layers, names and scales are all that a draft of theirs needs. (Others scale
# embeddings or logits, or have experts, or layers of several kinds.)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# What a smaller draft may have otherwise than its target.
SHAPE_KEYS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what is trained; goes into the asset's draft.json.

    `layers`: of the target, that the draft starts from; empty when `student_config` gives it a
    shape of its own (keys of SHAPE_KEYS). `vocab`: tokens that the draft can propose; 0: all.
    `init`: digest of the draft that it goes on from, which has that shape.
    """

    layers: tuple[int, ...] = ()
    vocab: int = 8192
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
    student_config: Mapping[str, int] = field(default_factory=dict)
    init: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """A chat with the target's last hidden states (after the final norm), bfloat16.

    `places`: rows where a draft failed in production; such a row counts REJECTION_WEIGHT times.
    """

    ids: torch.Tensor
    hidden: torch.Tensor
    places: tuple[int, ...] = ()

    def rows(self, skip: int, shift: int = 0) -> torch.Tensor:
        """The rows that losses are over, behind the first `skip` (texts of rejections begin
        anywhere, so nothing of them is known already) and `shift`."""
        first = shift if self.places else skip + shift
        kept = torch.arange(min(first, len(self.ids)), len(self.ids))
        again = torch.tensor([place for place in self.places if place >= first], dtype=torch.long)
        return torch.cat([kept, again.repeat(REJECTION_WEIGHT - 1)])


def spread_layers(num_layers: int, num_kept: int) -> tuple[int, ...]:
    """The first two layers and the others in one run behind the middle of the target.

    A rule of thumb: early layers make sense of the input alone, and the heads that copy what
    followed an earlier occurrence were found a little behind the middle.
    """
    if not 1 <= num_kept <= num_layers:
        raise ConfigError(f"the target has {num_layers} layers: a draft may keep 1 to {num_layers}")
    num_first = min(2, num_kept)
    rest = num_kept - num_first
    start = min(max(num_layers * 8 // 15, num_first), num_layers - rest)
    return (*range(num_first), *range(start, start + rest))


def draft_config(target: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """What the draft's config.json has otherwise than the target's; `ConfigError` if impossible."""
    num_layers = target["num_hidden_layers"]
    if recipe.student_config:
        changes = _checked_shape(target, recipe.student_config)
        kinds = [0] * changes["num_hidden_layers"]  # of a kind as the target's first layer
    else:
        layers = recipe.layers
        if not layers or len(set(layers)) < len(layers) or not set(layers) <= {*range(num_layers)}:
            raise ConfigError(
                f"layers must be distinct numbers from 0 to {num_layers - 1}, the target's: "
                f"{' '.join(map(str, layers)) or 'none given'}"
            )
        changes = {"num_hidden_layers": len(layers)}
        kinds = list(layers)
    if target.get("layer_types"):
        changes["layer_types"] = [target["layer_types"][layer] for layer in kinds]
    return {**changes, "tie_word_embeddings": False}


def _checked_shape(target: Mapping[str, Any], given: Mapping[str, int]) -> dict[str, Any]:
    """The shape keys; the target's own where the student's config says nothing."""
    others = sorted(set(given) - set(SHAPE_KEYS))
    if others:
        raise ConfigError(
            f"a student's config may have {', '.join(SHAPE_KEYS)}; not {others[0]}: "
            "everything else is the target's"
        )
    for key, value in given.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{key} of the student's config must be a whole number above 0")
    shape: dict[str, Any] = {key: target[key] for key in SHAPE_KEYS if target.get(key)} | {**given}
    heads, hidden = shape["num_attention_heads"], shape["hidden_size"]
    head_dim = shape.get("head_dim") or (0 if hidden % heads else hidden // heads)
    if not head_dim or head_dim % 2:
        raise ConfigError(f"the student's {heads} heads do not fit hidden_size {hidden}")
    if heads % shape.get("num_key_value_heads", heads):
        raise ConfigError("the student's num_key_value_heads must divide num_attention_heads")
    if hidden > target["hidden_size"]:
        raise ConfigError(f"the student may not be wider than the target ({target['hidden_size']})")
    for key in ("num_hidden_layers", "intermediate_size"):
        if shape[key] > target[key]:
            raise ConfigError(f"{key} of the student may not exceed the target's ({target[key]})")
    target_heads = target["num_attention_heads"]
    target_dim = target.get("head_dim") or target["hidden_size"] // target_heads
    if heads * head_dim > target_heads * target_dim:
        raise ConfigError(
            "num_attention_heads x head_dim of the student may not exceed the target's "
            f"({target_heads} x {target_dim})"
        )
    return {**shape, "head_dim": head_dim}


class Student(torch.nn.Module):
    """Layers, final norm and maps; the embeddings are the target's and stay fixed."""

    def __init__(self, target: Any, recipe: Recipe) -> None:
        super().__init__()
        changes = draft_config(target.config.to_dict(), recipe)
        config = copy.deepcopy(target.config)
        # It gets the target's embeddings: one row of its own is enough until then.
        changes |= {"vocab_size": 1, "pad_token_id": None, "attention_dropout": 0.0}
        for key, value in changes.items():
            setattr(config, key, value)
        self.trunk = AutoModel.from_config(config, dtype=torch.float32)
        self.trunk.embed_tokens = None
        for layer, source in zip(self.trunk.layers, recipe.layers, strict=False):
            layer.load_state_dict(target.model.layers[source].state_dict())
        self.embed = target.model.embed_tokens.requires_grad_(False)
        width = self.embed.weight.shape[1]
        self.embed_map = None
        if config.hidden_size != width:
            self.embed_map = torch.nn.Linear(width, config.hidden_size, bias=False)
            directions = principal_directions(self.embed.weight, config.hidden_size)
            self.embed_map.weight.data.copy_(directions)
        self.head_map = torch.nn.Linear(config.hidden_size, width, bias=False)
        self.to(self.embed.weight.device)

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        """Final-norm output, float32 [batch, length, hidden]."""
        with torch.autocast(ids.device.type, torch.bfloat16):
            embeddings = self.embed(ids)
            if self.embed_map is not None:
                embeddings = self.embed_map(embeddings).float()
            states = self.trunk(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        result: torch.Tensor = states.float()
        return result

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The draft's guess of the target's last hidden state."""
        guess: torch.Tensor = self.head_map(self.features(ids))
        return guess

    def trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}


@torch.no_grad()
def principal_directions(embeddings: torch.Tensor, width: int) -> torch.Tensor:
    """[width, hidden]: the projection that keeps most of the embeddings' squared length."""
    gram = embeddings.float().T @ embeddings.float()
    directions: torch.Tensor = torch.linalg.eigh(gram).eigenvectors[:, -width:].flip(-1).T
    return directions


@torch.no_grad()
def ridge_map(features: Sequence[torch.Tensor], hidden: Sequence[torch.Tensor]) -> torch.Tensor:
    """[out, in]: the least-squares map from rows of `features` to rows of `hidden`, damped.

    It is the same for every metric, so it is also best in squared logit error.
    """
    size, out = features[0].shape[1], hidden[0].shape[1]
    gram = torch.zeros(size, size, device=features[0].device)
    cross = torch.zeros(size, out, device=features[0].device)
    for rows, goals in zip(features, hidden, strict=True):
        gram += rows.float().T @ rows.float()
        cross += rows.float().T @ goals.float()
    gram += 1e-2 * gram.diagonal().mean() * torch.eye(size, device=gram.device)
    return torch.linalg.solve(gram, cross).T


@torch.no_grad()
def fit_head_map(student: Student, examples: Sequence[Example], skip: int) -> None:
    """Set the head map to the least-squares fit over the examples."""
    device = student.head_map.weight.device
    features = [student.features(e.ids[None].to(device))[0, skip:] for e in examples]
    fitted = ridge_map(features, [e.hidden[skip:].to(device) for e in examples])
    student.head_map.weight.copy_(fitted)


@torch.inference_mode()
def choose_vocab(head: torch.Tensor, examples: Sequence[Example], recipe: Recipe) -> torch.Tensor:
    """Ascending ids of the tokens with the largest mean target probability plus frequency.

    All of them for `vocab` 0, and where there are no more.
    """
    if not 0 < recipe.vocab < len(head):
        return torch.arange(len(head))
    mass, count, rows = torch.zeros(len(head)), torch.zeros(len(head)), 0
    weight = head.bfloat16()
    for example in examples[: 2 * FIT_CHATS]:
        hidden = example.hidden[recipe.skip :].to(weight.device)
        logits = torch.nn.functional.linear(hidden, weight)
        mass += logits.float().softmax(dim=-1).sum(dim=0).cpu()
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
        ridge = 1e-6 * metric.diagonal().mean() * torch.eye(len(metric), device=metric.device)
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
