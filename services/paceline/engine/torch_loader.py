"""Loads a local safetensors folder into a `TorchEngine`, or says why it cannot be served.

Knows the Hugging Face folder format; downloads nothing, trusts no code and no pickle.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from paceline.config import ModelConfig
from paceline.engine.base import NO_ADAPTERS, EngineInfo
from paceline.engine.convert import load_gguf_model
from paceline.engine.draft_head import cut_head
from paceline.engine.graph_runner import GraphRunner
from paceline.engine.lora import CurrentPass, attach_adapters
from paceline.engine.medusa import MedusaHeads, read_heads
from paceline.engine.packed_linear import ROWS_HINT, pack_linears
from paceline.engine.paged_attention import ATTENTION_NAME, ShapeProbe
from paceline.engine.quantization import check_quantization, loading_arguments, pack_on_cpu
from paceline.engine.reproducible import TILE_ROWS, tile_linears
from paceline.engine.runner import ModelRunner
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.translated import TranslatedEngine
from paceline.engine.translated_folder import load_translation, target_info
from paceline.engine.varlen_attention import varlen_problem
from paceline.engine.vocabulary import find_tokenizer
from paceline.errors import ConfigError
from paceline.grammars import TokenGrammars, load_grammars
from paceline.models import gguf_file, num_token_ids, tokenizer_hash

if TYPE_CHECKING:
    from paceline.engine.tensor_parallel import RankGroup


logger = logging.getLogger(__name__)

# Layers that attend over everything before them, or over the last `sliding_window` positions.
LAYER_TYPES = {"full_attention", "sliding_attention"}


def load_torch_engine(
    model: ModelConfig,
    folder: Path,
    *,
    draft_top_n: int | None = None,
    adapters: Mapping[str, str] = NO_ADAPTERS,
    medusa: Path | None = None,
) -> TorchEngine | TranslatedEngine:
    """An engine with the weights of `folder`; `ConfigError` if they cannot be served.

    `adapters`: name -> PEFT folder. `medusa`: the folder of its heads. With
    `model.target_tokenizer` it has that one's vocabulary.

    Sets torch's intra-op threads for the whole process, as `model.num_threads` says.
    """
    if model.tensor_parallel_size > 1:
        raise ConfigError("tensor_parallel_size > 1 needs a Serve replica, which starts the ranks")
    translation, tokenizer_folder = None, folder
    if model.target_tokenizer:
        tokenizer_folder = find_tokenizer(model.target_tokenizer)
        translation = load_translation(folder, tokenizer_folder)
    common_ids = None if translation is None else translation.draft_ids
    runner, info = load_runner(
        model, folder, adapters=adapters, medusa=medusa, common_ids=common_ids
    )
    engine = TorchEngine(
        runner,
        info,
        draft_top_n=draft_top_n,
        enable_prefix_caching=model.enable_prefix_caching,
    )
    if translation is None:
        return engine
    announced = target_info(info, translation, tokenizer_folder)
    return TranslatedEngine(engine, translation, announced, draft_top_n=draft_top_n)


def load_runner(
    model: ModelConfig,
    folder: Path,
    *,
    group: RankGroup | None = None,
    adapters: Mapping[str, str] = NO_ADAPTERS,
    medusa: Path | None = None,
    common_ids: Sequence[int] | None = None,
) -> tuple[ModelRunner, EngineInfo]:
    """The weights of `folder` and what to announce of them; with `group`, this rank's share.
    `common_ids`: see `cut_head`."""
    torch.set_num_threads(model.num_threads)
    hf_config = load_hf_config(folder)
    check_servable(hf_config, model)
    if model.reproducible and group is not None:
        raise ConfigError("reproducible and tensor_parallel_size > 1 do not go together yet")
    device, gguf = pick_device(model.device), gguf_file(folder)
    check_quantization(model, device, gguf)
    hf_model = load_hf_model(model, folder, device, group)
    heads = _finish_loading(hf_model, folder, medusa, group)
    cut_head(hf_model, folder, common_ids)
    if model.quantization != "none" and device.type == "cpu":
        pack_on_cpu(hf_model, model.quantization, gguf)
    if group is None:  # a shard's layers are hooked by transformers: they have to stay
        pack_linears(hf_model, TILE_ROWS if model.reproducible else ROWS_HINT)
    if model.reproducible:
        tile_linears(hf_model)
    current = attach_adapters(hf_model, adapters, folder)
    if heads is not None:
        heads.attach(hf_model)
    probe, width = probe_model(hf_model)
    vocab_size = count_real_ids(folder, width)
    eos_ids = tuple(i for i in eos_token_ids(folder, hf_config) if i < vocab_size)
    info = EngineInfo(
        model_id=model.source,
        vocab_size=vocab_size,
        max_model_len=model.max_model_len,
        block_size=model.block_size,
        num_blocks=model.num_kv_blocks,
        tokenizer_hash=tokenizer_hash(folder),
        eos_token_ids=eos_ids,
        grammars=folder_grammars(folder, vocab_size, eos_ids),
        adapters=tuple(adapters),
        num_heads=0 if heads is None else heads.num_heads,
    )
    runner = make_runner(model, hf_model, probe, current, heads=heads, is_sharded=group is not None)
    return runner, info


def _finish_loading(
    hf_model: Any, folder: Path, medusa: Path | None, group: RankGroup | None
) -> MedusaHeads | None:
    """The model's heads; with `group`, once every rank has its weights."""
    tensors = None if medusa is None else read_heads(hf_model, medusa)
    output = hf_model.get_output_embeddings()
    if group is not None:
        needs_output = tensors is not None and tensors.needs_output
        output = group.finish_loading(hf_model, folder, needs_output=needs_output)
    return None if tensors is None else MedusaHeads(tensors, output)


def make_runner(
    model: ModelConfig,
    hf_model: Any,
    probe: ShapeProbe,
    adapters: CurrentPass | None,
    *,
    heads: MedusaHeads | None = None,
    is_sharded: bool,
) -> ModelRunner:
    """The runner that the device and the config ask for; `ConfigError` if they do not agree."""
    if hf_model.device.type == "cuda":
        # torch prefers cuDNN on Hopper and Blackwell, which plans for tens of milliseconds
        # whenever it meets a new length: here in nearly every pass.
        torch.backends.cuda.enable_cudnn_sdp(False)
    use_varlen = uses_varlen(model, hf_model, probe)
    use_graphs = hf_model.device.type == "cuda" and not model.enforce_eager and not is_sharded
    if not use_varlen and not use_graphs:
        return ModelRunner(
            hf_model,
            probe,
            model.num_kv_blocks,
            model.block_size,
            row_by_row=model.reproducible,
            adapters=adapters,
            heads=heads,
        )
    return GraphRunner(
        hf_model,
        probe,
        model.num_kv_blocks,
        model.block_size,
        max_model_len=model.max_model_len,
        use_varlen=use_varlen,
        use_graphs=use_graphs,
        adapters=adapters,
        heads=heads,
    )


def uses_varlen(model: ModelConfig, hf_model: Any, probe: ShapeProbe) -> bool:
    """Whether to attend by torch's paged kernel: when asked for, or by itself when it works."""
    if model.attention_backend == "sdpa":
        return False
    shapes = {shape for pair in probe.shapes.values() for shape in pair}
    if any(key != value for key, value in probe.shapes.values()):
        problem: str | None = "keys and values must have the same width"
    else:
        problem = varlen_problem(shapes, hf_model.dtype, hf_model.device, model.block_size)
    if problem is not None and model.attention_backend == "varlen":
        raise ConfigError(f"attention_backend varlen cannot be used here: {problem}; set sdpa")
    return problem is None


def pick_device(name: str) -> torch.device:
    """`auto` is the first CUDA device if there is one; anything else is torch's own name."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"model.device {name!r} is not a torch device: {error}") from error


def load_hf_config(folder: Path) -> Any:
    """The folder's model config; `ConfigError` if there is none that we can read."""
    gguf = gguf_file(folder)
    if gguf is None and not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: not a Hugging Face model folder")
    if gguf is None and not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} has no .safetensors file; other weight formats are not read")
    try:
        return AutoConfig.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            **({} if gguf is None else {"gguf_file": gguf.name}),
        )
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot read the model config in {folder}: {error}") from error


def check_servable(hf_config: Any, model: ModelConfig) -> None:
    """Refuse what would be computed wrongly: unknown layers, positions beyond the model's."""
    text = hf_config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or []) - LAYER_TYPES
    if kinds:
        raise ConfigError(f"{hf_config.model_type}: {', '.join(sorted(kinds))} is not supported")
    if getattr(text, "attn_logit_softcapping", None) is not None:
        raise ConfigError(f"{hf_config.model_type}: attention soft-capping is not supported")
    if getattr(text, "num_kv_shared_layers", None):
        raise ConfigError(f"{hf_config.model_type}: layers that share a cache are not supported")
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        # Beyond this length these change the rotation of *all* positions, cached ones included.
        limit = rope.get("original_max_position_embeddings") or limit
    if limit is not None and model.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {model.max_model_len} exceeds the model's {limit} positions; "
            f"set max_model_len to at most {limit}"
        )


def load_hf_model(
    model: ModelConfig, folder: Path, device: torch.device, group: RankGroup | None = None
) -> Any:
    """The model on its device, in eval mode, attending through our function."""
    transformers_logging.disable_progress_bar()
    dtype = getattr(torch, model.dtype)
    if (gguf := gguf_file(folder)) is not None:
        hf_model = load_gguf_model(gguf, dtype)
        hf_model.set_attn_implementation(ATTENTION_NAME)
    else:
        hf_model = _load_safetensors(model.quantization, folder, dtype, device, group)
    if not hf_model._supports_attention_backend:
        raise ConfigError(
            f"{type(hf_model).__name__} does not route attention through the attention interface"
        )
    return hf_model.to(device).eval()


def _load_safetensors(
    quantization: str,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None,
) -> Any:
    sharding = {} if group is None else {"distributed_config": group.sharding}
    try:
        hf_model, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            **sharding,
            **loading_arguments(quantization, device),
        )
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load {folder}: {error}") from error
    # transformers fills absent weights with random numbers and only logs it.
    if loading["missing_keys"] or loading["mismatched_keys"]:
        wrong = sorted(str(key) for key in [*loading["missing_keys"], *loading["mismatched_keys"]])
        raise ConfigError(f"{folder} lacks weights that its config.json asks for: {wrong[0]}, ...")
    return hf_model


def probe_model(hf_model: Any) -> tuple[ShapeProbe, int]:
    """One row through the model: how its layers call attention, and how wide its logits are.

    Every layer has to call our function exactly once, else it keeps state that we cannot rewind
    (a recurrent or hybrid model) or shares another layer's cache.
    """
    probe = ShapeProbe()
    row = torch.zeros(1, 1, dtype=torch.int64, device=hf_model.device)
    try:
        with torch.inference_mode():
            output = hf_model(
                input_ids=row,
                position_ids=row,
                use_cache=False,
                logits_to_keep=row[0],
                paged=probe,
            )
    except TypeError as error:
        raise ConfigError(f"{type(hf_model).__name__} cannot be served: {error}") from error
    num_layers = hf_model.config.get_text_config(decoder=True).num_hidden_layers
    if probe.num_calls != num_layers or set(probe.shapes) != set(range(num_layers)):
        raise ConfigError(
            f"{type(hf_model).__name__}: only {len(probe.shapes)} of {num_layers} layers "
            "are plain attention layers"
        )
    check_windows(hf_model.config, probe)
    return probe, output.logits.shape[-1]


def check_windows(hf_config: Any, probe: ShapeProbe) -> None:
    """Every layer must hand us the window that its config gives it.

    transformers puts windows into masks, of which our function gets none, and hands them over as
    a keyword too; a layer that forgets the keyword would see too much, in silence.
    """
    text = hf_config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * len(probe.windows)
    for layer, kind in enumerate(kinds):
        expected = window if kind == "sliding_attention" else None
        if probe.windows[layer] != expected or (expected is not None and expected < 1):
            raise ConfigError(
                f"{hf_config.model_type}: layer {layer} attends over a window of "
                f"{probe.windows[layer]} where its config says {expected}; not supported"
            )


def count_real_ids(folder: Path, width: int) -> int:
    """Ids that may be read and sampled: the tokenizer's, not the padding of the output layer.

    Added tokens may lie beyond the output layer (Gemma-3 1B has one, for images): the model has
    no row for them, so they are refused as prompts and never sampled.
    """
    num_ids, num_with_added = num_token_ids(folder)
    if num_ids > width:
        raise ConfigError(
            f"{folder}: the tokenizer has {num_ids} token ids but the model only {width} rows "
            "for them; they do not belong together"
        )
    return min(num_with_added, width)


def eos_token_ids(folder: Path, hf_config: Any) -> tuple[int, ...]:
    """End-of-sequence ids: the generation config's if it has any, else the model config's."""
    eos = None
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    if eos is None:
        eos = getattr(hf_config.get_text_config(decoder=True), "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (eos,)


def folder_grammars(
    folder: Path, vocab_size: int, eos_ids: tuple[int, ...]
) -> TokenGrammars | None:
    """Grammars over the folder's tokenizer; None, with a word in the log, where there are none."""
    if not eos_ids:
        logger.warning("%s names no EOS id: a structured output could not end", folder)
        return None
    try:
        return load_grammars(str(folder), vocab_size, eos_ids)
    except ValueError as error:
        logger.warning("no structured output with this model: %s", error)
        return None
