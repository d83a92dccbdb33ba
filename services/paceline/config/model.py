"""A model to serve: `target.model` and `draft.model`."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from paceline.config.section import Section

BUILTIN_SOURCES = ("toy", "timed")  # engines without weights
# What torch calls a device; whether this machine has it is found out when the model loads.
DEVICE = re.compile(r"auto|(cpu|cuda|mps|xpu|hpu|npu|mtia)(:(0|[1-9][0-9]{0,2}))?")


class ModelConfig(Section):
    """Which weights to serve and how to hold them."""

    source: str = Field(
        "toy",
        max_length=1024,
        description="local folder, Hub id, an alias (smollm2-135m), or toy / timed",
    )
    target_tokenizer: str = Field(
        "",
        max_length=1024,
        description="a draft's: the target's folder, Hub id or alias if its tokenizer is another",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="weights and KV cache element type"
    )
    device: str = Field("auto", description="torch device, or auto: cuda when present, else cpu")
    num_threads: int = Field(
        1, ge=1, le=256, description="torch intra-op threads of this process (CPU)"
    )
    max_model_len: int = Field(2048, ge=8, le=1_048_576, description="context limit in tokens")
    block_size: int = Field(16, ge=1, le=256, description="KV block size in tokens")
    num_kv_blocks: int = Field(
        1024, ge=2, le=1 << 24, description="KV blocks in the pool (capacity = blocks x block size)"
    )
    tensor_parallel_size: int = Field(
        1, ge=1, le=64, description="ranks that share this model, one process and device each"
    )
    tensor_parallel_timeout_s: float = Field(
        10.0, gt=0, le=600, description="a pass that hangs so long on a rank ends the replica"
    )
    quantization: Literal["none", "int8", "int4", "gguf"] = Field(
        "none", description="weights in memory: int8, int4 (CPU kernels; torchao on CUDA), gguf"
    )
    enable_prefix_caching: bool = Field(
        True, description="keep KV blocks of finished texts for later ones that begin alike"
    )
    attention_backend: Literal["auto", "sdpa", "varlen"] = Field(
        "auto", description="sdpa runs anywhere; varlen: torch's paged CUDA kernel (fp16, bf16)"
    )
    enforce_eager: bool = Field(False, description="never use CUDA graphs (CPU never does)")
    reproducible: bool = Field(
        False, description="same bits for any batch, K and draft (CPU, slower): README, The engine"
    )
    toy_error_rate: float = Field(
        0.0, ge=0.0, le=1.0, description="toy model: share of steps whose logits are disturbed"
    )
    toy_head_error_rate: float = Field(
        0.2, ge=0.0, le=1.0, description="toy model: share of its Medusa heads' guesses that fail"
    )
    toy_step_ms: float = Field(
        0.0, ge=0.0, le=10_000.0, description="timed model: cost of a pass in milliseconds"
    )
    toy_row_ms: float = Field(
        0.0, ge=0.0, le=1_000.0, description="timed model: added cost of each row in milliseconds"
    )

    @model_validator(mode="after")
    def _translation(self) -> ModelConfig:
        if self.target_tokenizer and self.tensor_parallel_size > 1:
            raise ValueError("target_tokenizer and tensor_parallel_size > 1 do not go together yet")
        return self

    @field_validator("device")
    @classmethod
    def _device_name(cls, device: str) -> str:
        if not DEVICE.fullmatch(device):
            raise ValueError(f"{device!r} is no device: write auto, cpu, cuda, cuda:0 or mps")
        return device
