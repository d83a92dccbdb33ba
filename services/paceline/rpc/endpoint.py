"""What both ends tell gRPC: the method's path and the channel options."""

from __future__ import annotations

import asyncio

import grpc

from paceline.config import RpcConfig
from paceline.rpc.v1 import speculation_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Speculation"].full_name
METHOD = "Speculate"

Options = list[tuple[str, int | str]]

MIN_SILENCE_MS = 1000  # a busy machine may need so long for a connection and its first call

# What a read or write on a finished, broken or cancelled call raises, besides CancelledError.
CALL_ERRORS = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)


def _common_options(config: RpcConfig) -> Options:
    """No compression: token ids do not shrink enough to pay for the CPU."""
    return [
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.keepalive_time_ms", config.keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", config.keepalive_timeout_ms),
        # gRPC 1.85 has keepalive pings time out by this one, 60 s by default.
        ("grpc.http2.ping_timeout_ms", config.keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # 0 = no limit
    ]


def server_options(config: RpcConfig) -> Options:
    silence_ms = max(MIN_SILENCE_MS, int(config.hello_timeout_s * 1000))
    return [
        *_common_options(config),
        # Keepalive pings of our own clients must not count as abuse (GOAWAY too_many_pings).
        ("grpc.http2.min_ping_interval_without_data_ms", config.keepalive_time_ms // 2),
        ("grpc.so_reuseport", 0),  # a port clash must fail, not share the port
        # Who connects must get through TLS and HTTP/2 (gRPC: 120 s), and then call (gRPC: ever).
        ("grpc.server_handshake_timeout_ms", silence_ms),
        ("grpc.max_connection_idle_ms", silence_ms),
    ]


def client_options(config: RpcConfig) -> Options:
    return [
        *_common_options(config),
        ("grpc.enable_retries", 0),  # a stream cannot be replayed; the draft dials again itself
        ("grpc.enable_http_proxy", 0),  # http_proxy is meant for the web, not for this
        ("grpc.lb_policy_name", "pick_first"),
        ("grpc.use_local_subchannel_pool", 1),  # a redial never inherits a broken connection
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
