"""`python -m tests.fuzz.configs --num 20000 --seed 0`: configurations, Serve files, model folders.

Whatever stands in them, the answer is a valid configuration or an error that says what is wrong:
`ValidationError` from the tree itself, else `ConfigError` that names the file or folder.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from paceline import models
from paceline.cli import servefile
from paceline.config import AppConfig, PoolConfig
from paceline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SERVE_FILES = sorted((ROOT / "deploy/serve").glob("*.yaml"))
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 16, 64, 1024, 1 << 20, 2**31, 2**63, 2**64, -(2**63), 10**400,
    0.0, -0.5, 0.01, 1.0, 1e308, 1e-320, float("inf"), float("-inf"), float("nan"), "", "toy", "x",
    "auto", "cuda:0", "cpu", "0", "1.5", "yes", "127.0.0.1", "a/b", "../..", "\x00", "😀",
    "a" * 999, [], [1], {}, {"x": 1}, {1: 2}, {"": {}}, [[]], (), b"bytes",
)  # fmt: skip
YAML_NOISE = (
    "&a [*a]", "*b", "!!python/object/apply:os.system ['true']", "!!binary x", "<<: *x", "? ", "- ",
    "2026-11-29", "0o17", "1_000", "~", ".nan", "|", ">-", "\t", "%YAML 9", "--- ", "...", "{", "]",
    "'", '"', "@", "`", "\x07", "[" * 300, "!!set {a, a}", "!!timestamp 2026-99-99", "=",
    "&a {<<: *a}", "? [1, 2]\n: 3", "1: 2",
)  # fmt: skip


def _refused(is_clear: bool, error: Exception) -> str:
    assert is_clear, f"an error that does not say where: {error}"
    return "refused"


# ---------------------------------------------------------------------------------- config trees


def _tree(rng: random.Random, model: type[BaseModel]) -> dict[str, Any]:
    """A few fields of a section, most with values that do not fit."""
    tree: dict[str, Any] = {}
    names = list(model.model_fields)
    for name in rng.sample(names, min(len(names), rng.choice((0, 1, 2, 4)))):
        annotation = model.model_fields[name].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            deeper = rng.random() < 0.9
            tree[name] = _tree(rng, annotation) if deeper else rng.choice(VALUES)
        elif annotation == dict[str, PoolConfig] and rng.random() < 0.8:
            names_of_models = rng.sample(("a/b", "a:b", "toy", "x", "", "#", "ä"), rng.randrange(4))
            tree[name] = {model: _tree(rng, PoolConfig) for model in names_of_models}
        elif rng.random() < 0.2:
            tree[name] = model.model_fields[name].get_default()
        else:
            tree[name] = rng.choice(VALUES)
    if rng.random() < 0.1:
        tree[rng.choice(("", "x", names[0] + "_", names[0].upper()))] = rng.choice(VALUES)
    return tree


def fuzz_tree(rng: random.Random, _work: Path) -> str:
    tree = _tree(rng, AppConfig)
    try:
        config = AppConfig.model_validate(tree)
    except ValidationError as error:
        return _refused(bool(servefile.validation_problems(error, "args")), error)
    assert AppConfig.model_validate(config.model_dump()) == config
    return "valid"


# ---------------------------------------------------------------------------------- Serve files


def _spots(node: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a parsed YAML."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    found = []
    for key, value in pairs:
        found.append((node, key))
        if isinstance(value, dict | list):
            found += _spots(value)
    return found


def _bent_yaml(rng: random.Random) -> bytes:
    text = rng.choice(SERVE_FILES).read_text(encoding="utf-8")
    if rng.random() < 0.5:
        data = yaml.safe_load(text)
        for _ in range(rng.choice((1, 1, 2, 4))):
            node, key = rng.choice(_spots(data))
            if rng.random() < 0.3:
                del node[key]
            else:
                node[key] = deepcopy(rng.choice(VALUES[:-2]))
            if not _spots(data):
                break
        return yaml.safe_dump(data).encode()
    raw = bytearray(text.encode())
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(5):
            case 0:
                raw[at:at] = rng.choice(YAML_NOISE).encode()
            case 1:
                line = raw.find(b": ", at)
                end = raw.find(b"\n", line)
                raw[line + 2 : end] = rng.choice(YAML_NOISE).encode()
            case 2:
                del raw[at : at + rng.randrange(1, 60)]
            case 3:
                raw[at : at + 1] = rng.randbytes(rng.choice((1, 3)))
            case _:
                raw[at:at] = raw[at : at + rng.randrange(80)]
    return bytes(raw)


def fuzz_servefile(rng: random.Random, work: Path) -> str:
    path = work / "serve.yaml"
    path.write_bytes(_bent_yaml(rng))
    try:
        loaded = servefile.load(path)
    except ConfigError as error:
        return _refused(str(path) in str(error), error)
    assert loaded.apps
    assert loaded.sources
    return "valid"


# ---------------------------------------------------------------------------------- model folders


def _safetensors(header: Any, num_bytes: int) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + b"\0" * num_bytes


def model_folder(folder: Path) -> Path:
    """What a model folder looks like from outside; no model computes with it."""
    folder.mkdir()
    tensor = {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    vocab = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "</s>", "id": 2}]}
    (folder / "tokenizer.json").write_text(json.dumps(vocab))
    shards = ("model-1.safetensors", "model-2.safetensors")
    for name in shards:
        (folder / name).write_bytes(_safetensors(tensor, 16))
    index = {"weight_map": dict(zip("wv", shards, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


JSON_VALUES: tuple[Any, ...] = (
    None, 1, -1, 2**70, 1.5, "x", "", "../../etc/passwd", "/", "model-1.safetensors", [], [1],
    {}, {"a": []}, True, [[0, "a"]], {"content": "a"}, "\x00", "a" * 300,
)  # fmt: skip
RAW_FILES = (
    b"", b"{", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000,
    b"\x80\x04K.", b"PK\x03\x04", struct.pack("<Q", 2**63), struct.pack("<Q", 2) + b"{}",
    struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 100_000) + b"[" * 100_000, b"GGUF",
    struct.pack("<Q", 4000) + b"x", b'{"a": NaN}', b"9" * 5000,
)  # fmt: skip


def _bend_folder(rng: random.Random, folder: Path) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    match rng.randrange(8):
        case 0:
            path.write_bytes(rng.choice(RAW_FILES))
        case 1:
            raw = path.read_bytes()
            path.write_bytes(raw[: rng.randrange(len(raw) + 1)])
        case 2:
            raw = bytearray(path.read_bytes())
            for _ in range(rng.choice((1, 3))):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            path.write_bytes(raw)
        case 3:
            path.unlink()
            target = rng.choice((path.name, "/nonexistent", ".", "config.json"))
            path.symlink_to(target)
        case 4:
            path.unlink()
            if rng.random() < 0.4:
                path.mkdir()
        case 5:
            for weights in folder.glob("*.safetensors*"):
                weights.unlink()
            (folder / rng.choice(("model.bin", "a.pt", "a.gguf"))).write_bytes(
                rng.choice(RAW_FILES)
            )
        case _:
            _bend_json(rng, path)


def _bend_json(rng: random.Random, path: Path) -> None:
    is_json = path.suffix == ".json"
    raw = path.read_bytes()
    data = json.loads(raw if is_json else raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    for _ in range(rng.choice((1, 1, 3))):
        node, key = rng.choice(_spots(data) or [(data, "x")])
        node[key] = deepcopy(rng.choice(JSON_VALUES))
    path.write_bytes(json.dumps(data).encode() if is_json else _safetensors(data, 16))


def fuzz_folder(rng: random.Random, work: Path) -> str:
    folder = model_folder(work / "model")
    try:
        _bend_folder(rng, folder)
        return _read_folder(folder)
    finally:
        shutil.rmtree(folder)


def _read_folder(folder: Path) -> str:
    readers: tuple[Callable[[], object], ...] = (
        lambda: models.resolve(str(folder)),
        lambda: models.tokenizer_hash(folder),
        lambda: models.num_token_ids(folder),
    )
    outcome = "valid"
    for read in readers:
        try:
            read()
        except ConfigError as error:
            outcome = _refused(str(folder) in str(error), error)
    return outcome


# ---------------------------------------------------------------------------------- all of them


KINDS: dict[str, Callable[[random.Random, Path], str]] = {
    "config tree": fuzz_tree,
    "Serve file": fuzz_servefile,
    "model folder": fuzz_folder,
}


def fuzz(seed: int, num: int, only: int | None = None) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="paceline-fuzz-") as work:
        for case in range(num) if only is None else (only,):
            kind = list(KINDS)[case % len(KINDS)]
            try:
                outcomes[f"{kind}: {KINDS[kind](random.Random(f'{seed}:{case}'), Path(work))}"] += 1
            except BaseException:
                print(f"replay: python -m tests.fuzz.configs --seed {seed} --case {case}")
                raise
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case only")
    options = parser.parse_args()
    began = time.perf_counter()
    outcomes = fuzz(options.seed, options.num, options.case)
    print(f"seed {options.seed}: {outcomes.total()} cases in {time.perf_counter() - began:.0f} s")
    for outcome, number in sorted(outcomes.items()):
        print(f"  {number:8} {outcome}")


if __name__ == "__main__":
    main()
