"""Model folders for tests: what the files of a model say, with weights of zeros."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 3, 4, 2, 8, 10


def model_folder(path: Path, tokens: tuple[str, ...] = ("a", "b"), **config: Any) -> Path:
    """A folder that says what a model's does, with weights of zeros."""
    path.mkdir()
    given = {
        "num_hidden_layers": NUM_LAYERS, "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB,
        "max_position_embeddings": 128,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(given | config))
    shapes = {"model.embed_tokens.weight": [VOCAB, 32], "layers.0.q_proj.weight": [32, 32],
              "norm.weight": [32]}  # fmt: skip
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))
    vocab = {token: index for index, token in enumerate(tokens)}
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    (path / "chat_template.jinja").write_text("{{ messages }} {{ tools }}")
    return path
