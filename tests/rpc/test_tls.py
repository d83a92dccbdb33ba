"""Mutual TLS on real connections: who gets in, who does not, and how the refused one hears of it.

A refusal inside the TLS handshake shows at the other end as a closed socket, nothing more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from paceline.config import RpcConfig
from paceline.errors import ConfigError
from paceline.rpc.client import dial
from paceline.rpc.endpoint import METHOD, SERVICE
from paceline.rpc.errors import HandshakeRefused, StreamLost
from paceline.rpc.server import SpeculationServer
from tests.rpc import authority as a
from tests.rpc import fleet, wire
from tests.rpc import messages as m

pytestmark = pytest.mark.timeout(60)
no_orphans = pytest.fixture(autouse=True)(wire.no_orphans)

EXPIRED = {"begin": timedelta(days=-2), "lifetime": timedelta(days=1)}
LATER = {"begin": timedelta(days=1), "lifetime": timedelta(days=1)}


@pytest.fixture(scope="module")
def ca() -> a.Authority:
    return a.Authority()


async def talk(address: str, config: RpcConfig) -> None:
    """Dial, say something, hear the answer, hang up."""
    async with asyncio.timeout(wire.DEADLINE_S), dial(address, config, m.HELLO) as (_, stream):
        stream.send(m.DRAFT_TOKENS)
        assert await stream.receive() == [m.VERDICT]


async def raw_failure(
    address: str, ca_pem: bytes | None, pair: tuple[bytes, bytes] | None
) -> tuple[grpc.StatusCode, str]:
    """How a peer fares that checks nothing about itself: (status, details) of its call."""
    options = [
        ("grpc.ssl_target_name_override", a.TARGET_NAME),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    ]
    if ca_pem is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        chain, key = pair or (None, None)
        credentials = grpc.ssl_channel_credentials(ca_pem, key, chain)
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
    try:
        async with asyncio.timeout(wire.DEADLINE_S):
            return await wire.RawCall(call).status()
    finally:
        call.cancel()
        await channel.close()


@asynccontextmanager
async def raw_tls_server(ca_pem: bytes, pair: tuple[bytes, bytes]) -> AsyncIterator[str]:
    """A listener that any client may connect to, with this certificate."""
    server = grpc.aio.server()
    credentials = grpc.ssl_server_credentials([(pair[1], pair[0])], ca_pem, False)
    port = server.add_secure_port(f"{wire.HOST}:0", credentials)
    await server.start()
    try:
        yield f"{wire.HOST}:{port}"
    finally:
        await server.stop(grace=0)


async def test_good_certificates_talk(tmp_path: Path, ca: a.Authority) -> None:
    config = a.both_roles(tmp_path, ca)
    async with wire.serving(wire.echo, config) as server:
        await talk(server.address, config)


async def test_a_host_needs_its_own_files_only(tmp_path: Path, ca: a.Authority) -> None:
    target = a.write(tmp_path / "t", "target", ca.pem, ca.issue(a.TARGET_NAME))
    draft = a.write(tmp_path / "d", "draft", ca.pem, ca.issue(a.DRAFT_NAME))
    async with wire.serving(wire.echo, a.configured(target)) as server:
        await talk(server.address, a.configured(draft))


@pytest.mark.parametrize(
    "who", ["plaintext", "no certificate", "another CA", "expired", "not yet valid", "target only"]
)
async def test_a_peer_that_tls_refuses_is_cut_off(
    who: str, tmp_path: Path, ca: a.Authority
) -> None:
    config = a.both_roles(tmp_path, ca)
    trusted: bytes | None = ca.pem
    pair: tuple[bytes, bytes] | None = None
    match who:
        case "plaintext":
            trusted = None
        case "another CA":
            pair = a.Authority().issue(a.DRAFT_NAME)
        case "expired":
            pair = ca.issue(a.DRAFT_NAME, **EXPIRED)
        case "not yet valid":
            pair = ca.issue(a.DRAFT_NAME, **LATER)
        case "target only":
            pair = ca.issue(a.TARGET_NAME, usages=a.ANY_USAGE[:1])
    async with wire.serving(wire.echo, config) as server:
        code, details = await raw_failure(server.address, trusted, pair)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "Socket closed" in details
        assert server.num_streams == 0
        await talk(server.address, config)  # and nobody else suffers


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ((a.TARGET_NAME,), "its certificate is for a target, not for a draft"),
        ((a.DRAFT_NAME, a.TARGET_NAME), "its certificate is for a target, not for a draft"),
        (
            ("draft.example.com",),
            "its certificate is not for a draft: it lacks the DNS name draft.paceline.internal",
        ),
        (
            (),
            "its certificate is not for a draft: it lacks the DNS name draft.paceline.internal",
        ),
    ],
    ids=["target", "both", "other", "none"],
)
async def test_a_certificate_of_another_role_is_no_drafts(
    names: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    ca: a.Authority,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of our CA and good for any TLS purpose: only the role is wrong."""
    config = a.both_roles(tmp_path, ca)
    async with wire.serving(wire.echo, config) as server:
        code, details = await raw_failure(server.address, ca.pem, ca.issue(*names))
        assert (code, details) == (grpc.StatusCode.PERMISSION_DENIED, sentence)
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= 30]
        assert len(warnings) == 1
        assert warnings[0].startswith("refused a peer at ipv4:127.0.0.1:")
        assert warnings[0].endswith(sentence)
        assert server.num_streams == 0
        await talk(server.address, config)


@pytest.mark.parametrize(
    "who", ["a draft", "another CA", "expired", "not yet valid", "draft only", "other names"]
)
async def test_a_draft_refuses_an_impostor(who: str, tmp_path: Path, ca: a.Authority) -> None:
    config = a.both_roles(tmp_path, ca)
    match who:
        case "a draft":
            pair = ca.issue(a.DRAFT_NAME)
        case "another CA":
            pair = a.Authority().issue(a.TARGET_NAME)
        case "expired":
            pair = ca.issue(a.TARGET_NAME, **EXPIRED)
        case "not yet valid":
            pair = ca.issue(a.TARGET_NAME, **LATER)
        case "draft only":
            pair = ca.issue(a.TARGET_NAME, usages=a.ANY_USAGE[1:])
        case _:
            pair = ca.issue("target.example.com", "localhost")
    async with raw_tls_server(ca.pem, pair) as address:
        with pytest.raises(HandshakeRefused, match="both need valid certificates of one CA"):
            await talk(address, config)


async def test_a_plaintext_draft_is_told_about_tls(tmp_path: Path, ca: a.Authority) -> None:
    async with wire.serving(wire.echo, a.both_roles(tmp_path, ca)) as server:
        with pytest.raises(StreamLost, match=r"speaks plaintext: set rpc\.tls_dir if the target"):
            await talk(server.address, wire.CONFIG)


async def test_a_plaintext_target_is_refused(tmp_path: Path, ca: a.Authority) -> None:
    config = a.both_roles(tmp_path, ca)
    async with wire.serving(wire.echo) as server:
        with pytest.raises((HandshakeRefused, StreamLost), match=r"target needs rpc\.tls_dir, too"):
            await talk(server.address, config)
        await talk(server.address, wire.CONFIG)


async def test_a_target_reads_new_certificates_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Even those of another CA; the streams that live go on."""
    caplog.set_level(logging.INFO, "paceline.rpc.tls")
    old, new = a.Authority("old"), a.Authority("new")
    server_config = a.both_roles(tmp_path / "server", old)
    old_draft, new_draft = (a.both_roles(tmp_path / ca_, which) for ca_, which in
                            (("o", old), ("n", new)))  # fmt: skip
    async with wire.serving(wire.echo, server_config) as server:
        async with dial(server.address, old_draft, m.HELLO) as (_, stream):
            with pytest.raises(HandshakeRefused):
                await talk(server.address, new_draft)
            a.both_roles(tmp_path / "server", new)
            await talk(server.address, new_draft)
            with pytest.raises(HandshakeRefused):
                await talk(server.address, old_draft)
            stream.send(m.DRAFT_TOKENS)
            assert await stream.receive() == [m.VERDICT]
        assert sum("new certificates from" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("how", ["half replaced", "missing", "garbage"])
async def test_a_target_keeps_its_certificates_while_the_files_do_not_fit(
    how: str, tmp_path: Path, ca: a.Authority, caplog: pytest.LogCaptureFixture
) -> None:
    config = a.both_roles(tmp_path, ca)
    draft = a.configured(a.write(tmp_path / "d", "draft", ca.pem, ca.issue(a.DRAFT_NAME)))
    new = ca.issue(a.TARGET_NAME)
    async with wire.serving(wire.echo, config) as server:
        match how:
            case "half replaced":
                (tmp_path / "target.pem").write_bytes(new[0])
            case "missing":
                (tmp_path / "target-key.pem").unlink()
            case "garbage":
                (tmp_path / "ca.pem").write_bytes(b"\x00 nonsense")
        for _ in range(3):
            await talk(server.address, draft)
        said = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
        assert len(said) == 1
        assert said[0].startswith("the certificates stay as they were: ")
        a.write(tmp_path, "target", ca.pem, new)
        caplog.set_level(logging.INFO, "paceline.rpc.tls")
        await talk(server.address, draft)
        assert "new certificates from" in caplog.records[-1].getMessage()


async def test_a_draft_reads_its_files_at_every_dial(tmp_path: Path, ca: a.Authority) -> None:
    config = a.both_roles(tmp_path / "server", ca)
    stranger = a.Authority("stranger")
    draft = a.configured(
        a.write(tmp_path / "d", "draft", stranger.pem, stranger.issue(a.DRAFT_NAME))
    )
    async with wire.serving(wire.echo, config) as server:
        with pytest.raises(HandshakeRefused):
            await talk(server.address, draft)
        a.write(tmp_path / "d", "draft", ca.pem, ca.issue(a.DRAFT_NAME))
        await talk(server.address, draft)
        (tmp_path / "d" / "draft-key.pem").unlink()
        with pytest.raises(HandshakeRefused, match=r"cannot read .*draft-key\.pem"):
            await talk(server.address, draft)


async def test_both_ends_say_at_their_start_what_is_missing(
    tmp_path: Path, ca: a.Authority
) -> None:
    config = a.configured(tmp_path)
    server = SpeculationServer(config, wire.HOST, *wire.PORTS, m.WELCOME, wire.echo)
    with pytest.raises(ConfigError, match=r"ca\.pem \(No such file or directory\): a target needs"):
        await server.start()
    a.write(tmp_path, "target", ca.pem, ca.issue(a.TARGET_NAME))
    await server.start()
    await server.stop(grace_s=0.0)
    settings = fleet.config().model_copy(update={"rpc": config})
    with pytest.raises(ConfigError, match=r"draft\.pem \(No such file or directory\): a draft"):
        async with fleet.draft(settings):
            pass


async def test_text_is_the_same_and_the_target_goes_on_without_a_stranger(
    tmp_path: Path, ca: a.Authority
) -> None:
    plain = fleet.config()
    rpc = plain.rpc.model_copy(update={"tls_dir": a.both_roles(tmp_path, ca).tls_dir})
    settings = plain.model_copy(update={"rpc": rpc})
    wanted = fleet.request("one", temperature=0.8, seed=3, max_tokens=96)
    async with fleet.target(settings) as target:
        async with fleet.draft(settings, target) as draft:
            deltas = await fleet.collect(target, wanted)
            assert fleet.tokens(deltas) == fleet.alone(wanted)
            assert fleet.accepted(deltas) > 0
            assert draft.table.stats.num_opened == 1
        await fleet.until(lambda: target.num_links == 0)
        code, _ = await raw_failure(target.server.address, ca.pem, ca.issue(a.TARGET_NAME))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        again = await fleet.collect(target, wanted)
        assert fleet.tokens(again) == fleet.alone(wanted)
        assert fleet.proposed(again) == 0
