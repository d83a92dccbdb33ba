"""What `paceline doctor` makes of the models' facts: facts in, findings out. Pure.

Every finding that is not ok names the fix. The machine's part is in `doctor_machine`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cli import doctor_tokenizers
from paceline.cli.doctor_tokenizers import OverlapFacts, Status
from paceline.cli.model_facts import NO_TEMPLATE, PLAIN_TEMPLATE, ModelShape
from paceline.cli.values import size
from paceline.config import ModelConfig
from paceline.models import BUILTIN_SOURCES

# Python, torch and Ray in a replica, before its first weight. Measured: 0.35 GiB.
PROCESS_BYTES = 0.35 * 2**30
# What should stay free for passes: activations, logits, the page cache.
FREE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Finding:
    """`fact` is what was measured; `fix` says what to do about it, empty when all is well."""

    name: str
    status: Status
    fact: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    free_bytes: int
    has_bfloat16: bool = True


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model of the file. `key` is where it is configured; `problem` why it has no shape."""

    key: str
    config: ModelConfig
    max_seqs: int
    num_replicas: int = 1
    gpus_per_replica: float = 0.0
    shape: ModelShape | None = None
    problem: str = ""

    @property
    def is_builtin(self) -> bool:
        return self.config.source in BUILTIN_SOURCES

    @property
    def seqs_key(self) -> str:
        """Where the number of its sequences is configured."""
        owner = self.key.removesuffix(".model")
        return f"{owner}.{'max_sessions' if 'draft' in owner else 'max_num_seqs'}"


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """A LoRA adapter of the target; `missing` are the files that its folder lacks."""

    name: str
    folder: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """A served model: its target, and its draft when it speculates.

    `template`: of the file that the gateway uses in place of the model's own, if there is one.
    `overlap`: of a draft with another tokenizer than its target.
    """

    name: str
    target: ModelFacts
    draft: ModelFacts | None
    template: str | None = None
    adapters: tuple[AdapterFacts, ...] = ()
    overlap: OverlapFacts | None = None

    @property
    def models(self) -> list[ModelFacts]:
        return [self.target] if self.draft is None else [self.target, self.draft]


def check_models(pools: Sequence[PoolFacts], gpus: Sequence[Gpu], ram: int) -> list[Finding]:
    """Everything about models, their fit to each other and to this machine."""
    findings: list[Finding] = []
    for pool in pools:
        for model in pool.models:
            findings += check_model(model, gpus)
        findings += check_pair(pool)
        findings += check_template(pool)
        findings += map(check_adapter, pool.adapters)
    return findings + check_memory(pools, gpus, ram)


# -- one model ----------------------------------------------------------------------------------


def check_model(model: ModelFacts, gpus: Sequence[Gpu]) -> list[Finding]:
    findings = [check_present(model), *check_device(model, gpus), *check_quantization(model, gpus)]
    return findings + check_ranks(model, gpus) + check_context(model) + check_kv_blocks(model)


def check_present(model: ModelFacts) -> Finding:
    source = model.config.source
    if model.is_builtin:
        return Finding(model.key, "ok", f"{source}: built in, nothing to download")
    if model.problem:
        fact, fix = _fact_and_fix(model.problem)
        return Finding(model.key, "fail", fact, fix or "name another model.source")
    assert model.shape is not None
    shape = model.shape
    if shape.gguf_bytes:
        return Finding(model.key, "ok", f"{source}: a GGUF file of {size(shape.gguf_bytes)}")
    layers = f"{shape.num_layers} layers, {shape.num_weights / 1e6:.0f} M weights"
    return Finding(model.key, "ok", f"{source}: complete, {layers}")


def check_device(model: ModelFacts, gpus: Sequence[Gpu]) -> list[Finding]:
    if model.is_builtin:
        return []
    name, config = f"{model.key}.device", model.config
    kind = config.device.partition(":")[0]
    if kind == "cuda" and not gpus:
        fix = f"{name}: auto (or cpu), or install torch for CUDA and check `nvidia-smi`"
        return [Finding(name, "fail", f"{config.device}, but torch sees no GPU", fix)]
    index = int(config.device.partition(":")[2] or 0)
    if kind == "cuda" and index >= len(gpus):
        fact = f"{config.device}, but torch sees {len(gpus)} GPUs"
        return [Finding(name, "fail", fact, f"{name}: auto, or cuda:0 to cuda:{len(gpus) - 1}")]
    if not on_gpu(config, gpus):
        if config.dtype == "float16":
            fix = f"{model.key}.dtype: bfloat16 (or float32)"
            return [Finding(name, "warn", "float16 on a CPU is slow", fix)]
        return [Finding(name, "ok", f"{kind if kind != 'auto' else 'cpu'}, {config.dtype}")]
    gpu = gpus[index]
    if config.dtype == "bfloat16" and not gpu.has_bfloat16:
        fix = f"{model.key}.dtype: float16"
        return [Finding(name, "fail", f"{gpu.name} has no bfloat16", fix)]
    if model.gpus_per_replica == 0:
        fact = f"{gpu.name}, but Ray gives this deployment no GPU: all replicas would take the same"
        return [Finding(name, "warn", fact, "ray_actor_options: {num_gpus: 1} of its deployment")]
    return [Finding(name, "ok", f"{gpu.name}, {config.dtype}")]


def check_quantization(model: ModelFacts, gpus: Sequence[Gpu]) -> list[Finding]:
    """As the engine would refuse it when the replica loads."""
    kind, shape = model.config.quantization, model.shape
    is_gguf = shape is not None and bool(shape.gguf_bytes)
    if model.is_builtin or shape is None or (kind == "none" and not is_gguf):
        return []
    name, gpu = f"{model.key}.quantization", on_gpu(model.config, gpus)
    if is_gguf != (kind == "gguf"):
        holds = "a GGUF file" if is_gguf else "no GGUF file"
        fix = f"{name}: {'gguf' if is_gguf else 'none, int8 or int4'}"
        return [Finding(name, "fail", f"{kind}, but the folder holds {holds}", fix)]
    if gpu and kind == "gguf":
        return [Finding(name, "fail", "gguf runs on a CPU only", f"{model.key}.device: cpu")]
    if gpu and kind == "int4" and model.config.dtype != "bfloat16":
        fix = f"{model.key}.dtype: bfloat16"
        return [Finding(name, "fail", f"int4 on a GPU with {model.config.dtype}", fix)]
    if not gpu and model.config.dtype == "float16":
        fix = f"{model.key}.dtype: bfloat16 (or float32)"
        return [Finding(name, "fail", f"{kind} on a CPU with float16", fix)]
    return [Finding(name, "ok", f"{kind} on a {'GPU' if gpu else 'CPU'}")]


def check_ranks(model: ModelFacts, gpus: Sequence[Gpu]) -> list[Finding]:
    ranks, shape = model.config.tensor_parallel_size, model.shape
    if ranks == 1 or model.is_builtin:
        return []
    name = f"{model.key}.tensor_parallel_size"
    if shape is not None and shape.num_heads:
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        if heads % ranks or kv_heads % ranks:
            sizes = ", ".join(
                str(n) for n in range(1, kv_heads + 1) if not math.gcd(heads, kv_heads) % n
            )
            fact = f"{heads} heads and {kv_heads} KV heads cannot be shared by {ranks} ranks"
            return [Finding(name, "fail", fact, f"{name}: one of {sizes}")]
    if model.config.quantization != "none":
        fix = f"{model.key}.quantization: none, or {name}: 1"
        return [Finding(name, "fail", f"quantized weights with {ranks} ranks", fix)]
    if gpus and on_gpu(model.config, gpus) and ranks * model.num_replicas > len(gpus):
        needed = f"{ranks * model.num_replicas} GPUs for {model.num_replicas} x {ranks} ranks"
        return [
            Finding(name, "fail", f"{needed}, but {len(gpus)} are seen", f"{name}: {len(gpus)}")
        ]
    if not on_gpu(model.config, gpus):
        fact = f"{ranks} ranks on a CPU: slower than one process"
        return [Finding(name, "warn", fact, f"{name}: 1, unless it is to see it work")]
    return [Finding(name, "ok", f"{ranks} ranks on {len(gpus)} GPUs")]


def check_context(model: ModelFacts) -> list[Finding]:
    limit = model.shape.max_positions if model.shape else None
    asked, name = model.config.max_model_len, f"{model.key}.max_model_len"
    if limit is not None and asked > limit:
        return [
            Finding(
                name, "fail", f"{asked}, but the model has {limit} positions", f"{name}: {limit}"
            )
        ]
    return []


def check_kv_blocks(model: ModelFacts) -> list[Finding]:
    """Whether all sequences could be as long as they may be."""
    config, name = model.config, f"{model.key}.num_kv_blocks"
    num_tokens = config.num_kv_blocks * config.block_size
    wanted = model.max_seqs * math.ceil(config.max_model_len / config.block_size)
    full = config.num_kv_blocks // math.ceil(config.max_model_len / config.block_size)
    held = f"{num_tokens} tokens: {full} sequences of {config.max_model_len}"
    if full == 0:
        fact = f"{num_tokens} tokens: less than one sequence of {config.max_model_len}"
        blocks = math.ceil(config.max_model_len / config.block_size)
        return [
            Finding(name, "fail", fact, f"{name}: at least {blocks}, or a smaller max_model_len")
        ]
    if full < model.max_seqs:
        shape = model.shape
        per_block = shape.kv_bytes_per_token(config.dtype) * config.block_size if shape else 0
        cost = f" ({size(wanted * per_block)})" if per_block else ""
        fix = (
            f"enough when texts are shorter; for all {model.max_seqs} at full length {name}: "
            f"{wanted}{cost}, or {model.seqs_key}: {full}"
        )
        return [Finding(name, "warn", f"{held}, of {model.max_seqs} at once", fix)]
    return [Finding(name, "ok", held)]


# -- a target and its draft -----------------------------------------------------------------------


def check_pair(pool: PoolFacts) -> list[Finding]:
    target, draft = pool.target, pool.draft
    if draft is None:
        return [Finding(f"{target.key} + draft", "ok", "no draft model")]
    findings = []
    name = f"{target.key} + draft"
    if target.is_builtin != draft.is_builtin:
        which = draft.config.source if draft.is_builtin else target.config.source
        fact = f"{which} has a vocabulary of its own, the other model has not that one"
        findings.append(
            Finding(name, "fail", fact, f"name a real model for both, or {which} for both")
        )
    elif target.shape is not None and draft.shape is not None:
        sources = draft.key, target.config.source
        found = doctor_tokenizers.judge(target.shape, draft.shape, pool.overlap, *sources)
        findings += [Finding(name, found.status, found.fact, found.fix)] if found else []
    short, long = doctor_tokenizers.context(draft.config), target.config.max_model_len
    if short < long:
        fact = f"the draft reads {short} tokens, the target {long}: longer texts go without a draft"
        findings.append(
            Finding(
                f"{draft.key}.max_model_len",
                "warn",
                fact,
                f"{draft.key}.max_model_len: {doctor_tokenizers.enough(draft.config, long)}",
            )
        )
    return findings


def check_template(pool: PoolFacts) -> list[Finding]:
    shape, name = pool.target.shape, f"{pool.name} chat template"
    if shape is None or shape.gguf_bytes:
        return []
    kind = shape.chat_template if pool.template is None else pool.template
    whose = "the model's own" if pool.template is None else "gateway.chat_template"
    fix = "gateway.chat_template: a Jinja file, or one that ships with Paceline (smollm2-tools)"
    if kind == NO_TEMPLATE:
        fact = "none: chat requests are refused, completions work"
        return [Finding(name, "warn", fact, fix)]
    if kind == PLAIN_TEMPLATE:
        fact = f"{whose}, without tools: requests with `tools` are refused"
        return [Finding(name, "warn", fact, f"if you need tools, {fix}")]
    return [Finding(name, "ok", f"{whose}, with tools")]


def check_adapter(adapter: AdapterFacts) -> Finding:
    name = f"adapter {adapter.name}"
    if adapter.missing:
        fact = f"{adapter.folder} has no {' and no '.join(adapter.missing)}"
        return Finding(name, "fail", fact, "name the folder that PEFT's save_pretrained wrote")
    return Finding(name, "ok", adapter.folder)


# -- memory -------------------------------------------------------------------------------------


def memory_of(model: ModelFacts) -> tuple[float, float] | None:
    """(weights, KV cache) of one rank in bytes; None where the files do not say."""
    shape, config = model.shape, model.config
    if shape is None or not (shape.num_layers or shape.gguf_bytes):
        return None
    weights = shape.weight_bytes(config.dtype, config.quantization) / config.tensor_parallel_size
    num_tokens = config.num_kv_blocks * config.block_size
    kv = shape.kv_bytes_per_token(config.dtype) * num_tokens / config.tensor_parallel_size
    return weights, kv


def check_memory(pools: Sequence[PoolFacts], gpus: Sequence[Gpu], ram: int) -> list[Finding]:
    """Each GPU model against its GPU, all of them together, and so the CPU models."""
    findings, total, on_gpus, heaviest = [], 0.0, 0.0, ("", 0.0)
    for model in [model for pool in pools for model in pool.models]:
        needed = memory_of(model)
        if needed is None:
            continue
        weights, kv = needed
        parts = f"weights {size(weights)} + KV cache {size(kv)}"
        ranks = model.num_replicas * model.config.tensor_parallel_size
        if on_gpu(model.config, gpus):
            findings.append(_check_gpu_memory(model, gpus, weights + kv, parts))
            on_gpus += ranks * (weights + kv)
            continue
        total += ranks * (weights + kv + PROCESS_BYTES)
        each = f" each, {ranks} processes" if ranks > 1 else ""
        findings.append(Finding(f"{model.key} memory", "ok", parts + each))
        if kv > heaviest[1]:
            heaviest = (model.key, kv)
    if total:
        findings.append(_check_free("memory", total, ram, heaviest[0]))
    if on_gpus:
        free = sum(gpu.free_bytes for gpu in gpus)
        findings.append(_check_free("GPU memory", on_gpus, free, pools[0].target.key))
    return findings


def _check_gpu_memory(model: ModelFacts, gpus: Sequence[Gpu], needed: float, parts: str) -> Finding:
    name = f"{model.key} memory"
    gpu = gpus[int(model.config.device.partition(":")[2] or 0)]
    fact = f"{parts} of {size(gpu.free_bytes)} free on {gpu.name}"
    if needed > gpu.free_bytes:
        return Finding(name, "fail", fact, _smaller(model.key, needed - gpu.free_bytes))
    if needed > (1 - FREE_SHARE) * gpu.free_bytes:
        fix = f"{model.key}.num_kv_blocks: fewer, so that a tenth is left for passes"
        return Finding(name, "warn", fact, fix)
    return Finding(name, "ok", fact)


def _check_free(name: str, total: float, free: int, key: str) -> Finding:
    fact = f"{size(total)} for all processes of {size(free)} free"
    if total > free:
        return Finding(name, "fail", fact, _smaller(key, total - free))
    if total > (1 - FREE_SHARE) * free:
        return Finding(name, "warn", fact, f"{key}.num_kv_blocks: fewer, to keep a tenth free")
    return Finding(name, "ok", fact)


def _smaller(key: str, excess: float) -> str:
    return (
        f"free {size(excess)}: a smaller {key}.num_kv_blocks, dtype: bfloat16, quantization: int8, "
        "fewer replicas, or a smaller model"
    )


def on_gpu(config: ModelConfig, gpus: Sequence[Gpu]) -> bool:
    kind = config.device.partition(":")[0]
    return bool(gpus) and kind in ("auto", "cuda") and config.source not in BUILTIN_SOURCES


def _fact_and_fix(problem: str) -> tuple[str, str]:
    """Our sentences end in the fix, after a colon."""
    fact, colon, fix = problem.rpartition(": ")
    return (fact, fix) if colon and fix else (problem, "")
