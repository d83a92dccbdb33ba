"""Measures what `paceline doctor` judges: files, packages, memory, ports, Ray. Judges nothing.

Changes nothing either: downloads nothing, starts nothing, leaves every port closed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.doctor_checks import AdapterFacts, Gpu, ModelFacts, PoolFacts
from paceline.cli.doctor_machine import (
    CertificateFacts,
    PackageFacts,
    PortFacts,
    ProbeFacts,
    RayFacts,
)
from paceline.cli.doctor_tokenizers import SAMPLE, OverlapFacts
from paceline.cli.model_facts import find_folder, read_shape, template_kind
from paceline.cli.values import mapping
from paceline.config import AppConfig, ModelConfig, Pool
from paceline.config.names import DRAFTS, TARGETS
from paceline.errors import ConfigError
from paceline.models import BUILTIN_SOURCES, tokenizer_hash

if TYPE_CHECKING:
    import httpx

    from paceline.cli.servefile import ServeFile

PACKAGE = "paceline"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
PROBE_TIMEOUT_S = 60.0
_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")
# A port range of any size: so many that are free are enough to know.
MAX_PORTS_TRIED = 1000
MAX_PORT = 65535
_RAY_SERVERS = (b"raylet", b"gcs_server")


@dataclass(frozen=True, slots=True)
class Deployment:
    """What Ray Serve is told of one deployment, as far as the machine must provide it."""

    name: str
    num_replicas: int
    cpus: float
    gpus: float


def python_fits() -> tuple[tuple[int, int, int], str, bool]:
    from packaging.specifiers import SpecifierSet

    version = sys.version_info[:3]
    wanted = importlib.metadata.metadata(PACKAGE)["Requires-Python"] or ""
    return version, wanted, SpecifierSet(wanted).contains(platform.python_version(), True)


def packages(requirements: Sequence[str] | None = None) -> list[PackageFacts]:
    """Those that Paceline needs; extras are not."""
    from packaging.requirements import Requirement

    names = importlib.metadata.requires(PACKAGE) if requirements is None else requirements
    found = []
    for requirement in map(Requirement, names or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            installed = ""
        fits = bool(installed) and requirement.specifier.contains(installed, True)
        found.append(PackageFacts(requirement.name, str(requirement.specifier), installed, fits))
    return found


def gpus() -> tuple[Gpu, ...]:
    """None without torch: the packages' finding says so."""
    try:
        from paceline.engine.devices import visible_accelerators  # imports torch: seconds
    except ImportError:
        return ()
    return tuple(Gpu(a.name, a.free_bytes, a.has_bfloat16) for a in visible_accelerators())


def free_ram() -> int:
    """What the kernel would give now, or less where a container may not have it."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _MEMORY.is_file():
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
    with contextlib.suppress(OSError, ValueError):  # no limit is the word "max"
        limit = int((_CGROUP / "memory.max").read_text())
        free = min(free, limit - int((_CGROUP / "memory.current").read_text()))
    return max(0, free)


def num_cpus() -> int:
    """Those that this process may use, as Ray counts them without a container's quota."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


# -- the file -----------------------------------------------------------------------------------


def deployments(file: ServeFile) -> list[Deployment]:
    """At the start: an autoscaled deployment begins with its least."""
    return [
        Deployment(
            deployment.name,
            _num_replicas(deployment),
            *_resources(deployment),
        )
        for application in file.schema.applications
        for deployment in application.deployments
    ]


def _num_replicas(deployment: Any) -> int:
    scaling = _given(deployment, "autoscaling_config")
    if scaling is not None:
        data = mapping(scaling if isinstance(scaling, dict) else scaling.model_dump())
        return int(data.get("initial_replicas") or data.get("min_replicas") or 1)
    count = _given(deployment, "num_replicas")
    return count if isinstance(count, int) else 1


def _resources(deployment: Any) -> tuple[float, float]:
    """(CPUs, GPUs) of one replica with its ranks. Ray gives a replica one CPU by default."""
    if bundles := _given(deployment, "placement_group_bundles"):
        return sum(b.get("CPU", 0.0) for b in bundles), sum(b.get("GPU", 0.0) for b in bundles)
    options = _given(deployment, "ray_actor_options")
    given = options.model_dump() if options is not None else {}
    cpus, gpus = given.get("num_cpus"), given.get("num_gpus")
    return (1.0 if cpus is None else float(cpus)), float(gpus or 0.0)


def _given(deployment: Any, field: str) -> Any:
    return getattr(deployment, field) if field in deployment.model_fields_set else None


def pools(file: ServeFile) -> list[PoolFacts]:
    """Every served model with its target and draft, sources looked up on this disk."""
    known = deployments(file)
    return [_pool_facts(pool, known) for pool in file.pools]


def _pool_facts(pool: Pool, known: Sequence[Deployment]) -> PoolFacts:
    app = pool.config
    targets = _named(known, TARGETS + pool.suffix)
    target = model_facts(
        f"{pool.where}target.model", app.target.model, app.target.max_num_seqs, targets
    )
    draft = None
    if pool.offer.has_drafts:
        # More sequences than all targets run can never be drafted for.
        num_seqs = min(app.draft.max_sessions, targets.num_replicas * app.target.max_num_seqs)
        drafts = _named(known, DRAFTS + pool.suffix)
        draft = model_facts(f"{pool.where}draft.model", app.draft.model, num_seqs, drafts)
    adapters = tuple(adapter(name, path) for name, path in app.target.adapters.items())
    shared = overlap(app.draft.model) if draft is not None and draft.shape is not None else None
    return PoolFacts(pool.name, target, draft, template_of(app), adapters, shared)


def overlap(draft: ModelConfig) -> OverlapFacts | None:
    """Of a draft that is there, with the tokenizer of its target; None when it has the same."""
    source = draft.target_tokenizer
    if not source:
        return None
    try:
        from paceline.engine.translated_folder import load_translation  # imports torch: seconds
        from paceline.engine.vocabulary import find_tokenizer
    except ImportError:
        return None  # the packages' finding says so
    try:
        folder = find_tokenizer(source, is_offline=True)
        translation = load_translation(find_folder(draft.source), folder)
    except ConfigError as error:
        return OverlapFacts(source, problem=str(error))
    found = translation.overlap
    return OverlapFacts(
        source,
        found.num_common,
        found.num_draft,
        found.num_target,
        translation.share_of(SAMPLE),
        tokenizer_hash(folder),
    )


def adapter(name: str, path: str) -> AdapterFacts:
    """Whether the files are there that PEFT saves; what they hold is for the engine to say."""
    folder = Path(path).expanduser()
    missing = [file for file in ADAPTER_FILES if not (folder / file).is_file()]
    return AdapterFacts(name, path, tuple(missing))


def _named(known: Sequence[Deployment], name: str) -> Deployment:
    return next((d for d in known if d.name == name), Deployment(name, 1, 1.0, 0.0))


def model_facts(key: str, config: ModelConfig, max_seqs: int, deployment: Deployment) -> ModelFacts:
    shape, problem = None, ""
    if config.source not in BUILTIN_SOURCES:
        try:
            shape = read_shape(find_folder(config.source))
        except ConfigError as error:
            problem = str(error)
    return ModelFacts(
        key, config, max_seqs, deployment.num_replicas, deployment.gpus, shape, problem
    )


def template_of(app: AppConfig) -> str | None:
    """The kind of `gateway.chat_template`; None where the model's own is used."""
    from paceline.gateway import templates

    text = templates.read(app.gateway.chat_template)
    return None if text is None else template_kind(text)


# -- the machine --------------------------------------------------------------------------------


def port(host: str, number: int) -> PortFacts:
    if not 0 <= number <= MAX_PORT:
        return PortFacts(host, number, f"a port is 0 to {MAX_PORT}")
    try:
        with socket.create_server((host, number)):
            return PortFacts(host, number)
    except OSError as error:
        return PortFacts(host, number, error.strerror or str(error))


def num_free_ports(
    host: str,
    first: int,
    last: int,
    enough: int,
    try_port: Callable[[str, int], PortFacts] = port,
) -> int:
    """Counts until there are `enough`."""
    num_free = 0
    for number in range(first, min(last, first + MAX_PORTS_TRIED - 1) + 1):
        num_free += not try_port(host, number).problem
        if num_free >= enough:
            break
    return num_free


def certificates(folder: str) -> CertificateFacts | None:
    """As the replicas read them."""
    if not folder:
        return None
    from paceline.rpc.certificates import Role, read_identity

    problems, ends = [], []
    for role in Role:
        try:
            ends.append(read_identity(Path(folder), role, datetime.now(UTC)).expires)
        except ConfigError as error:
            problems.append(str(error))
    return CertificateFacts(folder, tuple(dict.fromkeys(problems)), min(ends, default=None))


def ray_facts(known: Sequence[Deployment]) -> RayFacts:
    return RayFacts(
        num_cpus=num_cpus(),
        shm_bytes=shutil.disk_usage(_SHM).free if _SHM.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        address=os.environ.get("RAY_ADDRESS", ""),
        other_pids=tuple(ray_servers()),
        wanted_cpus=sum(d.num_replicas * d.cpus for d in known),
        wanted_gpus=sum(d.num_replicas * d.gpus for d in known),
    )


def ray_servers(proc: Path = Path("/proc")) -> list[int]:
    """Processes that are a Ray node's servers; nothing is seen where there is no /proc."""
    found = []
    for entry in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is not ours to see
            name = (entry / "cmdline").read_bytes().split(b"\0")[0].rpartition(b"/")[2]
            if name in _RAY_SERVERS:
                found.append(int(entry.name))
    return sorted(found)


# -- a running service --------------------------------------------------------------------------


def probes(url: str, api_key: str) -> list[ProbeFacts]:
    """Is it there, would it answer, does it: the first that fails is the last."""
    from paceline.cli.demo import client

    found: list[ProbeFacts] = []
    with client(url, api_key, PROBE_TIMEOUT_S) as http:
        for what, ask in (("health", _health), ("ready", _ready), ("one token", _one_token)):
            found.append(_timed(what, http, ask))
            if found[-1].status != 200:
                break
    return found


def _timed(what: str, http: httpx.Client, ask: Any) -> ProbeFacts:
    import httpx

    begun = time.perf_counter()
    try:
        response = ask(http)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return ProbeFacts(what, 0, f"no answer from {http.base_url}: {error}")
    except (LookupError, TypeError, ValueError):  # a list of models that is none
        return ProbeFacts(what, 0, f"{http.base_url} is no OpenAI-compatible service")
    return ProbeFacts(
        what, response.status_code, _said(response), 1e3 * (time.perf_counter() - begun)
    )


def _health(http: httpx.Client) -> httpx.Response:
    return http.get("/health")


def _ready(http: httpx.Client) -> httpx.Response:
    return http.get("/ready")


def _one_token(http: httpx.Client) -> httpx.Response:
    listed = http.get("/v1/models")
    if listed.status_code != 200:
        return listed
    model = listed.json()["data"][0]["id"]
    body = {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}
    return http.post("/v1/completions", json=body)


def _said(response: httpx.Response) -> str:
    """The sentence of an error in OpenAI's shape."""
    try:
        error = mapping(mapping(response.json()).get("error"))
    except ValueError:
        return "" if response.status_code == 200 else f"{response.status_code}, and no JSON"
    return str(error.get("message") or "")
