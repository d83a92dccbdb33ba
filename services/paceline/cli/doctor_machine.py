"""What `paceline doctor` makes of the machine's facts: facts in, findings out. Pure.

Versions, CPUs, ports, certificates, keys, Ray. Every finding that is not ok names the fix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from paceline.cli.doctor_checks import Finding, Gpu, ModelFacts, on_gpu
from paceline.cli.values import size

# Ray's processes and sockets; below it they fail under load, not at the start.
MIN_OPEN_FILES = 4096
MIN_SHM_BYTES = 128 << 20
EXPIRES_SOON = timedelta(days=30)
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class PackageFacts:
    """A dependency as pyproject.toml asks for it; `installed` is empty where it is missing."""

    name: str
    wanted: str
    installed: str
    fits: bool


@dataclass(frozen=True, slots=True)
class PortFacts:
    """`problem` is empty where a server may listen."""

    host: str
    port: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RayFacts:
    num_cpus: int
    shm_bytes: int | None
    open_files: int
    address: str = ""  # RAY_ADDRESS
    other_pids: tuple[int, ...] = ()  # of Ray servers that run on this machine
    wanted_cpus: float = 0.0  # what the file's deployments ask for
    wanted_gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """`problems`: what the replicas would refuse; `expires` is the earliest end."""

    folder: str
    problems: tuple[str, ...] = ()
    expires: datetime | None = None


def check_python(version: tuple[int, int, int], wanted: str, fits: bool) -> Finding:
    fact = "Python " + ".".join(map(str, version))
    if fits:
        return Finding("python", "ok", fact)
    return Finding("python", "fail", f"{fact}, wanted {wanted}", "make a new venv with that Python")


def check_packages(packages: Sequence[PackageFacts]) -> list[Finding]:
    """One line for all that fit, one for each that does not."""
    bad = [package for package in packages if not package.fits]
    findings = [
        Finding(
            package.name,
            "fail",
            f"{package.installed or 'not installed'}, wanted {package.wanted}",
            f"pip install '{package.name}{package.wanted}'",
        )
        for package in bad
    ]
    shown = [p for p in packages if p.fits and p.name in ("torch", "ray", "transformers")]
    if not bad or shown:
        known = ", ".join(f"{package.name} {package.installed}" for package in shown)
        findings.append(
            Finding("packages", "ok", f"{len(packages) - len(bad)} of {len(packages)} fit: {known}")
        )
    return findings


def check_cpus(models: Sequence[ModelFacts], gpus: Sequence[Gpu], num_cpus: int) -> Finding:
    """Threads that compute at once; a built-in model computes next to nothing."""
    wanted = sum(
        model.config.num_threads * model.num_replicas * model.config.tensor_parallel_size
        for model in models
        if not model.is_builtin and not on_gpu(model.config, gpus)
    )
    if not wanted:
        return Finding("threads", "ok", "no model computes on the CPU")
    fact = f"{wanted} threads for {num_cpus} cores"
    if wanted > num_cpus:
        fix = "a smaller num_threads, fewer replicas, or a larger machine"
        return Finding("threads", "warn", f"{fact}: they will wait for each other", fix)
    return Finding("threads", "ok", fact)


def check_http_port(facts: PortFacts, served_at: str = "") -> Finding:
    """`served_at`: the running service that --url named, where it is on this port."""
    where = f"{facts.host}:{facts.port}"
    if not facts.problem:
        return Finding("http port", "ok", f"{where} is free")
    if served_at:
        return Finding("http port", "ok", f"{where} is the service at {served_at}")
    fix = f"stop what listens there (`ss -ltnp 'sport = :{facts.port}'`), or --port 0"
    return Finding("http port", "fail", f"{where}: {facts.problem}", fix)


def check_target_ports(first: int, last: int, num_free: int, num_targets: int) -> Finding:
    name = "target ports"
    if num_free < num_targets:
        fact = f"{first} to {last}: {num_free} free for {num_targets} target(s)"
        fix = f"target.port_max: {min(65535, last + 100)}, or stop what listens there"
        return Finding(name, "fail", fact, fix)
    return Finding(name, "ok", f"{first} to {last}: room for {num_targets} target(s)")


def check_certificates(facts: CertificateFacts | None, host: str, now: datetime) -> list[Finding]:
    """None: no rpc.tls_dir."""
    if facts is None:
        if host in LOCAL_HOSTS:
            return [Finding("certificates", "ok", "none: drafts and targets talk on this machine")]
        fix = "paceline certs FOLDER, then rpc.tls_dir: FOLDER"
        fact = f"none, but targets listen on {host}: anybody there can be a draft"
        return [Finding("certificates", "warn", fact, fix)]
    fix = f"paceline certs {facts.folder} --renew (without --renew the first time)"
    if facts.problems:
        return [Finding("certificates", "fail", problem, fix) for problem in facts.problems]
    if facts.expires is not None and facts.expires - now < EXPIRES_SOON:
        days = max(0, (facts.expires - now).days)
        return [Finding("certificates", "warn", f"they end in {days} days", fix)]
    until = f" until {facts.expires:%Y-%m-%d}" if facts.expires else ""
    return [Finding("certificates", "ok", f"{facts.folder}: good{until}")]


def check_keys(num_keys: int, host: str) -> Finding:
    if num_keys:
        return Finding("api keys", "ok", f"{num_keys} keys")
    if host in LOCAL_HOSTS:
        return Finding("api keys", "ok", f"none: only this machine reaches {host}")
    fix = "paceline key NAME, and its lines under args.gateway.api_keys"
    return Finding("api keys", "warn", f"none, and {host} is reached from elsewhere", fix)


def check_ray(facts: RayFacts, num_gpus: int) -> list[Finding]:
    return [
        _check_cluster(facts),
        *_check_resources(facts, num_gpus),
        _check_shm(facts.shm_bytes),
        _check_open_files(facts.open_files),
    ]


def _check_cluster(facts: RayFacts) -> Finding:
    if facts.address:
        fact = f"RAY_ADDRESS={facts.address}: `serve deploy` goes there, `paceline serve` does not"
        return Finding("ray", "warn", fact, "unset RAY_ADDRESS, unless you mean that cluster")
    if facts.other_pids:
        pids = ", ".join(map(str, facts.other_pids))
        fact = f"another Ray runs on this machine (process {pids})"
        fix = "`ray stop` if nobody needs it: both share cores and memory"
        return Finding("ray", "warn", fact, fix)
    return Finding("ray", "ok", "no other Ray on this machine, RAY_ADDRESS is not set")


def _check_resources(facts: RayFacts, num_gpus: int) -> list[Finding]:
    """Ray starts no replica for which it finds no place; it waits instead, silently."""
    findings = []
    having = (("CPUs", facts.wanted_cpus, facts.num_cpus), ("GPUs", facts.wanted_gpus, num_gpus))
    for what, wanted, present in having:
        if wanted > present:
            fact = f"deployments ask for {wanted:g} {what}, Ray finds {present}: some never start"
            fix = f"smaller num_{what.lower()} in ray_actor_options, or fewer replicas"
            findings.append(Finding(f"ray {what}", "fail", fact, fix))
        elif wanted:
            findings.append(Finding(f"ray {what}", "ok", f"{wanted:g} of {present} are asked for"))
    return findings


def _check_shm(shm_bytes: int | None) -> Finding:
    if shm_bytes is None:
        return Finding("/dev/shm", "ok", "this system has none: Ray uses files")
    if shm_bytes < MIN_SHM_BYTES:
        fact = f"{size(shm_bytes)} free, Ray wants {size(MIN_SHM_BYTES)} and falls back to /tmp"
        return Finding("/dev/shm", "warn", fact, "docker run --shm-size=1g, or remount it larger")
    return Finding("/dev/shm", "ok", f"{size(shm_bytes)} free")


def _check_open_files(limit: int) -> Finding:
    if limit < MIN_OPEN_FILES:
        return Finding("open files", "warn", f"ulimit -n is {limit}", "ulimit -n 65536")
    return Finding("open files", "ok", f"ulimit -n is {limit}")


# -- a running service ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProbeFacts:
    """One request to a running service. Status 0: nobody answered, `said` says why."""

    what: str
    status: int
    said: str = ""
    milliseconds: float = 0.0


_PROBE_FIXES: Mapping[str, str] = {
    "health": "start it: paceline serve FILE.yaml, or name another --url",
    "ready": "wait until targets have loaded; then look at the logs in /tmp/ray/session_latest",
    "one token": "the sentence before is the service's own; `paceline explain` shows its targets",
}


def check_probe(facts: ProbeFacts) -> Finding:
    name = f"live: {facts.what}"
    if facts.status == 200:
        return Finding(name, "ok", f"{facts.milliseconds:.0f} ms")
    if facts.status == 401:
        return Finding(name, "fail", facts.said or "401", "set PACELINE_API_KEY")
    fact = facts.said or f"it answered {facts.status}"
    return Finding(name, "fail", fact, _PROBE_FIXES.get(facts.what, ""))
