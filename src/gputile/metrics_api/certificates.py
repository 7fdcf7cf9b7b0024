"""The serving certificate of the metrics API: issued, kept in a Secret, renewed in time, and trusted by the API server.

The leader issues it and writes the Secret; every replica serves the certificate of the Secret. A certificate is first
trusted (in the caBundle of the APIServices) and then served, and the previous one stays trusted, so that no connection
of the API server ever fails.

                 on the leader, if there is none, or a third of its lifetime is left
  none, old --issue--> trusted: caBundle = new + old --a moment later--> Secret --each replica's watch--> served

To get a new certificate at once, empty the Secret. The certificate is self-signed and its own CA: there is no CA key to
keep. It is issued by the program `openssl` (docs/decisions/0015).
"""

import asyncio
import logging
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol

import msgspec

from gputile.concurrency.tasks import cancel_all
from gputile.kube.aggregation import Secret
from gputile.kube.api import ApiRejected, OutcomeUnknown, WatchUpdate
from gputile.kube.informer import Informer, one_object
from gputile.metrics_api.resources import API_SERVICES
from gputile.metrics_api.settings import MetricsApiSettings
from gputile.model.errors import InputError
from gputile.telemetry.logs import fields

log = logging.getLogger(__name__)

ROUND = 10.0  # seconds between two checks of the certificate and the caBundle
SOON = 0.5  # seconds, on a replica that may become the leader
SETTLE = 2.0  # seconds that the API server has to load a new caBundle before the new certificate is served
PATIENCE = 30.0  # seconds for openssl
LEFT = 1 / 3  # of its lifetime: then a certificate is renewed
DAY = 86400.0
PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
CERTIFICATE, KEY, BUNDLE = "tls.crt", "tls.key", "ca.crt"  # keys in the Secret


class CertificateStore(Protocol):
    """The API server calls for the Secret and the APIServices; implemented in `kube.aggregation`."""

    def follow_secret(self, namespace: str, name: str) -> AsyncIterator[WatchUpdate[Secret]]: ...

    async def write_secret(self, namespace: str, name: str, version: str, data: Mapping[str, bytes]) -> Secret: ...

    async def ca_bundle(self, service: str) -> bytes | None: ...

    async def set_ca_bundle(self, service: str, bundle: bytes) -> None: ...


class CertificatePair(msgspec.Struct, frozen=True):
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


Make = Callable[[str, int], Awaitable[CertificatePair]]
"""Issues a certificate for this DNS name, valid for so many days."""


class CertificateKeeper:
    """Serves the certificate of the Secret; on the leader, also issues, trusts and renews it."""

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
        self._leads, self._wall, self._pause, self._issue = leads, wall, pause, make or make_pair
        self._secret: Secret | None = None  # as last seen or written
        self._is_listed = False
        self._served: CertificatePair | None = None
        self._woken = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_secret())
            tasks.create_task(self._keep())

    # ---- every replica ----------------------------------------------------------------------------------------------

    async def _watch_secret(self) -> None:
        settings = self._settings
        feed = partial(self._cluster.follow_secret, settings.namespace, settings.secret)
        message = "cannot watch the certificate's Secret"
        await Informer(feed, *one_object(self.load), message=message, log_repeats=True).run()

    async def load(self, secret: Secret | None) -> None:
        """Serve the certificate of the Secret; an unusable one changes nothing."""
        self._secret, self._is_listed = secret, True
        self._woken.set()
        pair = self._pair()
        if pair is None or pair == self._served:
            return
        try:
            self._serve(pair)
        except InputError as error:
            log.warning("the certificate in the Secret cannot be used", extra=fields(why=str(error)))
            return
        self._served = pair
        log.info("serving the certificate of the Secret", extra=fields(until=ends(pair.certificate)))

    def _pair(self) -> CertificatePair | None:
        secret = self._secret
        if secret is None or not (secret.get(CERTIFICATE) and secret.get(KEY)):
            return None
        return CertificatePair(secret.get(CERTIFICATE), secret.get(KEY))

    # ---- the leader -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        last_error = ""
        while True:
            try:
                if self._leads():
                    await self.round()
                    last_error = ""
            except (ApiRejected, OutcomeUnknown, InputError) as error:
                if str(error) != last_error:
                    last_error = str(error)
                    log.warning("the metrics API's certificate cannot be renewed", extra=fields(why=last_error))
            await self._rest(ROUND if self._leads() else SOON)

    async def _rest(self, seconds: float) -> None:
        """Until the time has passed, or the Secret has changed."""
        self._woken.clear()
        waits = [asyncio.ensure_future(self._pause(seconds)), asyncio.ensure_future(self._woken.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all(waits)

    async def round(self) -> None:
        """Issue or renew the certificate if necessary, and make the API server trust it."""
        if not self._is_listed:
            return
        if self._secret is None:
            where = f"{self._settings.namespace}/{self._settings.secret}"
            raise InputError(f"Secret {where}: not found; apply deploy/metrics-api.yaml, which creates it")
        pair = self._pair()
        if pair is None or self._is_due(pair):
            await self._renew(self._secret)
        else:
            await self._trust(self._secret.get(BUNDLE) or pair.certificate)

    def _is_due(self, pair: CertificatePair) -> bool:
        end = ends(pair.certificate)
        return end is None or end - self._wall() < self._settings.days * DAY * LEFT

    async def _renew(self, secret: Secret) -> None:
        issued = await self._issue(f"{self._settings.service}.{self._settings.namespace}.svc", self._settings.days)
        bundle = issued.certificate + await self._still_trusted(secret)
        await self._trust(bundle)
        await self._pause(SETTLE)
        if not self._leads():
            return
        data = {CERTIFICATE: issued.certificate, KEY: issued.key, BUNDLE: bundle}
        version, where = secret.metadata.resource_version, self._settings
        await self.load(await self._cluster.write_secret(where.namespace, where.secret, version, data))
        log.info("the metrics API's certificate was renewed", extra=fields(until=ends(issued.certificate)))

    async def _still_trusted(self, secret: Secret) -> bytes:
        """The certificate that must stay trusted: the served one, or else the newest in a caBundle, unless it has
        expired. One that was trusted and could not be written to the Secret was never served."""
        known = [self._served.certificate if self._served is not None else b"", secret.get(CERTIFICATE)]
        known += [await self._cluster.ca_bundle(service) or b"" for service in API_SERVICES]
        for certificate in PEM.findall(b"\n".join(known)):
            end = ends(certificate)
            if end is not None and end > self._wall():
                return bytes(certificate)
        return b""

    async def _trust(self, bundle: bytes) -> None:
        """Write the caBundle of both APIServices, if they exist."""
        for service in API_SERVICES:
            present = await self._cluster.ca_bundle(service)
            if present is not None and present != bundle:
                await self._cluster.set_ca_bundle(service, bundle)
                log.info("updated the caBundle of an APIService", extra=fields(service=service))


def ends(certificate: bytes) -> float | None:
    """When the certificate expires, in seconds since 1970; None if it is not a CA certificate as issued here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=certificate.decode("ascii"))
        certificates = context.get_ca_certs()
    except (ssl.SSLError, ValueError):
        return None
    times = (str(entry["notAfter"]) for entry in certificates)
    return min((float(ssl.cert_time_to_seconds(time)) for time in times), default=None)


# ---- openssl --------------------------------------------------------------------------------------------------------

CONFIG = """\
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
    """Issue a certificate by the program `openssl`; nothing is written to a disk."""
    return await asyncio.to_thread(_run_openssl, name, days)


def _run_openssl(name: str, days: int) -> CertificatePair:
    """In a thread: asyncio gives child processes a socket for standard input, which openssl cannot open as a file."""
    command = [*COMMAND.split(), "-days", str(days), "-keyout", "-", "-out", "-"]
    config = CONFIG.format(name=name).encode()
    try:
        process = subprocess.run(command, input=config, capture_output=True, timeout=PATIENCE, check=False)
    except OSError as error:
        why = f"openssl: cannot be started ({error.strerror})"
        todo = "install it, or name certificate files in `metrics_api.certificate` and `metrics_api.key`"
        raise InputError(f"{why}; {todo}") from error
    except subprocess.TimeoutExpired:
        raise InputError(f"openssl: no result after {PATIENCE:.0f} s; run it by hand to see why") from None
    certificate, key = b"".join(PEM.findall(process.stdout)), PEM.sub(b"", process.stdout)
    if process.returncode or not certificate or b"PRIVATE KEY" not in key:
        output = process.stderr.decode(errors="replace").strip()[-300:]
        raise InputError(f"openssl: exited with {process.returncode} and issued no certificate: {output}")
    return CertificatePair(certificate, key)
