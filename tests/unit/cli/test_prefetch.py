"""What `paceline serve` finds out about the models before anything is started."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli import cluster, serve, servefile
from paceline.errors import ConfigError


def model_folder(path: Path, *tokens: str) -> Path:
    """A folder that resolves, with weights of no tensor and these tokens."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    vocab = {token: index for index, token in enumerate(tokens)}
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    return path


def serve_file(folder: Path, target: object, draft: object, **args: Any) -> Path:
    models = {
        "target": {"model": {"source": str(target)}},
        "draft": {"model": {"source": str(draft)}},
    }
    application = {"import_path": servefile.BUILDER, "args": {**models, **args}}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {
        "target": model_folder(tmp_path / "target", "a", "b"),
        "fitting": model_folder(tmp_path / "fitting", "a", "b"),
        "other": model_folder(tmp_path / "other", "b", "a"),
    }


def test_a_draft_with_another_tokenizer_is_refused_before_anything_starts(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(cluster, "local_service", start)
    path = serve_file(tmp_path, folders["target"], folders["other"])
    with pytest.raises(ConfigError) as caught, serve.started(path, "127.0.0.1", 0):
        pass
    assert str(caught.value) == (
        f"target.model.source {str(folders['target'])!r} and draft.model.source "
        f"{str(folders['other'])!r} have different tokenizers: choose a draft made for this "
        "target, or set speculation.method: 'off'"
    )


def test_what_fits_or_is_never_asked_passes(folders: dict[str, Path], tmp_path: Path) -> None:
    target = folders["target"]
    off = {"speculation": {"method": "off"}}
    for draft, args in (
        (folders["fitting"], {}), (target, {}), (folders["other"], off), ("toy", {}),
    ):  # fmt: skip
        serve.prefetch(servefile.load(serve_file(tmp_path, target, draft, **args)))


def test_each_pool_needs_a_draft_that_fits_its_target(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    def pool(draft: str) -> dict[str, Any]:
        named = {"target": folders["other"], "draft": folders[draft]}
        return {side: {"model": {"source": str(folder)}} for side, folder in named.items()}

    first = (tmp_path, folders["target"], folders["fitting"])
    serve.prefetch(servefile.load(serve_file(*first, models={"two": pool("other")})))
    file = servefile.load(serve_file(*first, models={"two": pool("target")}))
    said = f"models.two.target.model.source {str(folders['other'])!r} and draft.model.source"
    with pytest.raises(ConfigError, match=re.escape(said)):
        serve.prefetch(file)


def test_an_adapter_needs_a_folder_unless_the_model_is_a_toy(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "french"
    folder.mkdir()
    adapters = {"adapters": {"french": str(folder)}}

    def prefetch(source: Path | str) -> None:
        model = {"source": str(source)}
        pool = {"target": {"model": model, **adapters}, "speculation": {"method": "off"}}
        path = serve_file(tmp_path, "toy", "toy", models={"two": pool})
        serve.prefetch(servefile.load(path))

    said = re.escape(f"models.two.target.adapters: french: {str(folder)!r} is no folder of PEFT")
    with pytest.raises(ConfigError, match=said):
        prefetch(folders["target"])
    prefetch("toy")
    (folder / "adapter_config.json").write_text("{}")
    prefetch(folders["target"])


def test_a_wrong_device_is_told_when_the_file_is_read(tmp_path: Path) -> None:
    path = serve_file(tmp_path, "toy", "toy")
    data = yaml.safe_load(path.read_text())
    data["applications"][0]["args"]["target"]["model"]["device"] = "gpu"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError) as caught, serve.started(path, None, 0):
        pass
    assert str(caught.value) == (
        f"{path}: applications.0.args.target.model.device: 'gpu' is no device: "
        "write auto, cpu, cuda, cuda:0 or mps"
    )


def test_medusa_heads_are_looked_for_before_anything_starts(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    def prefetch(source: Path | str, medusa: Path | str = tmp_path / "fitting") -> None:
        target = {"model": {"source": str(source)}, "medusa": str(medusa)}
        pool = {"target": target, "speculation": {"method": "medusa"}}
        serve.prefetch(servefile.load(serve_file(tmp_path, "toy", "toy", models={"two": pool})))

    said = f"models.two.target.medusa: {folders['fitting']} has neither medusa_lm_head.safetensors"
    with pytest.raises(ConfigError, match=re.escape(said)):
        prefetch(folders["target"])
    prefetch("toy", "toy")
    (folders["fitting"] / "medusa_lm_head.safetensors").write_bytes(b"")
    prefetch(folders["target"])


def test_without_drafts_their_model_is_neither_fetched_nor_compared(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    method = {"speculation": {"method": "ngram"}}
    file = servefile.load(serve_file(tmp_path, folders["target"], folders["other"], **method))
    assert file.sources == [str(folders["target"])]
    serve.prefetch(file)
