"""The verbs over HTTP/2, as kube-scheduler calls them: negotiated by ALPN, also after a certificate was renewed."""

import json
from pathlib import Path

import msgspec
import pytest

from gputile.scheduler.settings import TlsSettings
from tests.http.h2_client import connected, trusting
from tests.kube.certificates import Authority
from tests.scheduler.test_server import bind_body, client, rig, serving, written


async def test_the_verbs_over_http_2_with_a_certificate(tmp_path: Path) -> None:
    authority = Authority()
    context = client(authority, signed_by=authority)
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with serving(rig(tls=written(tmp_path, authority))) as line, connected(line.server.port, context) as h2:
        assert json.loads(await h2.ask("/gputile/filter", line.rig.body()))["NodeNames"] == ["n1", "n2"]
        assert json.loads(await h2.ask("/gputile/bind", json.dumps(bind_body()).encode())) == {"Error": ""}
        line.rig.leading = False
        assert "Error" in json.loads(await h2.ask("/gputile/filter", line.rig.body()))
        await h2.until_goaway()
        assert line.rig.count("connections_total", protocol="h2") == 1


async def test_a_replica_that_is_not_the_leader_closes_all_connections_at_the_first_request(tmp_path: Path) -> None:
    authority = Authority()
    context = trusting(authority.pem, "h2")
    async with (
        serving(rig(tls=msgspec.structs.replace(written(tmp_path, authority), client_ca=""))) as line,
        connected(line.server.port, context) as asks,
        connected(line.server.port, context) as idle,
    ):
        assert await idle.ask("/healthz", b"x") == b"ok"
        line.rig.leading = False
        assert "Error" in json.loads(await asks.ask("/gputile/filter", line.rig.body()))
        await asks.until_goaway()
        await idle.until_goaway()


async def test_a_client_without_a_certificate_gets_no_verb(tmp_path: Path) -> None:
    authority = Authority()
    context = trusting(authority.pem, "h2")
    async with serving(rig(tls=written(tmp_path, authority))) as line, connected(line.server.port, context) as h2:
        assert await h2.ask("/gputile/filter", line.rig.body()) == (
            b"client certificate missing or not trusted; send one that the CA of `tls.client_ca` signed"
        )
        assert h2.statuses == {1: b"403"}


@pytest.mark.parametrize("name", ["localhost", None], ids=["with-sni", "without-sni"])
async def test_a_renewed_certificate_does_not_change_the_protocol(tmp_path: Path, name: str | None) -> None:
    old, new = Authority(), Authority()
    files = written(tmp_path, old)
    async with serving(rig(tls=TlsSettings(certificate=files.certificate, key=files.key))) as line:
        for authority in (old, new):
            written(tmp_path, authority)
            line.server.renew_certificate()
            async with connected(line.server.port, trusting(authority.pem, "h2", "http/1.1"), name=name) as h2:
                assert await h2.ask("/healthz", b"x") == b"ok"
