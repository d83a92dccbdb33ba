"""Sources, folders, the cache of aliases. Files are made by hand; no network, no torch."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline import models
from paceline.errors import ConfigError

ALIAS = models.ALIASES["smollm2-135m"]
FETCH = f"run `paceline models fetch {ALIAS.name}`"


def write_safetensors(path: Path, num_bytes: int = 8) -> None:
    tensor = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "weight": tensor}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    write_safetensors(folder / "model.safetensors")
    return folder


def build(folder: Path) -> None:
    make_model(folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(models.CACHE_ENV, str(tmp_path / "cache"))
    return tmp_path / "cache"


# ------------------------------------------------------------------------------ local folders


def test_a_folder_with_safetensors_is_its_own_answer(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    assert models.resolve(str(folder)) == folder


def test_sharded_weights_need_every_shard(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    write_safetensors(folder / "model-1.safetensors")
    with pytest.raises(ConfigError, match=r"model-2\.safetensors is missing or damaged"):
        models.resolve(str(folder))
    write_safetensors(folder / "model-2.safetensors")
    assert models.resolve(str(folder)) == folder


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_refused_with_the_fix(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"never read")
    with pytest.raises(ConfigError, match=f"only pickled weights .{name}.*save_pretrained"):
        models.resolve(str(tmp_path))


def test_a_folder_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        models.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors file"):
        models.resolve(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{}" + b"trailing",
        struct.pack("<Q", 3) + b"{}x",
    ],
)
def test_damaged_weights_are_named(tmp_path: Path, content: bytes) -> None:
    folder = make_model(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing or damaged"):
        models.resolve(str(folder))


def test_cut_weights_are_named(tmp_path: Path) -> None:
    file = make_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="damaged"):
        models.resolve(str(tmp_path))


@pytest.mark.parametrize("source", ["nonsense", "/no/such/folder", "../x", "a/b/c", "~/none"])
def test_unknown_sources_list_what_is_possible(source: str) -> None:
    with pytest.raises(ConfigError, match=r"nor a Hub id .* smollm2-135m, smollm2-135m-draft"):
        models.resolve(source)


def test_a_file_and_a_builtin_have_their_own_sentence(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file)
    with pytest.raises(ConfigError, match="is a file; name the folder"):
        models.resolve(str(file))
    with pytest.raises(ConfigError, match="built-in engine"):
        models.resolve("toy")


# ---------------------------------------------------------------------------------------- Hub


def resolve_offline(repo_id: str, hub_cache: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the Hub's library reads its variables when it is imported."""
    code = f"from paceline import models; print(models.resolve({repo_id!r}))"
    environment = {**os.environ, "HF_HUB_CACHE": str(hub_cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_hub_id_comes_from_the_local_hub_cache(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    snapshot = make_model(repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    done = resolve_offline("org/name", tmp_path)
    assert done.stdout.strip() == str(snapshot), done.stderr


def test_a_hub_id_that_cannot_be_had_says_what_to_do(tmp_path: Path) -> None:
    done = resolve_offline("org/name", tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "paceline.errors.ConfigError: model 'org/name' is not in the local Hub cache and cannot "
        "be downloaded ("
    )
    assert last.endswith("check the name and the network, or name a local folder")


# -------------------------------------------------------------------------------- tokenizers


def write_tokenizer(folder: Path, vocab: object, added: object = ()) -> str:
    folder.mkdir(exist_ok=True)
    data = {"model": {"vocab": vocab}, "added_tokens": list(added)}  # type: ignore[call-overload]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return models.tokenizer_hash(folder)


def test_tokenizer_hash_sees_ids_and_nothing_else(tmp_path: Path) -> None:
    base = write_tokenizer(tmp_path / "a", {"x": 0, "y": 1}, [{"id": 2, "content": "<s>"}])
    assert base == write_tokenizer(tmp_path / "b", {"<s>": 2, "y": 1, "x": 0})  # other layout
    assert base != write_tokenizer(tmp_path / "c", {"x": 1, "y": 0}, [{"id": 2, "content": "<s>"}])
    assert base != write_tokenizer(tmp_path / "d", {"x": 0, "y": 1})
    assert base != write_tokenizer(tmp_path / "e", {"x": 0, "z": 1}, [{"id": 2, "content": "<s>"}])


def test_tokenizer_hash_of_a_unigram_list(tmp_path: Path) -> None:
    listed = write_tokenizer(tmp_path / "a", [["x", -1.5], ["y", -2.5]])
    assert listed == write_tokenizer(tmp_path / "b", {"x": 0, "y": 1})


def test_tokenizer_hash_is_pinned(tmp_path: Path) -> None:
    # The wire compares it between processes of different releases: it must never drift.
    assert write_tokenizer(tmp_path, {"é": 1, "x": 0}) == (
        hashlib.sha256(b'[[0, "x"], [1, "\\u00e9"]]').hexdigest()
    )


def test_a_missing_or_broken_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        models.tokenizer_hash(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        models.tokenizer_hash(tmp_path)


# ------------------------------------------------------------------------------------ aliases


def test_an_alias_that_was_never_fetched_says_how(cache: Path) -> None:
    with pytest.raises(ConfigError, match=FETCH):
        models.resolve(ALIAS.name)


def test_install_builds_once_and_leaves_nothing_else(cache: Path) -> None:
    calls: list[Path] = []

    def counted(folder: Path) -> None:
        calls.append(folder)
        build(folder)

    first = models.install(ALIAS, counted)
    second = models.install(ALIAS, counted)
    assert first == second == models.resolve(ALIAS.name) == cache / ALIAS.name
    assert len(calls) == 1
    assert sorted(p.name for p in cache.iterdir()) == [f".{ALIAS.name}.lock", ALIAS.name]


def test_a_failed_build_leaves_the_old_folder_and_no_debris(cache: Path) -> None:
    def fail(folder: Path) -> None:
        build(folder)
        raise ConfigError("conversion failed")

    with pytest.raises(ConfigError, match="conversion failed"):
        models.install(ALIAS, fail)
    assert [p.name for p in cache.iterdir()] == [f".{ALIAS.name}.lock"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors is missing: " + FETCH),
        (lambda f: (f / "config.json").write_text("{} "), r"config\.json has 3 bytes instead of 2"),
        (lambda f: (f / models.MANIFEST).unlink(), r"manifest\.json is missing: " + FETCH),
        (lambda f: (f / models.MANIFEST).write_text("{"), r"manifest\.json cannot be read"),
        (lambda f: (f / models.MANIFEST).write_text("{}"), r"manifest\.json is damaged: " + FETCH),
    ],
)
def test_damage_is_named_with_the_fix_and_install_repairs_it(
    cache: Path, damage: object, message: str
) -> None:
    folder = models.install(ALIAS, build)
    damage(folder)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message):
        models.resolve(ALIAS.name)
    models.install(ALIAS, build)
    assert models.resolve(ALIAS.name) == folder


def test_a_folder_of_another_recipe_is_built_again(cache: Path) -> None:
    models.install(ALIAS, build)
    pruned = models.Alias(ALIAS.name, "other layers", keep_layers=(0, 1))
    models.install(pruned, build)
    with pytest.raises(ConfigError, match="made by another version"):
        models.resolve(ALIAS.name)


def test_verify_reads_the_bytes_that_resolve_does_not(cache: Path) -> None:
    folder = models.install(ALIAS, build)
    assert models.verify(ALIAS.name) == folder
    (folder / "config.json").write_text("[]")  # same size
    assert models.resolve(ALIAS.name) == folder
    with pytest.raises(ConfigError, match=r"config\.json does not match its checksum: " + FETCH):
        models.verify(ALIAS.name)
    with pytest.raises(ConfigError, match="no alias 'x'"):
        models.verify("x")


def test_parallel_installs_build_once(cache: Path) -> None:
    entered, release = threading.Event(), threading.Event()
    waiting = threading.Event()
    built: list[str] = []

    def slow(folder: Path) -> None:
        built.append("first")
        entered.set()
        assert release.wait(60)
        build(folder)

    def quick(folder: Path) -> None:
        built.append("second")
        build(folder)

    def notice(what: str, done: int, total: int) -> None:
        if what.startswith("waiting"):
            waiting.set()

    first = threading.Thread(target=models.install, args=(ALIAS, slow))
    second = threading.Thread(target=models.install, args=(ALIAS, quick, notice))
    first.start()
    assert entered.wait(60)
    second.start()
    assert waiting.wait(60)
    release.set()
    first.join(60)
    second.join(60)
    assert built == ["first"]
    assert models.resolve(ALIAS.name) == cache / ALIAS.name


def test_progress_counts_bytes(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(models.HASH_CHUNK_BYTES + 5))
    seen: list[tuple[str, int, int]] = []
    models.sha256_of(file, lambda *step: seen.append(step), "reading")
    size = models.HASH_CHUNK_BYTES + 5
    assert seen == [("reading", models.HASH_CHUNK_BYTES, size), ("reading", size, size)]


def test_the_draft_is_made_from_the_target_and_keeps_both_ends() -> None:
    draft = models.ALIASES["smollm2-135m-draft"]
    keep = draft.keep_layers
    assert draft.needs == "smollm2-135m"
    assert list(keep) == sorted(set(keep))
    assert (keep[0], keep[-1]) == (0, 29)
    assert len(keep) < 30
