"""`paceline doctor`: what is measured, and each check passing and failing."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import doctor_checks as checks
from paceline.cli import doctor_facts
from paceline.cli import doctor_machine as machine
from paceline.cli.doctor_checks import AdapterFacts, Finding, Gpu, ModelFacts, PoolFacts
from paceline.cli.doctor_machine import (
    CertificateFacts,
    PackageFacts,
    PortFacts,
    ProbeFacts,
    RayFacts,
)
from paceline.cli.model_facts import ModelShape, read_shape
from paceline.config import ModelConfig
from paceline.errors import ConfigError
from tests.unit.cli.model_folders import model_folder

Data = dict[str, Any]
NOW = datetime(2026, 1, 1, tzinfo=UTC)


# -- facts ----------------------------------------------------------------------------------------


def test_a_model_says_what_it_needs(tmp_path: Path) -> None:
    shape = read_shape(model_folder(tmp_path / "m"))
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads) == (3, 4, 2)
    assert (shape.head_dim, shape.vocab_size, shape.max_positions) == (8, 10, 128)
    assert shape.num_weights == 10 * 32 + 32 * 32 + 32
    assert shape.num_linear_weights == 32 * 32
    assert shape.kv_bytes_per_token("bfloat16") == 2 * 3 * 2 * 8 * 2
    assert shape.weight_bytes("float32", "none") == 4 * shape.num_weights
    packed = shape.weight_bytes("float32", "int4")
    assert packed == 4 * (shape.num_weights - 1024) + 0.625 * 1024


def test_what_a_config_leaves_out(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    text = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({"text_config": text}))
    shape = read_shape(folder)
    assert (shape.num_kv_heads, shape.head_dim, shape.max_positions) == (4, 16, None)
    (folder / "config.json").write_text("[]")
    assert read_shape(folder).kv_bytes_per_token("float32") == 0


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_bent_files_are_a_sentence(file: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / file).write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match=r"again|fast tokenizer"):
        read_shape(folder)


def test_templates_inside_the_tokenizer_config(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    for template, kind in (
        ("{{ messages }}", "plain"), ("{{ tools }}", "tools"), (None, "none"), ("", "none"),
        ([{"name": "a", "template": "{{ tools }}"}], "tools"),
    ):  # fmt: skip
        file.write_text(json.dumps({"chat_template": template}))
        assert read_shape(folder).chat_template == kind


def test_requirements_are_compared_with_what_is_installed() -> None:
    asked = ("rich>=1", "rich<1", "no-such-package==1", "no-such-extra; extra == 'x'")
    found = {p.wanted: p for p in doctor_facts.packages(asked)}
    assert (found[">=1"].fits, found["<1"].fits) == (True, False)
    assert found["==1"] == PackageFacts("no-such-package", "==1", "", False)
    assert len(found) == 3


def test_ray_servers_are_seen_by_their_names(tmp_path: Path) -> None:
    lines = {"7": b"/usr/bin/raylet\0--x", "8": b"gcs_server\0", "9": b"python\0raylet", "10": b""}
    for pid, line in lines.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_bytes(line)
    (tmp_path / "11").mkdir()
    assert doctor_facts.ray_servers(tmp_path) == [7, 8]


def test_a_machine_has_memory_and_cores() -> None:
    assert doctor_facts.free_ram() > 1 << 20
    assert doctor_facts.num_cpus() >= 1


# -- checks ---------------------------------------------------------------------------------------

SHAPE = ModelShape(4, 8, 4, 16, 100, 4096, 10**9, 8 * 10**8, 0, "hash", "tools")
GPU = Gpu("H", 80 << 30)
GIB = 1 << 30


def model(shape: ModelShape | None = SHAPE, **config: Any) -> ModelFacts:
    given = {"source": "m", "max_model_len": 64, "num_kv_blocks": 64, **config}
    return ModelFacts("target.model", ModelConfig(**given), 4, 1, 1.0, shape)


def worst(findings: list[Finding]) -> str:
    order = ("ok", "warn", "fail")
    for finding in findings:
        assert finding.fact
        assert finding.status == "ok" or finding.fix
    return max((finding.status for finding in findings), key=order.index, default="ok")


@pytest.mark.parametrize(
    ("config", "gpus", "status"),
    [
        ({"device": "auto"}, (), "ok"),
        ({"device": "auto"}, (GPU,), "ok"),
        ({"device": "cuda"}, (), "fail"),
        ({"device": "cuda:1"}, (GPU,), "fail"),
        ({"device": "cuda:1"}, (GPU, GPU), "ok"),
        ({"dtype": "bfloat16"}, (replace(GPU, has_bfloat16=False),), "fail"),
        ({"dtype": "float16"}, (replace(GPU, has_bfloat16=False),), "ok"),
        ({"dtype": "float16"}, (), "warn"),
        ({"source": "toy", "device": "cuda"}, (), "ok"),
    ],
)
def test_devices(config: Data, gpus: tuple[Gpu, ...], status: str) -> None:
    assert worst(checks.check_device(model(**config), gpus)) == status


def test_a_gpu_that_ray_does_not_give() -> None:
    assert worst(checks.check_device(replace(model(), gpus_per_replica=0.0), (GPU,))) == "warn"


@pytest.mark.parametrize(
    ("config", "gpus", "status"),
    [
        ({"quantization": "int8"}, (), "ok"),
        ({"quantization": "int8"}, (GPU,), "ok"),
        ({"quantization": "int4", "dtype": "bfloat16"}, (GPU,), "ok"),
        ({"quantization": "int4"}, (GPU,), "fail"),
        ({"quantization": "int4", "dtype": "float16"}, (), "fail"),
        ({"quantization": "gguf"}, (), "fail"),
    ],
)
def test_quantization(config: Data, gpus: tuple[Gpu, ...], status: str) -> None:
    assert worst(checks.check_quantization(model(**config), gpus)) == status


def test_gguf_files() -> None:
    shape = ModelShape(gguf_bytes=10 << 20)
    held = model(shape, quantization="gguf")
    assert worst(checks.check_quantization(held, ())) == "ok"
    assert worst(checks.check_quantization(held, (GPU,))) == "fail"
    assert worst(checks.check_quantization(model(shape), ())) == "fail"
    assert checks.memory_of(held) == (10 << 20, 0)
    assert "GGUF file of 10.0 MiB" in checks.check_present(held).fact


@pytest.mark.parametrize(
    ("ranks", "gpus", "status"),
    [
        (1, (), "ok"), (2, (GPU, GPU), "ok"), (2, (GPU,), "fail"), (3, (GPU,) * 3, "fail"),
        (2, (), "warn"),
    ],
)  # fmt: skip
def test_ranks(ranks: int, gpus: tuple[Gpu, ...], status: str) -> None:
    assert worst(checks.check_ranks(model(tensor_parallel_size=ranks), gpus)) == status


def test_ranks_of_several_replicas() -> None:
    two = replace(model(tensor_parallel_size=2), num_replicas=2)
    assert worst(checks.check_ranks(two, (GPU,) * 3)) == "fail"
    assert worst(checks.check_ranks(two, (GPU,) * 4)) == "ok"


def test_memory_is_exact() -> None:
    """1e9 weights of 4 bytes; 64 blocks of 16 tokens, 4 layers x 2 x 64 values of 4 bytes."""
    assert checks.memory_of(model()) == (4e9, 64 * 16 * 4 * 2 * 64 * 4)
    halves = checks.memory_of(model(tensor_parallel_size=2, dtype="bfloat16"))
    assert halves == (1e9, 64 * 16 * 4 * 2 * 64 * 2 / 2)
    assert checks.memory_of(model(None)) is None


@pytest.mark.parametrize(
    ("ram", "status"), [(20 * GIB, "ok"), (9 * GIB, "warn"), (8 * GIB, "fail")]
)
def test_ram_for_target_and_draft_together(ram: int, status: str) -> None:
    """2 x (4e9 bytes + 2 MiB + a process): 8.2 GiB."""
    pool = PoolFacts("m", model(), model())
    assert worst(checks.check_memory([pool], (), ram)) == status


def test_replicas_and_ranks_multiply() -> None:
    many = PoolFacts("m", replace(model(), num_replicas=4), None)
    assert worst(checks.check_memory([many], (), 15 * GIB)) == "fail"
    assert worst(checks.check_memory([replace(many, target=model())], (), 15 * GIB)) == "ok"


@pytest.mark.parametrize(
    ("free", "status"), [(10 * GIB, "ok"), (int(4.1e9), "warn"), (4 * 10**9, "fail")]
)
def test_gpu_memory(free: int, status: str) -> None:
    pool = PoolFacts("m", model(), None)
    assert worst(checks.check_memory([pool], (Gpu("H", free),), 0)) == status


def test_two_models_on_one_gpu() -> None:
    pool = PoolFacts("m", model(), model())
    assert worst(checks.check_memory([pool], (Gpu("H", 7 * GIB),), 0)) == "fail"


def test_adapters() -> None:
    assert checks.check_adapter(AdapterFacts("a", "/a")).status == "ok"
    assert checks.check_adapter(AdapterFacts("a", "/a", ("x", "y"))).status == "fail"


def test_a_template_of_the_gateway_replaces_the_models() -> None:
    plain = replace(SHAPE, chat_template="plain")
    pool = PoolFacts("m", model(plain), None)
    assert worst(checks.check_template(pool)) == "warn"
    assert worst(checks.check_template(replace(pool, template="tools"))) == "ok"


def test_versions() -> None:
    assert machine.check_python((3, 11, 1), ">=3.11", True).status == "ok"
    assert machine.check_python((3, 9, 0), ">=3.11", False).status == "fail"
    fits = PackageFacts("torch", "==1", "1", True)
    assert worst(machine.check_packages([fits])) == "ok"
    bad, old = machine.check_packages([PackageFacts("ray", "==2", "", False), fits])
    assert (bad.status, bad.fix) == ("fail", "pip install 'ray==2'")
    assert old.fact.startswith("1 of 2 fit: torch 1")


def test_threads() -> None:
    two = [replace(model(num_threads=2), num_replicas=2)]
    assert machine.check_cpus(two, (), 4).status == "ok"
    assert machine.check_cpus(two, (), 3).status == "warn"
    assert machine.check_cpus(two, (GPU,), 1).status == "ok"
    assert machine.check_cpus([model(source="toy", num_threads=9)], (), 1).status == "ok"


def test_ports() -> None:
    assert machine.check_http_port(PortFacts("h", 1)).status == "ok"
    assert machine.check_http_port(PortFacts("h", 1, "in use")).status == "fail"
    assert machine.check_http_port(PortFacts("h", 1, "in use"), "http://h:1").status == "ok"
    assert machine.check_target_ports(1, 9, 1, 2).status == "fail"
    assert machine.check_target_ports(1, 9, 2, 2).status == "ok"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert doctor_facts.port("127.0.0.1", listener.getsockname()[1]).problem
    assert doctor_facts.port("127.0.0.1", 70000).problem
    assert not doctor_facts.port("127.0.0.1", 0).problem


def test_certificates() -> None:
    def status(facts: CertificateFacts | None, host: str = "127.0.0.1") -> str:
        return worst(machine.check_certificates(facts, host, NOW))

    assert status(None) == "ok"
    assert status(None, "0.0.0.0") == "warn"
    assert status(CertificateFacts("f", ("no key",))) == "fail"
    assert status(CertificateFacts("f", (), NOW + timedelta(days=29))) == "warn"
    assert status(CertificateFacts("f", (), NOW + timedelta(days=31))) == "ok"


def test_keys() -> None:
    assert machine.check_keys(0, "127.0.0.1").status == "ok"
    assert machine.check_keys(0, "0.0.0.0").status == "warn"
    assert machine.check_keys(1, "0.0.0.0").status == "ok"


@pytest.mark.parametrize(
    ("change", "name", "status"),
    [
        ({}, "ray", "ok"),
        ({"address": "auto"}, "ray", "warn"),
        ({"other_pids": (7,)}, "ray", "warn"),
        ({"wanted_cpus": 2.0}, "ray CPUs", "ok"),
        ({"wanted_cpus": 2.1}, "ray CPUs", "fail"),
        ({"wanted_gpus": 1.0}, "ray GPUs", "fail"),
        ({"shm_bytes": None}, "/dev/shm", "ok"),
        ({"shm_bytes": 64 << 20}, "/dev/shm", "warn"),
        ({"shm_bytes": 1 << 30}, "/dev/shm", "ok"),
        ({"open_files": 1024}, "open files", "warn"),
        ({"open_files": 4096}, "open files", "ok"),
    ],
)
def test_ray(change: Data, name: str, status: str) -> None:
    facts = replace(RayFacts(2, 1 << 30, 65536), **change)
    found = machine.check_ray(facts, 0)
    assert {f.name: f.status for f in found}[name] == status
    worst(found)


def test_probes() -> None:
    assert machine.check_probe(ProbeFacts("ready", 200)).status == "ok"
    for facts in (ProbeFacts("ready", 503, "No target is ready."), ProbeFacts("health", 0, "x"),
                  ProbeFacts("one token", 401), ProbeFacts("one token", 500)):  # fmt: skip
        assert worst([machine.check_probe(facts)]) == "fail"


def test_no_more_ports_are_tried_than_make_sense() -> None:
    """Every port is taken: the whole range would be 64 000 tries."""
    tried: list[int] = []

    def take(host: str, number: int) -> PortFacts:
        tried.append(number)
        return PortFacts(host, number, "taken")

    assert doctor_facts.num_free_ports("127.0.0.1", 1024, 65535, 1, take) == 0
    assert len(tried) == doctor_facts.MAX_PORTS_TRIED
