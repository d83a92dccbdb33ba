"""Medusa heads in training, on a target's stored last hidden states, and what they are worth.

Head h guesses, from the hidden state at position t, the target's law at t + 1 + h (of the token
at t + 2 + h): first its hidden state there, then the target's own output layer. So a head is one
ResBlock and a square map, which starts as the least-squares fit. In the published layout the map
is multiplied into an output layer of the head's own, which then has as many weights as the
target's.

How training proceeds is `distill`'s, the layout of the files `medusa_folder`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from paceline.engine.chat_files import Chat
from paceline.engine.distill import read_average, save_whole
from paceline.engine.distill_data import hidden_states
from paceline.engine.draft_report import TEMPERATURES, coupled_acceptance
from paceline.engine.medusa_folder import MAX_HEADS, WEIGHTS, HeadTensors, MedusaTensors
from paceline.engine.medusa_source import HEAD_CONFIG
from paceline.engine.packed import pack_int8
from paceline.engine.student import Example, Loss, Recipe, ridge_map
from paceline.errors import ConfigError

TOP_RANKS = 3
TREE_NODES = 8
_CHUNK_ROWS = 128

# A position's guesses: hidden states [rows, hidden] -> (logits [rows, ids], the ids [ids]).
HeadLogits = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class HeadInTraining(torch.nn.Module):
    """hidden [rows, hidden] -> guesses [rows, hidden] of the target's hidden states."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)
        self.map = torch.nn.Linear(size, size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, torch.bfloat16):
            changed = torch.nn.functional.silu(self.linear(hidden)).float()
            guess: torch.Tensor = self.map(hidden + changed)
        return guess.float()


class HeadsObjective(torch.nn.Module):
    """Several heads, each against the target's hidden states so many places on."""

    def __init__(self, num_heads: int, size: int, loss: Loss, recipe: Recipe) -> None:
        if not 1 <= num_heads <= MAX_HEADS:
            raise ConfigError(f"Medusa heads may be 1 to {MAX_HEADS}")
        super().__init__()
        self.heads = torch.nn.ModuleList(HeadInTraining(size) for _ in range(num_heads))
        self._loss, self._skip = loss, recipe.skip

    def trained(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.heads.named_parameters())

    def loss(self, batch: Sequence[Example], done: float) -> tuple[torch.Tensor, float, int]:
        device = self.heads[0].map.weight.device
        total, divergences, num_rows = torch.zeros((), device=device), [], 0
        for number, head in enumerate(self.heads):
            rows = [example.rows(self._skip, number + 1) for example in batch]
            pairs = [
                (e.hidden[at - number - 1], e.hidden[at]) for e, at in zip(batch, rows, strict=True)
            ]
            now, later = (torch.cat(part).to(device) for part in zip(*pairs, strict=True))
            if not len(now):
                continue
            loss, divergence = self._loss(head(now.float()), later, done)
            total = total + loss / len(self.heads)
            divergences.append(divergence)
            num_rows = max(num_rows, len(now))
        return total, sum(divergences) / len(divergences), num_rows

    @torch.no_grad()
    def fit_maps(self, examples: Sequence[Example]) -> None:
        for number, head in enumerate(self.heads):
            rows = [_shifted(example.hidden[self._skip :], number + 1) for example in examples]
            now, later = zip(*rows, strict=True)
            head.map.weight.copy_(ridge_map(now, later))


def _shifted(hidden: torch.Tensor, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that have another `places` rows later, and those."""
    return hidden[: max(len(hidden) - places, 0)], hidden[places:]


def write_heads(
    work: Path, vocab: torch.Tensor, base: str, out: Path, *, output: torch.Tensor | None = None
) -> None:
    """The averaged weights as a folder of heads of the model `base`.

    Small (matrices int8, the ids of `vocab`), or, given the target's output layer, in the
    published layout: with one of its own each, in the type of that.
    """
    average = read_average(work)
    num_heads = 1 + max(int(name.partition(".")[0]) for name in average)
    config = {
        "medusa_num_heads": num_heads,
        "medusa_num_layers": 1,
        "base_model_name_or_path": base,
    }
    tensors = {}
    for name, tensor in average.items():
        number, _, part = name.partition(".")
        if part.startswith("linear"):
            tensors[f"{number}.0.{part}"] = tensor
        elif output is not None:
            tensors[f"{number}.1.weight"] = (output.float() @ tensor).to(output.dtype)
        else:
            tensors[name] = tensor
    if output is None:
        tensors = pack_int8(tensors)
        tensors["draft_vocab"] = vocab.int()
        config["medusa_draft_vocab_size"] = len(vocab)
    out.mkdir(parents=True, exist_ok=True)
    save_whole(tensors, out / WEIGHTS)
    (out / HEAD_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True, slots=True)
class HeadFigures:
    """`top`: how often the target's greedy token is among the head's first 1, 2, ... guesses, in
    greedy answers; `coupled`: acceptance by temperature, in the chats as they are; None where no
    answer is long enough for the head."""

    top: tuple[float, ...]
    coupled: dict[float, float | None]


@dataclass(frozen=True, slots=True)
class HeadsReport:
    """`accepted_chain`, `accepted_tree`: mean accepted tokens of a pass at T = 0; the target's own
    token comes on top. The tree has the nodes that are most often right, heads independent."""

    num_tokens: int
    heads: tuple[HeadFigures, ...]
    accepted_chain: float
    accepted_tree: float
    tree_nodes: int


def head_logits(head: HeadTensors, tensors: MedusaTensors, output: torch.Tensor) -> HeadLogits:
    """What one head of a folder computes; `output`: the target's output layer."""
    ids = torch.arange(len(output)) if tensors.draft_vocab is None else tensors.draft_vocab
    ids = ids.to(output.device)
    rows = output[ids] if head.output is None else head.output
    moved = torch.nn.functional.linear

    def logits(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for weight, bias in head.blocks:
            change = moved(hidden, weight.to(hidden), bias.to(hidden))
            hidden = hidden + torch.nn.functional.silu(change)
        if head.map is not None:
            hidden = moved(hidden, head.map.to(hidden))
        return moved(hidden, rows.to(hidden)), ids

    return logits


@torch.inference_mode()
def measure_heads(
    target: Any, tensors: MedusaTensors, greedy: Sequence[Chat], sampled: Sequence[Chat]
) -> HeadsReport:
    """`greedy`: chats whose answers the target gave at T = 0; `sampled`: chats as they come."""
    output = target.get_output_embeddings().weight
    heads = [head_logits(head, tensors, output) for head in tensors.heads]
    ranks = torch.cat([_ranks(heads, output, rows) for rows in _answers(target, greedy)])
    coupled = _coupled(heads, output, _answers(target, sampled))
    tops = [[float((column < k).float().mean()) for k in (1, 2, 3)] for column in ranks.T]
    tree = best_tree([[top[0], top[1] - top[0], top[2] - top[1]] for top in tops], TREE_NODES)
    chain = [tuple([0] * depth) for depth in range(1, len(heads) + 1)]
    return HeadsReport(
        num_tokens=len(ranks),
        heads=tuple(HeadFigures(tuple(t), c) for t, c in zip(tops, coupled, strict=True)),
        accepted_chain=accepted(ranks, chain),
        accepted_tree=accepted(ranks, tree),
        tree_nodes=len(tree),
    )


def _answers(target: Any, chats: Sequence[Chat]) -> list[torch.Tensor]:
    """Hidden states of each answer's rows: the first one decides the answer's first token."""
    return [
        states[chats[index].prompt_len - 1 : -1].to(target.device).float()
        for index, states in hidden_states(target.model, chats)
    ]


def _ranks(heads: Sequence[HeadLogits], output: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """[rows, heads]: the place of the target's greedy token among each head's guesses.

    Only rows that every head has a later row for.
    """
    num_rows = max(len(hidden) - len(heads), 0)
    greedy = (hidden @ output.T.to(hidden)).argmax(dim=-1)
    columns = []
    for number, head in enumerate(heads):
        logits, ids = head(hidden[:num_rows])
        best = ids[logits.topk(min(TOP_RANKS, len(ids)), dim=-1).indices]
        hit = best == greedy[number + 1 : number + 1 + num_rows, None]
        place = hit.int().argmax(dim=-1)
        columns.append(torch.where(hit.any(dim=-1), place, TOP_RANKS))
    return torch.stack(columns, dim=-1)


def _coupled(
    heads: Sequence[HeadLogits], output: torch.Tensor, answers: Sequence[torch.Tensor]
) -> list[dict[float, float | None]]:
    """Mean acceptance of each head, as if its predecessors were right."""
    sums, counts = [dict.fromkeys(TEMPERATURES, 0.0) for _ in heads], [0] * len(heads)
    for hidden in answers:
        for number, head in enumerate(heads):
            now, later = _shifted(hidden, number + 1)
            counts[number] += len(now)
            for start in range(0, len(now), _CHUNK_ROWS):
                guess, ids = head(now[start : start + _CHUNK_ROWS])
                truth = later[start : start + _CHUNK_ROWS] @ output.T.to(hidden)
                for temperature in TEMPERATURES:
                    log_target = (truth / temperature).log_softmax(dim=-1)[:, ids]
                    log_head = (guess / temperature).log_softmax(dim=-1)
                    found = coupled_acceptance(log_target, log_head)
                    sums[number][temperature] += float(found.sum())
    return [
        {temperature: total / count if count else None for temperature, total in by.items()}
        for by, count in zip(sums, counts, strict=True)
    ]


def best_tree(chances: Sequence[Sequence[float]], num_nodes: int) -> list[tuple[int, ...]]:
    """The nodes (choices of head 0, 1, ...) that are most likely all right, heads independent.

    `chances[h][k]`: that guess k of head h is right. Every node's parent is among them.
    """
    paths: dict[tuple[int, ...], float] = {}
    for depth in range(1, min(len(chances), num_nodes) + 1):
        for path in product(range(TOP_RANKS), repeat=depth):
            chance = 1.0
            for head, choice in enumerate(path):
                chance *= chances[head][choice]
            paths[path] = chance
    found = sorted(paths, key=lambda path: (-paths[path], len(path), path))
    return found[:num_nodes]


def accepted(ranks: torch.Tensor, nodes: Sequence[tuple[int, ...]]) -> float:
    """Mean length of the path of right guesses inside of a tree; `ranks` [rows, heads]."""
    hits = [(ranks[:, : len(node)] == torch.tensor(node).to(ranks)).all(-1) for node in nodes]
    return float(torch.stack(hits).sum(dim=0).float().mean())
