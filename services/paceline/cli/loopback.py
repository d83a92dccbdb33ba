"""Makes every port of a local Ray and Serve listen on the loopback address only.

Ray has no option for it: on Linux it replaces 127.0.0.1 by the machine's address, and each Serve
replica opens a port for other replicas on all interfaces. Nothing here is used on a cluster.
"""

from __future__ import annotations

import os

# With 0 Ray takes the loopback address for its own, as it always does on macOS.
LOOPBACK_ENV = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
SETUP_HOOK = f"{__name__}.bind_replicas"
ALL_INTERFACES, LOOPBACK = "[::]:", "127.0.0.1:"


def prefer_loopback() -> None:
    """For this process and those that it starts; call it before `ray.init`."""
    from ray._private import ray_constants

    os.environ.update(LOOPBACK_ENV)
    ray_constants.ENABLE_RAY_CLUSTER = False  # what the variable would have set at import


def bind_replicas() -> None:
    """Runs in each Ray worker before Serve is imported there."""
    from ray._common import tls_utils

    original = tls_utils.add_port_to_grpc_server

    def add_local_port(server: object, address: str) -> int:
        port: int = original(server, address.replace(ALL_INTERFACES, LOOPBACK))
        return port

    tls_utils.add_port_to_grpc_server = add_local_port
