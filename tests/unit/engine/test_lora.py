"""Adapters beside a model give what PEFT gives, in mixed passes, and leave all other rows alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import ModelConfig, SpeculationConfig
from paceline.engine.base import StepItem
from paceline.engine.graph_runner import GraphRunner
from paceline.engine.lora import CurrentPass, LoraLinear, LowRank, adapter_bytes
from paceline.engine.pass_plan import AdapterRows, SequenceRows, plan_pass
from paceline.engine.reproducible import TiledLinear
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.torch_loader import load_torch_engine
from paceline.engine.varlen_attention import plan_varlen
from paceline.errors import LocalProtocolError
from paceline.generation import GenerateRequest
from paceline.sampling.params import SamplingParams
from paceline.testing.loopback import Loopback
from tests.unit.engine.adapters import peft_logits, save_adapter
from tests.unit.engine.conftest import save_tiny
from tests.unit.engine.subjects import tokens

GREEDY = SamplingParams(temperature=0.0)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
KINDS: dict[str, dict[str, Any]] = {
    "attention": {},
    "rslora": {"use_rslora": True, "r": 5, "lora_alpha": 3},
    "every layer": {"target_modules": ALL, "r": 3},
    "all-linear": {"target_modules": "all-linear", "r": 2},
    "pattern": {"target_modules": r"model\.layers\.[02]\.mlp\.(gate|down)_proj"},
    "one layer": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "first by number": {"layers_to_transform": 0},
    "excluded": {"exclude_modules": r".*\.2\..*"},
    "ranks": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 7},
        "alpha_pattern": {r".*\.0\.self_attn\.q_proj": 21},
    },
}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two, of which one changes layers that the other leaves alone."""
    out = tmp_path_factory.mktemp("adapters")
    save_adapter(base, out / "one", seed=1)
    save_adapter(base, out / "two", seed=2, target_modules=ALL, r=3)
    return {"one": str(out / "one"), "two": str(out / "two")}


@pytest.fixture(scope="module")
def engine(base: Path, adapters: dict[str, str]) -> TorchEngine:
    return load(base, adapters)


def load(base: Path, adapters: Mapping[str, str] | None = None, **fields: Any) -> TorchEngine:
    given = {"max_model_len": 256, "block_size": 4, "num_kv_blocks": 256, "device": "cpu"}
    config = ModelConfig(source=str(base), **{**given, **fields})
    return load_torch_engine(config, base, adapters=adapters or {})


def whole(sequence_id: int, text: tuple[int, ...], adapter: str = "") -> StepItem:
    return StepItem(sequence_id, 0, text, len(text), GREEDY, adapter=adapter)


def logits(engine: TorchEngine, *texts: tuple[tuple[int, ...], str]) -> list[torch.Tensor]:
    """[len(text), vocab_size] of each (text, adapter), all in one pass."""
    for number, _ in enumerate(texts):
        engine.add(number)
    rows = engine.logits([whole(i, text, adapter) for i, (text, adapter) in enumerate(texts)])
    for number, _ in enumerate(texts):
        engine.free(number)
    return list(rows.split([len(text) for text, _ in texts]))


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4 * float(other.abs().max()))


# -- the same numbers as PEFT -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_peft(base: Path, tmp_path: Path, kind: str) -> None:
    folder = save_adapter(base, tmp_path / "adapter", seed=5, **KINDS[kind])
    text = tokens(1, 23)
    [found] = logits(load(base, {"tuned": str(folder)}), (text, "tuned"))
    expected = peft_logits(base, folder, text)
    close(found, expected)
    [plain] = logits(load(base), (text, ""))
    assert (plain - expected).abs().max() > 0.1  # the adapter does change something


def test_a_mixed_pass(base: Path, adapters: dict[str, str], engine: TorchEngine) -> None:
    """Long texts are cut into tiles and laid out by their lengths: rows are not in order."""
    texts = [
        (tokens(1, 150), "one"),
        (tokens(2, 9), ""),
        (tokens(3, 9), "two"),
        (tokens(4, 31), "one"),
        (tokens(5, 140), ""),
        (tokens(3, 9), "one"),
    ]
    for (text, adapter), found in zip(texts, logits(engine, *texts), strict=True):
        if adapter:
            close(found, peft_logits(base, Path(adapters[adapter]), text))
        else:
            close(found, logits(load(base), (text, ""))[0])


def test_rows_without_an_adapter_keep_their_bits(base: Path, engine: TorchEngine) -> None:
    """Against a pass of the same shape in which nobody has one, with and without any loaded."""
    one, other = tokens(6, 40), tokens(7, 40)
    mixed = logits(engine, (one, "two"), (other, ""))
    for each in (engine, load(base)):
        alone = logits(each, (one, ""), (other, ""))
        assert torch.equal(mixed[1], alone[1])
        assert not torch.equal(mixed[0], alone[0])


def test_nothing_is_left_of_a_pass(engine: TorchEngine) -> None:
    text = tokens(8, 12)
    [before] = logits(engine, (text, ""))
    logits(engine, (text, "one"))
    assert torch.equal(logits(engine, (text, ""))[0], before)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_bfloat16_and_quantized_layers(
    base: Path, adapters: dict[str, str], quantization: str
) -> None:
    """Coarse weights: nearer to the adapter's text than to the model's own."""
    text = tokens(9, 30)
    fields = {"dtype": "bfloat16", "quantization": quantization}
    [found] = logits(load(base, adapters, **fields), (text, "two"))
    expected = peft_logits(base, Path(adapters["two"]), text)
    [plain] = logits(load(base), (text, ""))
    error = (found.float() - expected).norm() / (plain - expected).norm()
    assert error < 0.2


def test_reproducible_rows_do_not_depend_on_their_pass(
    base: Path, adapters: dict[str, str]
) -> None:
    engine = load(base, adapters, reproducible=True)
    text = tokens(10, 21)
    [alone] = logits(engine, (text, "one"))
    crowd = logits(engine, (tokens(11, 5), "two"), (text, "one"), (tokens(12, 18), ""))
    assert torch.equal(crowd[1], alone)
    close(alone, peft_logits(base, Path(adapters["one"]), text))
    engine.add(1)
    engine.step([StepItem(1, 0, text[:-1], 0, GREEDY, adapter="one")])
    last = engine.logits([StepItem(1, len(text) - 1, text[-1:], 1, GREEDY, adapter="one")])
    assert torch.equal(last[0], alone[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiled_product_does_not_depend_on_the_rows_beside_it(
    base: Path, adapters: dict[str, str], dtype: torch.dtype
) -> None:
    """Widths at which torch's kernels for one row and for more do sum differently."""
    torch.manual_seed(0)
    tiled = LowRank(torch.randn(16, 576).to(dtype), torch.randn(576, 16).to(dtype), is_tiled=True)
    rows = torch.randn(37, 576).to(dtype)
    with torch.inference_mode():
        together = tiled(rows)
        for count in (1, 2, 5, 16, 17):
            assert torch.equal(tiled(rows[:count]), together[:count])
            assert torch.equal(tiled(rows[3 : 3 + count]), together[3 : 3 + count])
    model: Any = load(base, adapters, reproducible=True)._runner
    layers = [each for each in model._model.modules() if isinstance(each, LoraLinear)]
    products = [product for layer in layers for product in layer.low_ranks.values()]
    assert products
    assert all(isinstance(each.down, TiledLinear) for each in products)


def test_padded_passes_are_for_those_without(base: Path, adapters: dict[str, str]) -> None:
    """A graph would be replayed without knowing whose rows are whose."""
    engine = load(base, adapters)
    runner: Any = engine._runner
    padding = GraphRunner(
        runner._model,
        _probe(runner._model),
        256,
        4,
        max_model_len=256,
        use_varlen=False,
        adapters=runner._adapters,
    )
    graphs = TorchEngine(padding, engine.info)
    text = tokens(13, 7)
    [tuned] = logits(graphs, (text, "one"))
    assert not padding._passes
    close(tuned, peft_logits(base, Path(adapters["one"]), text))
    [plain] = logits(graphs, (text, ""))
    assert padding._passes
    close(plain, logits(engine, (text, ""))[0])


def _probe(hf_model: Any) -> Any:
    from paceline.engine.torch_loader import probe_model

    return probe_model(hf_model)[0]


# -- speculation --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("fan_out", [0, 2])
def test_a_draft_of_the_base_model_changes_no_token(
    base: Path, engine: TorchEngine, num_tokens: int, fan_out: int
) -> None:
    requests = [
        GenerateRequest(f"r{i}", tokens(20 + i, 9 + i), 40, GREEDY, ignore_eos=True, adapter=name)
        for i, name in enumerate(["one", "", "two", "one"])
    ]
    speculation = SpeculationConfig(num_speculative_tokens=num_tokens)
    pair = Loopback(engine, load(base), speculation, fan_out=fan_out)
    runs = pair.run(requests)
    for request, run in zip(requests, runs, strict=True):
        [alone] = Loopback(engine, None, speculation).run([request])
        assert run.token_ids == alone.token_ids
        assert run.num_draft_tokens > 0
    assert runs[1].num_accepted_tokens == runs[1].num_draft_tokens  # the draft is the base model
    assert runs[0].num_accepted_tokens < runs[0].num_draft_tokens
    classes = {kind.draft_model for kind in pair.scheduler.policy.class_counts()}
    assert {name.split(" by ")[0] for name in classes} == {"one", "two", str(base)}


def test_a_preempted_sequence_keeps_its_adapter(base: Path, adapters: dict[str, str]) -> None:
    requests = [
        GenerateRequest(f"r{i}", tokens(30 + i, 12), 40, GREEDY, ignore_eos=True, adapter=name)
        for i, name in enumerate(["one", "two", "", "one"])
    ]
    speculation = SpeculationConfig()
    small = load(base, adapters, num_kv_blocks=30)
    scarce = Loopback(small, None, speculation)
    runs = scarce.run(requests)
    assert scarce.scheduler.stats.num_preemptions > 0
    ample = load(base, adapters)
    for request, run in zip(requests, runs, strict=True):
        [alone] = Loopback(ample, None, speculation).run([request])
        assert run.token_ids == alone.token_ids


# -- the prefix cache ---------------------------------------------------------------------------


@pytest.mark.parametrize("salt", [0, 77])
def test_no_text_of_another_adapter_is_found(engine: TorchEngine, salt: int) -> None:
    text = tokens(40 + salt, 24)
    found: list[tuple[str, int]] = []
    outputs: dict[str, set[tuple[int, ...]]] = {}
    for number, adapter in enumerate(["", "one", "two", "one", "", "two"]):
        engine.add(number)
        item = StepItem(number, 0, text, 1, GREEDY, cache_salt=salt, adapter=adapter)
        [result] = engine.step([item])
        found.append((adapter, result.num_prefix_tokens))
        outputs.setdefault(adapter, set()).add(result.token_ids)
        engine.free(number)
    assert found == [("", 0), ("one", 0), ("two", 0), ("one", 20), ("", 20), ("two", 20)]
    assert all(len(each) == 1 for each in outputs.values())


def test_salts_part_the_texts_of_one_adapter(engine: TorchEngine) -> None:
    text, found = tokens(50, 24), []
    for number, salt in enumerate([1, 2, 1]):
        engine.add(number)
        item = StepItem(number, 0, text, 1, GREEDY, cache_salt=salt, adapter="one")
        found.append(engine.step([item])[0].num_prefix_tokens)
        engine.free(number)
    assert found == [0, 0, 20]


def test_the_adapter_of_a_text_does_not_change(engine: TorchEngine) -> None:
    engine.add(1)
    engine.step([StepItem(1, 0, tokens(51, 6), 0, GREEDY, adapter="one")])
    for adapter in ("", "two"):
        with pytest.raises(LocalProtocolError, match="or the adapter"):
            engine.step([StepItem(1, 6, (5,), 1, GREEDY, adapter=adapter)])
    with pytest.raises(LocalProtocolError, match="there is no adapter 'three'"):
        engine.step([StepItem(1, 6, (5,), 1, GREEDY, adapter="three")])
    engine.free(1)


# -- rows and layers ----------------------------------------------------------------------------


def test_rows_and_samples_in_both_plans() -> None:
    items = [
        SequenceRows(0, (1, 2, 3), 1, (0,), adapter="b"),
        SequenceRows(3, (4,), 1, (1,)),
        SequenceRows(0, (5, 6), 2, (2,), adapter="a"),
        SequenceRows(1, (7,), 1, (3,), adapter="b"),
    ]
    cpu = torch.device("cpu")
    for plan in (
        plan_pass(items, 4, torch.float32, cpu),
        plan_pass(items, 4, torch.float32, cpu, row_by_row=True),
        plan_varlen(items, 4, cpu),
    ):
        ids = plan.input_ids[0]
        rows = {part.adapter: set(ids[part.rows].tolist()) for part in plan.adapter_rows}
        assert rows in ({"a": {5, 6}, "b": {1, 2, 3, 7}}, {"a": {5, 6}, "b": {1, 2, 3, 7}})
        sampled = {
            part.adapter: ids[plan.sample_rows[part.samples]].tolist() for part in plan.adapter_rows
        }
        assert sampled == {"a": [5, 6], "b": [3, 7]}
    assert plan_pass(items[1:2], 4, torch.float32, cpu).adapter_rows == ()


def test_a_layer_that_gets_some_rows_only_is_not_computed_wrongly() -> None:
    current = CurrentPass()
    layer = LoraLinear(torch.nn.Linear(4, 4), current, is_output=False)
    layer.low_ranks["one"] = LowRank(torch.ones(2, 4), torch.ones(4, 2), is_tiled=False)
    current.parts, current.num_rows = [AdapterRows("one", torch.tensor([2]), torch.tensor([]))], 3
    with pytest.raises(RuntimeError, match="got 2 rows of 3"):
        layer(torch.zeros(1, 2, 4))


def test_memory_is_known_from_the_header(adapters: dict[str, str]) -> None:
    # 3 layers of q (32 -> 32) and v (32 -> 16) at rank 4
    assert adapter_bytes(Path(adapters["one"]), 2) == 2 * 3 * 4 * ((32 + 32) + (32 + 16))


@pytest.fixture(autouse=True)
def whole_cache(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").check_integrity()
