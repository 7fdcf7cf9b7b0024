"""The serving certificate: trusted before it is served, renewed in time, and replaced when it is invalid."""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

import pytest

from gputile.http.tls import present
from gputile.kube.aggregation import Secret, SecretMetadata
from gputile.kube.api import ApiRejected, Change, Snapshot, WatchUpdate
from gputile.metrics_api import certificates
from gputile.metrics_api.certificates import (
    BUNDLE,
    CERTIFICATE,
    DAY,
    KEY,
    CertificateKeeper,
    CertificatePair,
    ends,
    make_pair,
)
from gputile.metrics_api.resources import API_SERVICES
from gputile.metrics_api.settings import MetricsApiSettings
from gputile.model.errors import InputError

NAME = "gputile-metrics.kube-system.svc"


class Cluster:
    """One Secret, two APIServices, and in which order they were written."""

    def __init__(self, secret: Secret | None = None) -> None:
        self.secret = secret
        self.bundles: dict[str, bytes] = dict.fromkeys(API_SERVICES, b"")
        self.writes: list[str] = []
        self.refuses: ApiRejected | None = None
        self.changes: asyncio.Queue[WatchUpdate[Secret]] = asyncio.Queue()

    async def follow_secret(self, namespace: str, name: str) -> AsyncIterator[WatchUpdate[Secret]]:
        yield Snapshot((self.secret,) if self.secret is not None else ())
        while True:
            yield await self.changes.get()

    async def write_secret(self, namespace: str, name: str, version: str, data: Mapping[str, bytes]) -> Secret:
        if self.refuses is not None:
            raise self.refuses
        self.writes.append("secret")
        self.secret = secret(**{key: value.decode() for key, value in data.items()})
        return self.secret

    async def ca_bundle(self, service: str) -> bytes | None:
        return self.bundles.get(service)

    async def set_ca_bundle(self, service: str, bundle: bytes) -> None:
        self.writes.append(service)
        self.bundles[service] = bundle


def secret(**data: str) -> Secret:
    return Secret(
        SecretMetadata("s", "1"), {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    )


class Rig:
    def __init__(self, held: Secret | None = secret()) -> None:  # noqa: B008
        self.cluster, self.served, self.pauses = Cluster(held), list[CertificatePair](), list[float]()
        self.now, self.leads = 0.0, True
        settings = MetricsApiSettings(days=90)
        self.certifier = CertificateKeeper(
            self.cluster,
            settings,
            self.served.append,
            leads=lambda: self.leads,
            wall=lambda: self.now,
            pause=self.pause,
        )

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.cluster.writes.append("pause")

    async def round(self) -> list[str]:
        """One round; returns the writes."""
        await self.certifier.load(self.cluster.secret)
        self.cluster.writes.clear()
        await self.certifier.round()
        return self.cluster.writes


async def made() -> Rig:
    """With a certificate, issued just now."""
    rig = Rig()
    await rig.round()
    end = ends(rig.served[0].certificate)
    assert end is not None
    rig.now = end - 90 * DAY
    return rig


async def test_it_is_trusted_first_and_served_then() -> None:
    rig = Rig()
    assert await rig.round() == [*API_SERVICES, "pause", "secret"]
    (pair,) = rig.served
    assert all(bundle == pair.certificate for bundle in rig.cluster.bundles.values())


async def test_a_valid_certificate_is_left_alone() -> None:
    rig = await made()
    assert await rig.round() == []
    rig.now += 50 * DAY
    assert await rig.round() == []


async def test_it_is_renewed_when_a_third_of_its_lifetime_is_left_and_the_old_one_stays_trusted() -> None:
    rig = await made()
    rig.now += 61 * DAY
    assert await rig.round() == [*API_SERVICES, "pause", "secret"]
    old, new = rig.served
    assert old != new
    assert set(rig.cluster.bundles.values()) == {new.certificate + old.certificate}
    assert rig.cluster.secret is not None
    assert rig.cluster.secret.get(BUNDLE) == new.certificate + old.certificate


async def test_an_emptied_secret_gets_a_new_certificate() -> None:
    rig = await made()
    rig.cluster.secret = secret()
    await rig.round()
    old, new = rig.served
    assert set(rig.cluster.bundles.values()) == {new.certificate + old.certificate}


async def test_an_expired_certificate_is_no_longer_trusted() -> None:
    rig = await made()
    rig.now += 91 * DAY
    await rig.round()
    assert set(rig.cluster.bundles.values()) == {rig.served[-1].certificate}


async def test_a_changed_caBundle_is_restored() -> None:  # noqa: N802
    rig = await made()
    rig.cluster.bundles[API_SERVICES[1]] = b"nonsense"
    assert await rig.round() == [API_SERVICES[1]]


async def test_an_unregistered_api_service_is_left_out() -> None:
    rig = Rig()
    del rig.cluster.bundles[API_SERVICES[1]]
    assert await rig.round() == [API_SERVICES[0], "pause", "secret"]


async def test_an_invalid_certificate_is_replaced_and_never_served() -> None:
    rig = Rig(secret(**{CERTIFICATE: "nonsense", KEY: "nonsense"}))
    rig.certifier._serve = checking(rig)
    await rig.round()
    assert len(rig.served) == 1


def checking(rig: Rig) -> Callable[[CertificatePair], None]:
    def serve(pair: CertificatePair) -> None:
        if ends(pair.certificate) is None:
            raise InputError("cannot be used")
        rig.served.append(pair)

    return serve


async def test_a_replica_that_loses_leadership_while_it_waits_writes_nothing_more() -> None:
    rig = Rig()

    async def pause(seconds: float) -> None:
        rig.leads = False

    rig.certifier._pause = pause
    assert await rig.round() == [*API_SERVICES]
    assert rig.served == []


async def test_a_missing_secret_is_an_error_that_says_what_to_do() -> None:
    rig = Rig(None)
    with pytest.raises(InputError, match=r"Secret kube-system/gputile-metrics-tls: not found; apply deploy"):
        await rig.round()


async def test_nothing_is_done_before_the_secret_is_listed() -> None:
    rig = Rig()
    await rig.certifier.round()
    assert rig.cluster.writes == []


async def test_followers_serve_the_certificate_that_the_leader_wrote() -> None:
    rig, leader = Rig(), await made()
    rig.leads = False
    running = asyncio.create_task(rig.certifier.run())
    await asyncio.sleep(0)
    assert leader.cluster.secret is not None
    rig.cluster.changes.put_nowait(Change("MODIFIED", leader.cluster.secret))
    async with asyncio.timeout(2):
        while not rig.served:
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert rig.served == leader.served
    assert set(rig.cluster.writes) <= {"pause"}


@pytest.mark.parametrize("is_emptied", [False, True], ids=["renewed-in-time", "emptied-by-hand"])
async def test_the_served_certificate_stays_trusted_however_often_writing_fails(is_emptied: bool) -> None:
    rig = await made()
    (served,) = rig.served
    rig.now += 61 * DAY
    if is_emptied:
        rig.cluster.secret = secret()
    rig.cluster.refuses = ApiRejected(500, "InternalError", "etcd is slow")
    for _ in range(3):
        with pytest.raises(ApiRejected):
            await rig.round()
        assert all(served.certificate in bundle for bundle in rig.cluster.bundles.values())


async def test_a_new_leader_that_served_nothing_yet_trusts_the_certificate_of_the_secret() -> None:
    rig, before = Rig(), await made()
    assert before.cluster.secret is not None
    rig.cluster.secret, rig.now = before.cluster.secret, before.now + 61 * DAY
    rig.cluster.refuses = ApiRejected(500, "InternalError", "etcd is slow")
    for _ in range(2):
        with pytest.raises(ApiRejected):
            await rig.round()
    assert all(before.served[0].certificate in bundle for bundle in rig.cluster.bundles.values())


async def test_a_lost_race_is_retried() -> None:
    rig = Rig()
    rig.cluster.refuses = ApiRejected(409, "Conflict", "the object has been modified")
    with pytest.raises(ApiRejected):
        await rig.round()
    rig.cluster.refuses = None
    await rig.round()
    assert len(rig.served) == 1


# ---- openssl --------------------------------------------------------------------------------------------------------


async def test_openssls_certificate_is_valid_for_a_server_of_that_name() -> None:
    pair = await make_pair(NAME, 30)
    server, client = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.create_default_context(cadata=pair.certificate.decode()),
    )
    present(server, pair.certificate + pair.key)
    ((first, second), (third, fourth)) = ((ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2))
    there = server.wrap_bio(first, second, server_side=True)
    here = client.wrap_bio(third, fourth, server_hostname=NAME)
    for _ in range(3):
        for side, out, into in ((here, fourth, first), (there, second, third)):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
            into.write(out.read())
    assert here.getpeercert()["subjectAltName"] == (("DNS", NAME),)  # type: ignore[index]


async def test_a_missing_openssl_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "COMMAND", "no-such-program-as-this")
    with pytest.raises(InputError, match="name certificate files"):
        await make_pair(NAME, 30)


async def test_a_failing_openssl_is_an_error_with_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "COMMAND", "openssl req -no-such-flag")
    with pytest.raises(InputError, match="issued no certificate"):
        await make_pair(NAME, 30)


@pytest.mark.parametrize("text", [b"", b"nonsense", b"\xff"])
def test_the_end_of_an_invalid_certificate_is_unknown(text: bytes) -> None:
    assert ends(text) is None
