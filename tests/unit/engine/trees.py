"""Random trees of proposals, some of whose nodes say the right thing, for tests of engines."""

from __future__ import annotations

import random
from collections.abc import Sequence

from paceline.engine.base import Engine, StepItem
from paceline.sampling.params import SamplingParams


def random_parents(rng: random.Random, num_nodes: int) -> tuple[int, ...]:
    return tuple(rng.randint(max(-1, node - 4), node - 1) for node in range(num_nodes))


def random_tree(
    rng: random.Random, num_nodes: int, goes_on: Sequence[int], vocab_size: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """(token ids, parents, how many of `goes_on` a path of the tree has).

    Somewhere among garbage lies a path of `goes_on`, and only that one is right: garbage differs
    from the right token of its place.
    """
    parents, token_ids, right, ends = [], [], -1, 0
    depth_on_path = {-1: 0}  # of nodes that are on the right path
    for node in range(num_nodes):
        extends = ends < len(goes_on) and rng.random() < 0.4
        parent = right if extends else rng.randint(-1, node - 1)
        parents.append(parent)
        depth = depth_on_path.get(parent)
        if extends:
            token_ids.append(goes_on[ends])
            ends, right = ends + 1, node
            depth_on_path[node] = ends
            continue
        token_id = rng.randrange(vocab_size)
        if depth is not None and depth < len(goes_on) and token_id == goes_on[depth]:
            token_id = (token_id + 1) % vocab_size
        token_ids.append(token_id)
    return tuple(token_ids), tuple(parents), ends


def decoded(
    engine: Engine, sequence_id: int, prompt: Sequence[int], num_tokens: int, law: SamplingParams
) -> tuple[int, ...]:
    """The tokens behind a prompt, one a pass; the sequence is freed."""
    engine.add(sequence_id)
    text = list(prompt)
    start = 0
    for index in range(num_tokens):
        item = StepItem(sequence_id, start, tuple(text[start:]), 1, law, output_index=index)
        start = len(text)
        text += engine.step([item])[0].token_ids
    engine.free(sequence_id)
    return tuple(text[len(prompt) :])
