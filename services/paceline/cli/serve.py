"""`paceline serve`: one Serve YAML on this machine, in the foreground."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rich.markup import escape

from paceline import models
from paceline.cli import cluster, servefile
from paceline.cli.console import err, out, progress_display, status_display
from paceline.cli.fetch import fetch
from paceline.config import Pool
from paceline.engine.medusa_source import resolve_medusa
from paceline.errors import ConfigError, PacelineError
from paceline.rpc.certificates import Role, read_identity

WATCH_S = 1.0
ADAPTER_CONFIG = "adapter_config.json"
EXAMPLE_PROMPT = "Why is the sky blue?"


@contextmanager
def started(config: Path, host: str | None, port: int | None) -> Iterator[tuple[str, str]]:
    """(base URL, model name) of a running service; stops it when the block is left."""
    file = servefile.load(config)
    host = host or file.schema.http_options.host
    port = file.schema.http_options.port if port is None else port
    port = port or cluster.free_port(host)
    cluster.check_port_is_free(host, port)  # before minutes of downloading
    check_certificates(file)
    prefetch(file)
    with status_display() as status, cluster.local_service(file, host, port, status) as url:
        status("")
        yield url, file.served_model_name


def prefetch(file: servefile.ServeFile) -> None:
    """Every model that the file names, complete on this disk before a replica asks for it.

    Also refuses a pair that the target would refuse at every handshake.
    """
    for pool in file.pools:
        _check_adapters(pool)
        _check_heads(pool)
    folders: dict[str, Path] = {}
    with progress_display() as progress:
        for source in file.sources:
            if source in models.ALIASES:
                folders[source] = fetch(source, progress)
            elif source not in models.BUILTIN_SOURCES:
                folders[source] = models.resolve(source)
    for pool in file.pools:
        if pool.offer.has_drafts:
            _check_tokenizers(folders, pool)


def check_certificates(file: servefile.ServeFile) -> None:
    """Raises ConfigError for what targets and drafts, both on this machine, would refuse later."""
    for app in file.apps:
        if app.rpc.tls_dir:
            for role in Role:
                read_identity(Path(app.rpc.tls_dir), role, datetime.now(UTC))


def _check_adapters(pool: Pool) -> None:
    """Whether there is something to load; whether it fits the model is for the target to say.
    Built-in engines open no folder."""
    target = pool.config.target
    if target.model.source in models.BUILTIN_SOURCES:
        return
    for name, folder in target.adapters.items():
        path = f"{pool.where}target.adapters: {name}"
        if not os.path.isfile(os.path.join(os.path.expanduser(folder), ADAPTER_CONFIG)):
            raise ConfigError(
                f"{path}: {folder!r} is no folder of PEFT: it has no {ADAPTER_CONFIG}"
            )


def _check_heads(pool: Pool) -> None:
    """As above. Heads on the Hub are in the local cache afterwards."""
    target = pool.config.target
    if target.medusa and target.model.source not in models.BUILTIN_SOURCES:
        try:
            resolve_medusa(target.medusa)
        except ConfigError as error:
            said = str(error).removeprefix("target.medusa ")
            raise ConfigError(f"{pool.where}target.medusa: {said}") from error


def _check_tokenizers(folders: Mapping[str, Path], pool: Pool) -> None:
    """Built-in engines have no folder; whether they fit is for the handshake to say."""
    target, draft = pool.config.target.model.source, pool.config.draft.model.source
    if target not in folders or draft not in folders:
        return
    if models.tokenizer_hash(folders[target]) != models.tokenizer_hash(folders[draft]):
        raise ConfigError(
            f"{pool.where}target.model.source {target!r} and draft.model.source {draft!r} have "
            "different tokenizers: choose a draft made for this target, or set "
            "speculation.method: 'off'"
        )


def serve(config: Path, host: str | None, port: int | None) -> None:
    """Serve until a stop signal; then everything is stopped and this returns."""
    ready = False
    try:
        with started(config, host, port) as (url, model):
            ready = True
            file = servefile.load(config)
            names = ", ".join(map(escape, file.served_model_names))
            out.print(f"[bold green]ready[/] {names} at {url} (Ctrl-C stops it)\n")
            out.print(curl_line(url, model, file.needs_key), markup=False)
            while not (dead := cluster.dead_ray_processes()):
                time.sleep(WATCH_S)
            raise PacelineError(f"Ray ended unexpectedly ({', '.join(dead)})")
    except KeyboardInterrupt:
        if not ready:
            raise
        err.print("stopped")


def curl_line(url: str, model: str, needs_key: bool = False) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": EXAMPLE_PROMPT}],
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
    }
    key = '-H "Authorization: Bearer $PACELINE_API_KEY" ' if needs_key else ""
    return (
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' {key}"
        f"-d '{json.dumps(body)}'"
    )
