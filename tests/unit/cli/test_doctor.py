"""`paceline doctor`: every check passing and failing, and each broken configuration's fix."""

from __future__ import annotations

import copy
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from paceline import models
from paceline.cli import certs
from paceline.cli.main import DEMO_CONFIG, app
from tests.unit.cli.model_folders import model_folder
from tests.unit.cli.toy_service import KEY, gateway, serving

DEPLOY = DEMO_CONFIG.parent
# What this machine may or may not have room for.
OF_THE_MACHINE = {"threads", "ray", "ray CPUs", "/dev/shm", "open files", "memory", "http port"}
Data = dict[str, Any]


def doctor(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env=env)


def findings_of(path: Path, *arguments: str) -> tuple[int, dict[str, Data]]:
    result = doctor(str(path), "--json", *arguments)
    assert len(result.stdout.splitlines()) == 1, result.stderr
    told = json.loads(result.stdout)
    assert told["is_ok"] == (result.exit_code == 0)
    found = {item["name"]: item for item in told["findings"]}
    for item in found.values():
        assert item["fact"]
        assert (item["status"] == "ok") or item["fix"], f"{item} names no fix"
    return result.exit_code, found


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(models.CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def good(tmp_path: Path) -> Data:
    """A Serve YAML's data with nothing to complain about."""
    target = model_folder(tmp_path / "target")
    draft = model_folder(tmp_path / "draft")
    model = {"max_model_len": 64, "num_kv_blocks": 16, "device": "cpu"}
    return {
        "http_options": {"host": "127.0.0.1", "port": 0},
        "applications": [
            {
                "import_path": "paceline.app:build_app",
                "args": {
                    "target": {"model": {"source": str(target), **model}, "max_num_seqs": 4},
                    "draft": {"model": {"source": str(draft), **model}, "max_sessions": 4},
                },
            }
        ],
    }


def write(tmp_path: Path, data: Data) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


# -- whole files --------------------------------------------------------------------------------


def test_nothing_to_complain_about(tmp_path: Path, good: Data) -> None:
    _, found = findings_of(write(tmp_path, good))
    complaints = [f for f in found.values() if f["status"] != "ok"]
    assert [f for f in complaints if f["name"] not in OF_THE_MACHINE] == []
    assert {"python", "packages", "config", "target.model", "draft.model", "target.model + draft",
            "toy chat template", "target.model memory", "target ports", "api keys",
            "certificates"} <= set(found)  # fmt: skip


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.stem)
def test_our_own_files_with_an_empty_cache(path: Path, tmp_path: Path) -> None:
    """Toy models run at once; the others say how to get theirs."""
    data = yaml.safe_load(path.read_text())
    data["http_options"]["port"] = 0
    code, found = findings_of(write(tmp_path, data))
    failed = {name: f for name, f in found.items() if f["status"] == "fail"}
    failed = {name: f for name, f in failed.items() if name not in OF_THE_MACHINE}
    for name, finding in failed.items():
        assert name.endswith(("target.model", "draft.model")), finding
        assert finding["fix"].startswith("run `paceline models fetch smollm2-135m")
    assert bool(failed) == ("smollm2" in path.read_text())
    assert (code == 1) >= bool(failed)


Break = Callable[[Data, Path], object]


def args(data: Data) -> Data:
    found: Data = data["applications"][0]["args"]
    return found


def model_of(data: Data, side: str = "target") -> Data:
    found: Data = args(data)[side]["model"]
    return found


def listen(data: Data, _: Path) -> None:
    data["http_options"]["port"] = busy_port()


def busy_port() -> int:
    """Where this process listens while these tests run."""
    number: int = LISTENERS[0].getsockname()[1]
    return number


LISTENERS: list[socket.socket] = []

# what is broken -> the finding, its status and a part of its fix
BROKEN: dict[str, tuple[Break, str, str, str]] = {
    "no file": (lambda d, t: d.clear(), "config", "fail", "README's configuration table"),
    "unknown key": (lambda d, t: args(d).update(tarhet={}), "config", "fail", "correct "),
    "no such model": (
        lambda d, t: model_of(d).update(source="/nowhere"), "target.model", "fail", "model.source",
    ),
    "model not fetched": (
        lambda d, t: model_of(d).update(source="smollm2-135m"), "target.model", "fail",
        "paceline models fetch smollm2-135m",
    ),
    "hub model not here": (
        lambda d, t: model_of(d).update(source="org/name"), "target.model", "fail",
        "hf download org/name",
    ),
    "cut download": (
        lambda d, t: (t / "target" / "model.safetensors").write_bytes(b"cut"), "target.model",
        "fail", "download or convert the model again",
    ),
    "other tokenizer": (
        lambda d, t: model_of(d, "draft").update(
            source=str(model_folder(t / "other", ("b", "a")))
        ),
        "target.model + draft", "fail", "draft.model.source: a draft made for this target",
    ),
    "other vocabulary": (
        lambda d, t: model_of(d, "draft").update(
            source=str(model_folder(t / "other", vocab_size=12))
        ),
        "target.model + draft", "fail", "draft.model.source",
    ),
    "toy draft": (
        lambda d, t: model_of(d, "draft").update(source="toy"), "target.model + draft", "fail",
        "name a real model for both",
    ),
    "no GPU": (
        lambda d, t: model_of(d).update(device="cuda:9"), "target.model.device", "fail",
        "target.model.device: auto",
    ),
    "half precision on a CPU": (
        lambda d, t: model_of(d).update(dtype="float16"), "target.model.device", "warn",
        "target.model.dtype: bfloat16",
    ),
    "context too long": (
        lambda d, t: model_of(d).update(max_model_len=256), "target.model.max_model_len", "fail",
        "target.model.max_model_len: 128",
    ),
    "draft reads less": (
        lambda d, t: model_of(d, "draft").update(max_model_len=32), "draft.model.max_model_len",
        "warn", "draft.model.max_model_len: 64",
    ),
    "KV cache for few": (
        lambda d, t: model_of(d).update(num_kv_blocks=8), "target.model.num_kv_blocks", "warn",
        "target.model.num_kv_blocks: 16",
    ),
    "KV cache for none": (
        lambda d, t: model_of(d).update(num_kv_blocks=3), "target.model.num_kv_blocks", "fail",
        "at least 4",
    ),
    "KV cache beyond memory": (
        lambda d, t: model_of(d).update(num_kv_blocks=1 << 24, block_size=256), "memory", "fail",
        "a smaller target.model.num_kv_blocks",
    ),
    "GGUF without a GGUF file": (
        lambda d, t: model_of(d).update(quantization="gguf"), "target.model.quantization", "fail",
        "none, int8 or int4",
    ),
    "ranks that do not divide": (
        lambda d, t: model_of(d).update(tensor_parallel_size=3),
        "target.model.tensor_parallel_size", "fail", "one of 1, 2",
    ),
    "quantized ranks": (
        lambda d, t: model_of(d).update(tensor_parallel_size=2, quantization="int8"),
        "target.model.tensor_parallel_size", "fail", "quantization: none",
    ),
    "too many threads": (
        lambda d, t: model_of(d).update(num_threads=256), "threads", "warn", "num_threads",
    ),
    "port in use": (listen, "http port", "fail", "--port 0"),
    "no port for a target": (
        lambda d, t: args(d)["target"].update(
            port_min=busy_port(), port_max=busy_port()
        ),
        "target ports", "fail", "target.port_max",
    ),
    "no certificates": (
        lambda d, t: args(d).update(rpc={"tls_dir": str(t / "none")}), "certificates", "fail",
        "paceline certs ",
    ),
    "targets in the open": (
        lambda d, t: args(d)["target"].update(host="0.0.0.0"), "certificates", "warn",
        "paceline certs FOLDER",
    ),
    "service in the open": (
        lambda d, t: d["http_options"].update(host="0.0.0.0"), "api keys", "warn",
        "paceline key NAME",
    ),
    "no chat template": (
        lambda d, t: (t / "target" / "chat_template.jinja").unlink(), "toy chat template", "warn",
        "gateway.chat_template",
    ),
    "template without tools": (
        lambda d, t: (t / "target" / "chat_template.jinja").write_text("{{ messages }}"),
        "toy chat template", "warn", "smollm2-tools",
    ),
    "chat template not there": (
        lambda d, t: args(d).update(gateway={"chat_template": "/none"}), "config", "fail",
        "correct ",
    ),
    "adapter not there": (
        lambda d, t: args(d)["target"].update(adapters={"mine": "/nowhere"}), "adapter mine",
        "fail", "save_pretrained",
    ),
    "too many replicas": (
        lambda d, t: d["applications"][0].update(
            deployments=[{"name": "TargetReplica", "num_replicas": 5000}]
        ),
        "ray CPUs", "fail", "num_cpus",
    ),
    "GPUs that are not there": (
        lambda d, t: d["applications"][0].update(
            deployments=[{"name": "DraftReplica", "ray_actor_options": {"num_gpus": 99}}]
        ),
        "ray GPUs", "fail", "num_gpus",
    ),
    "second model": (
        lambda d, t: args(d).update(models={"big": {"target": {"model": {"source": "/none"}}}}),
        "models.big.target.model", "fail", "model.source",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _busy_port() -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        LISTENERS[:] = [listener]
        yield


@pytest.mark.parametrize("what", BROKEN)
def test_each_broken_thing_names_its_fix(what: str, tmp_path: Path, good: Data) -> None:
    spoil, name, status, fix = BROKEN[what]
    data = copy.deepcopy(good)
    spoil(data, tmp_path)
    code, found = findings_of(write(tmp_path, data))
    assert name in found, list(found)
    assert found[name]["status"] == status, found[name]
    assert fix in found[name]["fix"], found[name]
    assert code == 1 or status == "warn"


def test_ray_elsewhere_is_told(tmp_path: Path, good: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://elsewhere:10001")
    _, found = findings_of(write(tmp_path, good))
    assert found["ray"]["status"] == "warn"
    assert "ray://elsewhere:10001" in found["ray"]["fact"]
    assert found["ray"]["fix"].startswith("unset RAY_ADDRESS")


def test_good_certificates_are_good(tmp_path: Path, good: Data) -> None:
    certs.certs(tmp_path / "tls", 90, force=False, renew=False)
    args(good)["rpc"] = {"tls_dir": str(tmp_path / "tls")}
    _, found = findings_of(write(tmp_path, good))
    assert found["certificates"]["status"] == "ok"


def test_for_people_there_is_a_table(tmp_path: Path, good: Data) -> None:
    model_of(good)["source"] = "smollm2-135m"
    result = doctor(str(write(tmp_path, good)))
    assert result.exit_code == 1
    assert "fail  target.model  model smollm2-135m is not in" in result.stdout
    assert "fix: run `paceline models fetch smollm2-135m`" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("1 failed")
    assert "\x1b" not in result.stdout


def test_nothing_to_check_is_an_error() -> None:
    result = doctor()
    assert result.exit_code == 1
    assert result.stderr.startswith("error: nothing to check: name a Serve YAML")


# -- a running service ----------------------------------------------------------------------------


def live(url: str, key: str = "") -> tuple[int, list[Data]]:
    result = doctor("--url", url, "--json", env={"PACELINE_API_KEY": key})
    return result.exit_code, json.loads(result.stdout)["findings"]


def test_a_running_service_is_tried() -> None:
    with serving(gateway(None)) as url:
        code, found = live(url)
    assert code == 0
    names = [(f["name"], f["status"]) for f in found]
    assert names == [("live: health", "ok"), ("live: ready", "ok"), ("live: one token", "ok")]


def test_a_service_that_is_away() -> None:
    code, found = live("http://127.0.0.1:9")
    assert (code, len(found)) == (1, 1)
    assert "no answer from http://127.0.0.1:9" in found[0]["fact"]
    assert found[0]["fix"].startswith("start it: paceline serve")


def test_a_service_that_wants_a_key() -> None:
    with serving(gateway(None, has_keys=True)) as url:
        code, found = live(url)
        assert (code, found[-1]["status"]) == (1, "fail")
        assert found[-1]["fix"] == "set PACELINE_API_KEY"
        assert live(url, KEY)[0] == 0


def test_the_running_service_may_have_its_port(tmp_path: Path, good: Data) -> None:
    with serving(gateway(None)) as url:
        good["http_options"]["port"] = int(url.rpartition(":")[2])
        path = write(tmp_path, good)
        assert findings_of(path)[1]["http port"]["status"] == "fail"
        assert findings_of(path, "--url", url)[1]["http port"]["status"] == "ok"
