"""A Ray and a Serve of our own on this machine: started, watched until ready, stopped whole.

`local_service` is the only entry. It leaves no process behind, however it is left. Deploys by
config, as `serve deploy` does on a cluster.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from paceline.cli import loopback, processes
from paceline.cli.proxy import proxy_env
from paceline.cli.servefile import ServeFile
from paceline.errors import ConfigError, PacelineError

Status = Callable[[str], None]

START_TIMEOUT_S = 600.0
READY_TIMEOUT_S = 10.0
POLL_S = 0.25
SERVE_STOP_TIMEOUT_S = 30.0
STOP_GRACE_S = 10.0
# Little goes through Ray's object store here: tokens are small and weights are loaded in place.
OBJECT_STORE_BYTES = 128 << 20
# For Ray's processes; they read it when they start.
RAY_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # a replica is the work here, not a background task
    "GRPC_VERBOSITY": "ERROR",  # gRPC reports every peer that hangs up
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# Ray looks for its token in this order, then in ~/.ray/auth_token.
TOKEN_ENV = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
LOGS_HINT = "the replicas' logs are in /tmp/ray/session_latest/logs/serve"
OUR_ERROR = re.compile(r"paceline\.errors\.\w+: (.+)")
ANY_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*: .+$", re.MULTILINE)


@contextmanager
def local_service(file: ServeFile, host: str, port: int, status: Status) -> Iterator[str]:
    """The base URL of `file`'s application, from ready until the block is left."""
    check_port_is_free(host, port)
    with _stop_signals_interrupt():
        try:
            status("starting Ray")
            _start_ray(file)
            _stop_signals_interrupt_now()  # ray.init has put its own SIGTERM handler
            status("starting Ray Serve")
            _deploy(file, host, port)
            url = base_url(host, port)
            wait_until_ready(url, status)
            yield url
        finally:
            status("stopping")
            with _signals_ignored():
                _stop()


def base_url(host: str, port: int) -> str:
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"http://{local}:{port}"


def check_port_is_free(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port"
        ) from error


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _start_ray(file: ServeFile) -> None:
    import ray

    os.environ.update(RAY_ENV | proxy_env(file.apps))
    _choose_token()
    loopback.prefer_loopback()
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
        log_to_driver=False,
        runtime_env={"worker_process_setup_hook": loopback.SETUP_HOOK},
        _node_ip_address="127.0.0.1",
    )


def _choose_token() -> None:
    """Ray asks for a token by default, and whoever knows it can run code here. Its own lies in the
    home folder, readable as new files are: this one is in no file."""
    if not any(name in os.environ for name in TOKEN_ENV):
        os.environ[TOKEN_ENV[0]] = secrets.token_hex(32)


def _deploy(file: ServeFile, host: str, port: int) -> None:
    from ray.serve._private.api import serve_start

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    schema = file.schema
    schema.http_options.host, schema.http_options.port = host, port
    client = serve_start(
        http_options=schema.http_options.model_dump(), proxy_location=schema.proxy_location
    )
    client.deploy_apps(schema)


def wait_until_ready(url: str, status: Status) -> None:
    """Until GET /ready says 200; `PacelineError` when the deployment fails instead."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(trust_env=False, timeout=READY_TIMEOUT_S) as http:
        while time.monotonic() < deadline:
            status(_check_deployments())
            if _is_ready(http, url):
                return
            time.sleep(POLL_S)
    raise PacelineError(f"not ready after {START_TIMEOUT_S:.0f} s; {LOGS_HINT}")


def _is_ready(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(f"{url}/ready").status_code == httpx.codes.OK
    except httpx.HTTPError:  # the proxy is not up yet, or its replica is just starting
        return False


def _check_deployments() -> str:
    """What is still starting, in words; raises when something cannot start."""
    from ray import serve

    waiting: list[str] = []
    for application in serve.status().applications.values():
        messages = [application.message, *(d.message for d in application.deployments.values())]
        ours = [match for message in messages if (match := OUR_ERROR.search(message or ""))]
        if ours:
            raise ConfigError(ours[0].group(1))
        if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise PacelineError(f"the application failed: {reason(messages)}; {LOGS_HINT}")
        waiting += [n for n, d in application.deployments.items() if d.status != "HEALTHY"]
    return f"loading {', '.join(sorted(waiting))}" if waiting else "waiting for the first answer"


def reason(messages: list[str]) -> str:
    """The last line of a traceback that names an exception, else the first line there is."""
    text = "\n".join(message for message in messages if message)
    errors = ANY_ERROR.findall(text)
    return str(errors[-1] if errors else (text.splitlines() or ["no reason given"])[0]).strip()


def dead_ray_processes() -> list[str]:
    """Names of Ray's own processes that ended although nobody asked them to."""
    import ray

    node = ray._private.worker._global_node
    return [name for name, _ in node.dead_processes()] if node else ["all"]


def _stop() -> None:
    """Serve, then Ray, then whatever is left below this process."""
    started = processes.descendants()
    # Ray prints to stdout that Serve's controller ended, as if that were an error.
    with contextlib.redirect_stdout(io.StringIO()):
        _stop_serve()
    started |= processes.descendants()
    import ray

    ray.shutdown()
    processes.end(started, STOP_GRACE_S)


def _stop_serve() -> None:
    import ray
    from ray.serve.context import _get_global_client
    from ray.serve.exceptions import RayServeException

    if not ray.is_initialized() or dead_ray_processes():
        return  # nobody is there to answer
    # Serve was not up, or is gone already: ending Ray afterwards ends its processes.
    with contextlib.suppress(RayServeException, ray.exceptions.RayError):
        _get_global_client().shutdown(timeout_s=SERVE_STOP_TIMEOUT_S)


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _stop_signals_interrupt_now() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)


@contextmanager
def _stop_signals_interrupt() -> Iterator[None]:
    """A stop signal unwinds the block like Ctrl-C; the old handlers return afterwards."""
    old = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    _stop_signals_interrupt_now()
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """An impatient second Ctrl-C must not cut the clean-up short: it is bounded in time."""
    old = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
