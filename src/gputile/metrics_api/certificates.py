"""Our own certificate: made, kept in a Secret, renewed in time, and the API server told to trust it.

Room:  the leader makes and writes; every replica serves what the Secret holds. A certificate is trusted first (the
       APIServices' caBundle) and served then, and the one before stays trusted: nobody ever meets a stranger.
Door:  `CertificateKeeper.run`, which ends only when cancelled. `serve` hears of each certificate, with its key.

                 the leader, if there is none, or a third of its life is left
  none, old --make--> trusted: caBundle = new + old --a moment later--> Secret --each replica's watch--> served

Whoever wants a new one now empties the Secret. The certificate signs itself and is its own CA: there is no CA key to
keep. It is made by the program `openssl` (docs/decisions/0015).
"""

import asyncio
import logging
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from gputile.kube.aggregation import Secret
from gputile.kube.api import ApiRejected, Change, OutcomeUnknown, Snapshot, Undecodable, WatchFailed, WatchUpdate
from gputile.metrics_api.resources import API_SERVICES
from gputile.metrics_api.settings import MetricsApiSettings
from gputile.model.errors import InputError
from gputile.telemetry.logs import fields

log = logging.getLogger(__name__)

ROUND = 10.0  # seconds between two looks whether all is as it should be
SOON = 0.5  # seconds, for a replica that may come to lead
SETTLE = 2.0  # seconds that the API server has to take a new caBundle in before we serve by it
PATIENCE = 30.0  # seconds for openssl
LEFT = 1 / 3  # of its life: then a certificate is renewed
DAY = 86400.0
PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
CERTIFICATE, KEY, BUNDLE = "tls.crt", "tls.key", "ca.crt"  # keys in the Secret


class CertificateStore(Protocol):
    """What of the API server is needed here; `kube.aggregation` has it."""

    def follow_secret(self, namespace: str, name: str) -> AsyncIterator[WatchUpdate[Secret]]: ...

    async def write_secret(self, namespace: str, name: str, version: str, data: Mapping[str, bytes]) -> Secret: ...

    async def ca_bundle(self, service: str) -> bytes | None: ...

    async def set_ca_bundle(self, service: str, bundle: bytes) -> None: ...


class CertificatePair(msgspec.Struct, frozen=True):
    certificate: bytes
    key: bytes


Make = Callable[[str, int], Awaitable[CertificatePair]]
"""A certificate made out to this name, for so many days."""


class CertificateKeeper:
    """See the module's text."""

    def __init__(
        self,
        cluster: CertificateStore,
        settings: MetricsApiSettings,
        serve: Callable[[CertificatePair], None],
        *,
        leads: Callable[[], bool],
        wall: Callable[[], float],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        make: Make | None = None,
    ) -> None:
        self._cluster, self._settings, self._serve = cluster, settings, serve
        self._leads, self._wall, self._pause, self._make = leads, wall, pause, make or make_pair
        self._secret: Secret | None = None  # as last seen or written
        self._is_listed = False
        self._served: CertificatePair | None = None
        self._woken = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._keep())

    # ---- every replica ----------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        settings = self._settings
        async for seen in self._cluster.follow_secret(settings.namespace, settings.secret):
            match seen:
                case Snapshot(items):
                    self.take(items[0] if items else None)
                case Change(how, secret):
                    self.take(None if how == "DELETED" else secret)
                case WatchFailed(why) | Undecodable(_, why):
                    log.warning("the certificate's Secret cannot be followed", extra=fields(why=why))

    def take(self, secret: Secret | None) -> None:
        """Serve by what it holds; what cannot be used changes nothing."""
        self._secret, self._is_listed = secret, True
        self._woken.set()
        pair = self._pair()
        if pair is None or pair == self._served:
            return
        try:
            self._serve(pair)
        except InputError as wrong:
            log.warning("the certificate in the Secret cannot be used", extra=fields(why=str(wrong)))
            return
        self._served = pair
        log.info("the metrics API has a certificate", extra=fields(until=ends(pair.certificate)))

    def _pair(self) -> CertificatePair | None:
        secret = self._secret
        if secret is None or not (secret.get(CERTIFICATE) and secret.get(KEY)):
            return None
        return CertificatePair(secret.get(CERTIFICATE), secret.get(KEY))

    # ---- the leader -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        said = ""
        while True:
            try:
                if self._leads():
                    await self.round()
                    said = ""
            except (ApiRejected, OutcomeUnknown, InputError) as wrong:
                if str(wrong) != said:
                    said = str(wrong)
                    log.warning("the metrics API's certificate is not in order", extra=fields(why=said))
            await self._rest(ROUND if self._leads() else SOON)

    async def _rest(self, seconds: float) -> None:
        """Until it is time, or the Secret has changed."""
        self._woken.clear()
        waits = [asyncio.ensure_future(self._pause(seconds)), asyncio.ensure_future(self._woken.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def round(self) -> None:
        """See that there is a good certificate, and that the API server trusts it."""
        if not self._is_listed:
            return
        if self._secret is None:
            where = f"{self._settings.namespace}/{self._settings.secret}"
            raise InputError(f"there is no Secret {where}; apply deploy/metrics-api.yaml, which makes it")
        pair = self._pair()
        if pair is None or self._is_due(pair):
            await self._renew(self._secret)
        else:
            await self._trust(self._secret.get(BUNDLE) or pair.certificate)

    def _is_due(self, pair: CertificatePair) -> bool:
        end = ends(pair.certificate)
        return end is None or end - self._wall() < self._settings.days * DAY * LEFT

    async def _renew(self, secret: Secret) -> None:
        made = await self._make(f"{self._settings.service}.{self._settings.namespace}.svc", self._settings.days)
        bundle = made.certificate + await self._trusted(secret)
        await self._trust(bundle)
        await self._pause(SETTLE)
        if not self._leads():
            return
        data = {CERTIFICATE: made.certificate, KEY: made.key, BUNDLE: bundle}
        version, where = secret.metadata.resource_version, self._settings
        self.take(await self._cluster.write_secret(where.namespace, where.secret, version, data))
        log.info("the metrics API's certificate was renewed", extra=fields(until=ends(made.certificate)))

    async def _trusted(self, secret: Secret) -> bytes:
        """The certificate that has to stay trusted: what is served, or else the newest that the API server trusts;
        unless it has ended. One that was trusted and could not be written to the Secret was never served."""
        known = [self._served.certificate if self._served is not None else b"", secret.get(CERTIFICATE)]
        known += [await self._cluster.ca_bundle(service) or b"" for service in API_SERVICES]
        for found in PEM.findall(b"\n".join(known)):
            end = ends(found)
            if end is not None and end > self._wall():
                return bytes(found)
        return b""

    async def _trust(self, bundle: bytes) -> None:
        """Both APIServices, those that exist."""
        for service in API_SERVICES:
            present = await self._cluster.ca_bundle(service)
            if present is not None and present != bundle:
                await self._cluster.set_ca_bundle(service, bundle)
                log.info("an APIService was told our certificate", extra=fields(service=service))


def ends(certificate: bytes) -> float | None:
    """When it does, in seconds since 1970; None where it is none that was made here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=certificate.decode("ascii"))
        found = context.get_ca_certs()
    except (ssl.SSLError, ValueError):
        return None
    return min((float(ssl.cert_time_to_seconds(str(one["notAfter"]))) for one in found), default=None)


# ---- openssl --------------------------------------------------------------------------------------------------------

WISH = """\
[req]
distinguished_name = name
x509_extensions = more
prompt = no
[name]
CN = {name}
[more]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, digitalSignature, keyCertSign
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
subjectAltName = DNS:{name}
"""
COMMAND = "openssl req -x509 -config /dev/stdin -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -sha256"


async def make_pair(name: str, days: int) -> CertificatePair:
    """By the program `openssl`; nothing touches a disk."""
    return await asyncio.to_thread(_made, name, days)


def _made(name: str, days: int) -> CertificatePair:
    """In a thread: the loop gives its children a socket for standard input, which openssl cannot open as a file."""
    command = [*COMMAND.split(), "-days", str(days), "-keyout", "-", "-out", "-"]
    wish = WISH.format(name=name).encode()
    try:
        done = subprocess.run(command, input=wish, capture_output=True, timeout=PATIENCE, check=False)
    except OSError as wrong:
        why = f"openssl cannot be started ({wrong.strerror})"
        todo = "install it, or name certificate files in `metrics_api.certificate` and `metrics_api.key`"
        raise InputError(f"{why}; {todo}") from wrong
    except subprocess.TimeoutExpired:
        raise InputError(f"openssl said nothing for {PATIENCE:.0f} s; run it by hand to see why") from None
    certificate, key = b"".join(PEM.findall(done.stdout)), PEM.sub(b"", done.stdout)
    if done.returncode or not certificate or b"PRIVATE KEY" not in key:
        said = done.stderr.decode(errors="replace").strip()[-300:]
        raise InputError(f"openssl ended with {done.returncode} and made no certificate: {said}")
    return CertificatePair(certificate, key)
