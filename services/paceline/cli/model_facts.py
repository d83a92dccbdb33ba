"""What the files of a model say about it: its shape, its size, its tokenizer. Loads no tensor."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import models
from paceline.cli.values import Json, dicts, mapping
from paceline.errors import ConfigError

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# A packed weight with its scales and offsets: int4 has them for every 32 weights.
PACKED_BYTES = {"int8": 1.01, "int4": 0.625, "gguf": 0.625}
NO_TEMPLATE, PLAIN_TEMPLATE, TOOLS_TEMPLATE = "none", "plain", "tools"
_TEMPLATE_FILE = "chat_template.jinja"
_EMBEDDINGS = ("embed_tokens", "wte", "lm_head", "shared")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """0 and None: the files do not say."""

    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    max_positions: int | None = None
    # Of every weight, and of those that quantization packs.
    num_weights: int = 0
    num_linear_weights: int = 0
    gguf_bytes: int = 0
    tokenizer_hash: str = ""
    chat_template: str = NO_TEMPLATE

    def weight_bytes(self, dtype: str, quantization: str) -> float:
        """In memory, as the engine holds them."""
        if self.gguf_bytes:
            return float(self.gguf_bytes)
        packed = self.num_linear_weights if quantization in PACKED_BYTES else 0
        plain = (self.num_weights - packed) * ELEMENT_BYTES[dtype]
        return plain + packed * PACKED_BYTES.get(quantization, 0.0)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Keys and values of one token in every layer."""
        width = self.num_kv_heads * self.head_dim
        return 2 * self.num_layers * width * ELEMENT_BYTES[dtype]


def find_folder(source: str) -> Path:
    """As `models.resolve`, but never downloads. Raises ConfigError."""
    is_hub = (
        source not in models.ALIASES
        and not Path(source).expanduser().exists()
        and models.HUB_ID.fullmatch(source) is not None
    )
    if not is_hub:
        return models.resolve(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        patterns = list(models.HUB_PATTERNS)
        found = snapshot_download(source, allow_patterns=patterns, local_files_only=True)
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model {source!r} is not in the local Hub cache: run `hf download {source}`, or let "
            "`paceline serve` download it"
        ) from error
    models.check_folder(Path(found))
    return Path(found)


def read_shape(folder: Path) -> ModelShape:
    """Raises ConfigError for files that cannot be read."""
    gguf = models.gguf_file(folder)
    if gguf is not None:
        return ModelShape(gguf_bytes=gguf.stat().st_size)
    config = _read(folder / "config.json")
    text = mapping(config.get("text_config")) or config
    heads = _count(text.get("num_attention_heads"))
    width = _count(text.get("hidden_size"))
    num_weights, num_linear = _weights(folder)
    positions = _count(text.get("max_position_embeddings"))
    return ModelShape(
        num_layers=_count(text.get("num_hidden_layers")),
        num_heads=heads,
        num_kv_heads=_count(text.get("num_key_value_heads")) or heads,
        head_dim=_count(text.get("head_dim")) or (width // heads if heads else 0),
        vocab_size=_count(text.get("vocab_size")),
        max_positions=positions or None,
        num_weights=num_weights,
        num_linear_weights=num_linear,
        tokenizer_hash=models.tokenizer_hash(folder),
        chat_template=_template_kind(folder),
    )


def template_kind(text: str) -> str:
    """A template that never looks at `tools` cannot show a model any."""
    if not text.strip():
        return NO_TEMPLATE
    return TOOLS_TEMPLATE if "tools" in text else PLAIN_TEMPLATE


def _template_kind(folder: Path) -> str:
    file = folder / _TEMPLATE_FILE
    if file.is_file():
        return template_kind(file.read_text(encoding="utf-8", errors="replace"))
    described = folder / "tokenizer_config.json"
    template = _read(described).get("chat_template") if described.is_file() else None
    if isinstance(template, list):
        template = "\n".join(str(item.get("template", "")) for item in dicts(template))
    return template_kind(template if isinstance(template, str) else "")


def _weights(folder: Path) -> tuple[int, int]:
    """(all weights, those of linear layers between the embeddings)."""
    total = linear = 0
    for shard in sorted(folder.glob("*.safetensors")):
        for name, tensor in _header(shard).items():
            shape = tensor.get("shape") if isinstance(tensor, dict) else None
            if name == "__metadata__" or not isinstance(shape, list):
                continue
            count = math.prod(_count(side) for side in shape)
            total += count
            if len(shape) == 2 and not any(word in name for word in _EMBEDDINGS):
                linear += count
    return total, linear


def _header(path: Path) -> Json:
    try:
        with path.open("rb") as file:
            (header_len,) = struct.unpack("<Q", file.read(8))
            if header_len > models.SAFETENSORS_HEADER_MAX:
                raise ValueError("its header is too long")
            return mapping(json.loads(file.read(header_len)))
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): download the model again") from error


def _read(path: Path) -> Json:
    try:
        return mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): download the model again") from error


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
