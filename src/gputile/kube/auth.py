"""Who we are to the API server: what a kubeconfig says, or the ServiceAccount of the pod we run in.

Room:  finds the server, whom to trust and our credentials; reads tokens anew and runs exec plugins. No secret is ever
       part of an error.
Door:  `load` once at the start; then `ClusterAccess.headers` before each request, `ClusterAccess.rejected` after a 401.
"""

import base64
import difflib
import os
import ssl
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from gputile.kube.credentials import (
    PLUGIN_VERSIONS,
    Clock,
    CredentialSource,
    ExecConfig,
    ExecPlugin,
    StaticCredential,
    TokenFile,
)
from gputile.model.errors import InputError
from gputile.text.documents import SETTINGS, NotYaml, content, read_one

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # the same in every pod of every cluster

T = TypeVar("T")

# ---- a kubeconfig, as far as we read it -----------------------------------------------------------------------------


class KubeconfigCluster(msgspec.Struct, frozen=True, rename="kebab"):
    server: str = ""
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool = False
    tls_server_name: str | None = None
    proxy_url: str | None = None


class KubeconfigUser(msgspec.Struct, frozen=True, rename="kebab"):
    token: str | None = None
    token_file: str | None = msgspec.field(default=None, name="tokenFile")
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    username: str | None = None
    password: str | None = None
    exec: ExecConfig | None = None
    auth_provider: Any = None
    impersonated: Any = msgspec.field(default=None, name="as")


class KubeconfigContext(msgspec.Struct, frozen=True):
    cluster: str = ""
    user: str = ""
    namespace: str | None = None


class NamedCluster(msgspec.Struct, frozen=True):
    name: str
    cluster: KubeconfigCluster | None = None


class NamedUser(msgspec.Struct, frozen=True):
    name: str
    user: KubeconfigUser | None = None


class NamedContext(msgspec.Struct, frozen=True):
    name: str
    context: KubeconfigContext | None = None


class Kubeconfig(msgspec.Struct, frozen=True, rename="kebab"):
    current_context: str | None = None
    clusters: tuple[NamedCluster, ...] | None = None
    users: tuple[NamedUser, ...] | None = None
    contexts: tuple[NamedContext, ...] | None = None


class KubeconfigEntry(msgspec.Struct, Generic[T], frozen=True):
    """One named thing, and the file that it came from: its relative paths start there."""

    value: T
    file: Path

    def path(self, said: str) -> Path:
        return self.file.parent / said

    def content(self, data: str | None, said: str | None, what: str) -> bytes | None:
        """Bytes that are either in the kubeconfig (base64) or in a file of their own."""
        try:
            if data:
                return base64.b64decode(data, validate=True)
            return self.path(said).read_bytes() if said else None
        except ValueError:
            raise InputError(f"{self.file}: {what}-data is no base64; write it again with `kubectl config`") from None
        except OSError as wrong:
            why = f"{self.file}: {what} {said!r} cannot be read: {wrong.strerror}; mend the path"
            raise InputError(why) from wrong


class MergedKubeconfig(msgspec.Struct, kw_only=True):
    """Several kubeconfigs as one; of two entries with one name the first stands."""

    current: str | None = None
    clusters: dict[str, KubeconfigEntry[KubeconfigCluster]] = msgspec.field(default_factory=dict)
    users: dict[str, KubeconfigEntry[KubeconfigUser]] = msgspec.field(default_factory=dict)
    contexts: dict[str, KubeconfigEntry[KubeconfigContext]] = msgspec.field(default_factory=dict)

    def add(self, config: Kubeconfig, file: Path) -> None:
        self.current = self.current or config.current_context
        for cluster in config.clusters or ():
            self.clusters.setdefault(cluster.name, KubeconfigEntry(cluster.cluster or KubeconfigCluster(), file))
        for user in config.users or ():
            self.users.setdefault(user.name, KubeconfigEntry(user.user or KubeconfigUser(), file))
        for context in config.contexts or ():
            self.contexts.setdefault(context.name, KubeconfigEntry(context.context or KubeconfigContext(), file))


# ---- whom we trust, and who we are ----------------------------------------------------------------------------------


class ServerTrust(msgspec.Struct, frozen=True, kw_only=True):
    """How the server proves itself."""

    where: str = "the API server"  # for messages
    tls: bool = False
    authority: bytes | None = None  # PEM; None means whom this machine trusts
    insecure: bool = False

    def context(self, certificate: bytes | None = None) -> ssl.SSLContext | None:
        """None without TLS."""
        if not self.tls:
            return None
        try:
            made = ssl.create_default_context(cadata=self.authority.decode("ascii") if self.authority else None)
        except (ssl.SSLError, ValueError) as wrong:
            raise InputError(f"{self.where}: its certificate-authority is no PEM certificate; replace it") from wrong
        if self.insecure:
            made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
        if certificate:
            self._present(made, certificate)
        return made

    def _present(self, made: ssl.SSLContext, certificate: bytes) -> None:
        """OpenSSL takes a key only from a file: one that nobody else can read, and only for this moment."""
        descriptor, name = tempfile.mkstemp(prefix="gputile-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(certificate)
            made.load_cert_chain(name, password=lambda: "")  # an encrypted key fails instead of asking
        except (ssl.SSLError, ValueError, OSError) as wrong:
            why = "the client certificate and its key do not belong together, are no PEM, or have a passphrase"
            raise InputError(f"{self.where}: {why}; replace them") from wrong
        finally:
            os.unlink(name)


class ClusterAccess:
    """A server, and what it takes to talk to it. Ask `headers` first: `ssl` may change with them."""

    def __init__(
        self,
        server: str,
        source: CredentialSource | None = None,
        *,
        trust: ServerTrust | None = None,
        certificate: bytes | None = None,
        namespace: str = "default",
        server_name: str | None = None,
        proxy: str | None = None,
    ) -> None:
        self.server, self.namespace = server.rstrip("/"), namespace
        self.server_name, self.proxy = server_name, proxy
        self._source, self._trust = source or StaticCredential(), trust or ServerTrust(tls=server.startswith("https:"))
        self._certificate = certificate
        self.ssl = self._trust.context(certificate)
        self._offered: dict[str, str] = {}

    async def headers(self) -> dict[str, str]:
        """The Authorization header, where there is one. An `InputError` tells why there is none."""
        found = await self._source.credential()
        if found.certificate and found.certificate != self._certificate:
            self.ssl = self._trust.context(found.certificate)
            self._certificate = found.certificate
        self._offered = {"Authorization": found.authorization} if found.authorization else {}
        return self._offered

    def rejected(self, headers: Mapping[str, str]) -> None:
        """The server said 401 to these. If nobody has brought newer ones since, they are fetched anew."""
        if headers == self._offered:
            self._source.forget()


# ---- finding it -----------------------------------------------------------------------------------------------------


def load(
    kubeconfig: str | None,
    context: str | None,
    env: Mapping[str, str],
    *,
    folder: Path = SERVICE_ACCOUNT,
    clock: Clock = time.monotonic,
    wall: Clock = time.time,
) -> ClusterAccess:
    """The cluster meant: by `kubeconfig`, by $KUBECONFIG, by the pod we run in, or by ~/.kube/config.

    Who names a context means a kubeconfig, even inside a pod.
    """
    named = [kubeconfig] if kubeconfig else [part for part in env.get("KUBECONFIG", "").split(":") if part]
    if not named and not context and env.get("KUBERNETES_SERVICE_HOST"):
        return _in_cluster(env, folder, clock)
    files = [Path(part) for part in named or [f"{env.get('HOME', '')}/.kube/config"]]
    found = [file for file in files if file.exists()]
    if not found:
        raise InputError(
            f"no cluster is configured: there is no file {', '.join(map(str, files))}; name one with --kubeconfig or "
            f"$KUBECONFIG, or run inside a pod with a ServiceAccount"
        )
    merged = MergedKubeconfig()
    for file in found:
        merged.add(_read(file), file)
    return _chosen(merged, context, ", ".join(map(str, found)), env, clock, wall)


def _in_cluster(env: Mapping[str, str], folder: Path, clock: Clock) -> ClusterAccess:
    host, port = env["KUBERNETES_SERVICE_HOST"], env.get("KUBERNETES_SERVICE_PORT") or "443"
    try:
        authority = (folder / "ca.crt").read_bytes()
    except OSError as wrong:
        why = (
            f"{folder / 'ca.crt'}: cannot be read: {wrong.strerror}; set automountServiceAccountToken: true on the pod"
        )
        raise InputError(why) from wrong
    namespace = folder / "namespace"
    return ClusterAccess(
        f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        TokenFile(folder / "token", clock),
        trust=ServerTrust(where=str(folder), tls=True, authority=authority),
        namespace=(namespace.read_text().strip() if namespace.exists() else "") or "default",
    )


def _read(file: Path) -> Kubeconfig:
    try:
        with file.open("rb") as opened:
            return msgspec.convert(read_one(content(opened, SETTINGS)) or {}, Kubeconfig)
    except OSError as wrong:
        raise InputError(f"{file}: cannot be read: {wrong.strerror}; give us the right to") from wrong
    except msgspec.ValidationError as wrong:
        raise InputError(f"{file}: is no kubeconfig: {wrong}; compare `kubectl config view`") from wrong
    except NotYaml as wrong:  # its own words may quote a secret
        line = f" (line {wrong.line})" if wrong.line else ""
        raise InputError(f"{file}: is no YAML{line}; compare `kubectl config view`") from None


def _chosen(
    merged: MergedKubeconfig, context: str | None, where: str, env: Mapping[str, str], clock: Clock, wall: Clock
) -> ClusterAccess:
    name = context or merged.current
    if not name:
        raise InputError(f"{where}: no current-context; name one of {_names(merged.contexts)} with --context")
    chosen = _pick(merged.contexts, name, "context", where).value
    spot = f"{where}, context {name!r}"
    cluster = _pick(merged.clusters, chosen.cluster, "cluster", spot)
    user = (
        _pick(merged.users, chosen.user, "user", spot)
        if chosen.user
        else KubeconfigEntry(KubeconfigUser(), cluster.file)
    )
    return ClusterAccess(
        _server(cluster.value, spot),
        _source(user, spot, env, clock, wall),
        trust=_trust(cluster, spot),
        certificate=_certificate(user, spot),
        namespace=chosen.namespace or "default",
        server_name=cluster.value.tls_server_name,
        proxy=cluster.value.proxy_url,
    )


def _names(known: Mapping[str, Any]) -> str:
    return ", ".join(sorted(known)) or "(there are none)"


def _pick(known: Mapping[str, T], name: str, kind: str, where: str) -> T:
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {_names(known)}"
    raise InputError(f"{where}: no {kind} is named {name!r}; {hint}")


def _server(cluster: KubeconfigCluster, where: str) -> str:
    if not cluster.server.startswith(("http://", "https://")):
        raise InputError(f"{where}: its server is {cluster.server!r}; write a URL such as https://host:6443")
    return cluster.server


def _trust(entry: KubeconfigEntry[KubeconfigCluster], where: str) -> ServerTrust:
    cluster = entry.value
    authority = entry.content(
        cluster.certificate_authority_data, cluster.certificate_authority, "certificate-authority"
    )
    if authority and cluster.insecure_skip_tls_verify:
        raise InputError(f"{where}: has a certificate-authority and insecure-skip-tls-verify; remove one of them")
    tls = cluster.server.startswith("https:")
    return ServerTrust(where=where, tls=tls, authority=authority, insecure=cluster.insecure_skip_tls_verify)


def _certificate(entry: KubeconfigEntry[KubeconfigUser], where: str) -> bytes | None:
    user = entry.value
    certificate = entry.content(user.client_certificate_data, user.client_certificate, "client-certificate")
    key = entry.content(user.client_key_data, user.client_key, "client-key")
    if bool(certificate) != bool(key):
        raise InputError(f"{where}: has only one of client-certificate and client-key; write both")
    return certificate + b"\n" + key + b"\n" if certificate and key else None


def _source(
    entry: KubeconfigEntry[KubeconfigUser], where: str, env: Mapping[str, str], clock: Clock, wall: Clock
) -> CredentialSource:
    user = entry.value
    if user.auth_provider or user.impersonated:
        what = "auth-provider" if user.auth_provider else "impersonation (as)"
        raise InputError(f"{where}: its user has {what}, which gputile does not speak; use a token or an exec plugin")
    if user.exec:
        return ExecPlugin(_runnable(entry, user.exec, where), where, env, wall)
    if user.token_file:
        return TokenFile(entry.path(user.token_file), clock)
    if user.username is not None and not user.token:
        pair = base64.b64encode(f"{user.username}:{user.password or ''}".encode())
        return StaticCredential(f"Basic {pair.decode()}")
    return StaticCredential(f"Bearer {user.token}" if user.token else None)


def _runnable(entry: KubeconfigEntry[KubeconfigUser], spec: ExecConfig, where: str) -> ExecConfig:
    """The plugin with its path made whole; a bare word is looked up in $PATH."""
    if spec.api_version not in PLUGIN_VERSIONS:
        raise InputError(f"{where}: exec apiVersion is {spec.api_version!r}; write {' or '.join(PLUGIN_VERSIONS)}")
    if spec.interactive_mode == "Always":
        raise InputError(f"{where}: its exec plugin must talk to a person (interactiveMode: Always); use another user")
    command = str(entry.path(spec.command)) if "/" in spec.command else spec.command
    return msgspec.structs.replace(spec, command=command)
