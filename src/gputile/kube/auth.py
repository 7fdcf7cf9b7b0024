"""Authentication to the API server: from a kubeconfig, or from the ServiceAccount of the pod that gputile runs in.

It finds the server, the CA and the credentials. A secret must never be part of an error. Call `load` once at the start,
`ClusterAccess.headers` before each request, and `ClusterAccess.rejected` after a 401.
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
from gputile.model.decode_errors import decode_problem
from gputile.model.errors import InputError
from gputile.text.documents import SETTINGS, NotYaml, content, read_one

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # the same in every pod of every cluster

T = TypeVar("T")

# ---- a kubeconfig, as far as gputile reads it -----------------------------------------------------------------------


class KubeconfigCluster(msgspec.Struct, frozen=True, rename="kebab"):
    """The `cluster` of an entry in `clusters`."""

    server: str = ""
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool = False
    tls_server_name: str | None = None
    proxy_url: str | None = None


class KubeconfigUser(msgspec.Struct, frozen=True, rename="kebab"):
    """The `user` of an entry in `users`."""

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
    """The `context` of an entry in `contexts`."""

    cluster: str = ""
    user: str = ""
    namespace: str | None = None


class NamedCluster(msgspec.Struct, frozen=True):
    """An entry in `clusters`."""

    name: str
    cluster: KubeconfigCluster | None = None


class NamedUser(msgspec.Struct, frozen=True):
    """An entry in `users`."""

    name: str
    user: KubeconfigUser | None = None


class NamedContext(msgspec.Struct, frozen=True):
    """An entry in `contexts`."""

    name: str
    context: KubeconfigContext | None = None


class Kubeconfig(msgspec.Struct, frozen=True, rename="kebab"):
    """One kubeconfig file."""

    current_context: str | None = None
    clusters: tuple[NamedCluster, ...] | None = None
    users: tuple[NamedUser, ...] | None = None
    contexts: tuple[NamedContext, ...] | None = None


class KubeconfigEntry(msgspec.Struct, Generic[T], frozen=True):
    """A cluster, user or context, and the file it is from: its relative paths start at that file's folder."""

    value: T
    file: Path

    def path(self, name: str) -> Path:
        return self.file.parent / name

    def content(self, data: str | None, name: str | None, field: str) -> bytes | None:
        """The bytes of a field: inline in the kubeconfig (base64), or in a file of their own."""
        try:
            if data:
                return base64.b64decode(data, validate=True)
            return self.path(name).read_bytes() if name else None
        except ValueError:
            raise InputError(f"{self.file}: {field}-data is not base64; set it again with `kubectl config`") from None
        except OSError as error:
            reason = f"{self.file}: {field} {name!r} cannot be read: {error.strerror}; correct the path"
            raise InputError(reason) from error


class MergedKubeconfig(msgspec.Struct, kw_only=True):
    """Several kubeconfigs merged as kubectl does: the first entry of a name wins."""

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


# ---- the server's certificate, our credentials ----------------------------------------------------------------------


class ServerTrust(msgspec.Struct, frozen=True, kw_only=True):
    """How the API server's certificate is verified."""

    where: str = "the API server"  # for messages
    tls: bool = False
    authority: bytes | None = None  # PEM; None means the CAs of this machine
    insecure: bool = False

    def context(self, certificate: bytes | None = None) -> ssl.SSLContext | None:
        """The client's TLS context; None without TLS."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cadata=self.authority.decode("ascii") if self.authority else None)
        except (ssl.SSLError, ValueError) as error:
            raise InputError(f"{self.where}: certificate-authority is not a PEM certificate; replace it") from error
        if self.insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if certificate:
            self._load(context, certificate)
        return context

    def _load(self, context: ssl.SSLContext, certificate: bytes) -> None:
        """OpenSSL reads a key only from a file: mode 0600, deleted at once."""
        descriptor, name = tempfile.mkstemp(prefix="gputile-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(certificate)
            context.load_cert_chain(name, password=lambda: "")  # an encrypted key fails instead of prompting
        except (ssl.SSLError, ValueError, OSError) as error:
            problem = "client certificate and key do not match, are not PEM, or have a passphrase"
            raise InputError(f"{self.where}: {problem}; replace them") from error
        finally:
            os.unlink(name)


class ClusterAccess:
    """The address and credentials of an API server. Call `headers` first: `ssl` may change with them."""

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
        self._headers: dict[str, str] = {}

    async def headers(self) -> dict[str, str]:
        """The Authorization header, if there is one. Raises `InputError` if the credentials cannot be loaded."""
        credential = await self._source.credential()
        if credential.certificate and credential.certificate != self._certificate:
            self.ssl = self._trust.context(credential.certificate)
            self._certificate = credential.certificate
        self._headers = {"Authorization": credential.authorization} if credential.authorization else {}
        return self._headers

    def rejected(self, headers: Mapping[str, str]) -> None:
        """The server answered 401 to these headers. Unless they were replaced since, the credentials are reloaded."""
        if headers == self._headers:
            self._source.forget()


# ---- finding the cluster --------------------------------------------------------------------------------------------


def load(
    kubeconfig: str | None,
    context: str | None,
    env: Mapping[str, str],
    *,
    folder: Path = SERVICE_ACCOUNT,
    clock: Clock = time.monotonic,
    wall: Clock = time.time,
) -> ClusterAccess:
    """The cluster of `kubeconfig`, of $KUBECONFIG, of the pod that this process runs in, or of ~/.kube/config.

    With a context, a kubeconfig is used even inside a pod.
    """
    named = [kubeconfig] if kubeconfig else [part for part in env.get("KUBECONFIG", "").split(":") if part]
    if not named and not context and env.get("KUBERNETES_SERVICE_HOST"):
        return _in_cluster(env, folder, clock)
    files = [Path(part) for part in named or [f"{env.get('HOME', '')}/.kube/config"]]
    existing = [file for file in files if file.exists()]
    if not existing:
        raise InputError(
            f"no cluster is configured: {', '.join(map(str, files))} does not exist; set --kubeconfig or "
            f"$KUBECONFIG, or run inside a pod with a ServiceAccount"
        )
    merged = MergedKubeconfig()
    for file in existing:
        merged.add(_read(file), file)
    return _access(merged, context, ", ".join(map(str, existing)), env, clock, wall)


def _in_cluster(env: Mapping[str, str], folder: Path, clock: Clock) -> ClusterAccess:
    host, port = env["KUBERNETES_SERVICE_HOST"], env.get("KUBERNETES_SERVICE_PORT") or "443"
    try:
        authority = (folder / "ca.crt").read_bytes()
    except OSError as error:
        reason = (
            f"{folder / 'ca.crt'}: cannot be read: {error.strerror}; set automountServiceAccountToken: true on the pod"
        )
        raise InputError(reason) from error
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
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}; grant this process read access") from error
    except msgspec.ValidationError as error:
        reason = decode_problem(error)
        raise InputError(f"{file}: not a kubeconfig: {reason}; compare with `kubectl config view`") from error
    except NotYaml as error:  # the parser's message may quote a secret
        line = f" (line {error.line})" if error.line else ""
        raise InputError(f"{file}: invalid YAML{line}; compare with `kubectl config view`") from None


def _access(
    merged: MergedKubeconfig, context: str | None, where: str, env: Mapping[str, str], clock: Clock, wall: Clock
) -> ClusterAccess:
    name = context or merged.current
    if not name:
        raise InputError(f"{where}: no current-context; choose one of {_names(merged.contexts)} with --context")
    selected = _pick(merged.contexts, name, "context", where).value
    where = f"{where}, context {name!r}"
    cluster = _pick(merged.clusters, selected.cluster, "cluster", where)
    user = (
        _pick(merged.users, selected.user, "user", where)
        if selected.user
        else KubeconfigEntry(KubeconfigUser(), cluster.file)
    )
    return ClusterAccess(
        _server(cluster.value, where),
        _source(user, where, env, clock, wall),
        trust=_trust(cluster, where),
        certificate=_certificate(user, where),
        namespace=selected.namespace or "default",
        server_name=cluster.value.tls_server_name,
        proxy=cluster.value.proxy_url,
    )


def _names(entries: Mapping[str, Any]) -> str:
    return ", ".join(sorted(entries)) or "(there are none)"


def _pick(entries: Mapping[str, T], name: str, kind: str, where: str) -> T:
    if name in entries:
        return entries[name]
    near = difflib.get_close_matches(name, entries, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {_names(entries)}"
    raise InputError(f"{where}: no {kind} is named {name!r}; {hint}")


def _server(cluster: KubeconfigCluster, where: str) -> str:
    if not cluster.server.startswith(("http://", "https://")):
        raise InputError(f"{where}: server is {cluster.server!r}; set a URL such as https://host:6443")
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
        raise InputError(f"{where}: has only one of client-certificate and client-key; set both")
    return certificate + b"\n" + key + b"\n" if certificate and key else None


def _source(
    entry: KubeconfigEntry[KubeconfigUser], where: str, env: Mapping[str, str], clock: Clock, wall: Clock
) -> CredentialSource:
    user = entry.value
    if user.auth_provider or user.impersonated:
        method = "auth-provider" if user.auth_provider else "impersonation (as)"
        raise InputError(
            f"{where}: the user has {method}, which gputile does not support; use a token or an exec plugin"
        )
    if user.exec:
        return ExecPlugin(_runnable(entry, user.exec, where), where, env, wall)
    if user.token_file:
        return TokenFile(entry.path(user.token_file), clock)
    if user.username is not None and not user.token:
        pair = base64.b64encode(f"{user.username}:{user.password or ''}".encode())
        return StaticCredential(f"Basic {pair.decode()}")
    return StaticCredential(f"Bearer {user.token}" if user.token else None)


def _runnable(entry: KubeconfigEntry[KubeconfigUser], spec: ExecConfig, where: str) -> ExecConfig:
    """The plugin with the path of its command resolved; a command without "/" is looked up in $PATH."""
    if spec.api_version not in PLUGIN_VERSIONS:
        raise InputError(f"{where}: exec apiVersion is {spec.api_version!r}; set {' or '.join(PLUGIN_VERSIONS)}")
    if spec.interactive_mode == "Always":
        raise InputError(f"{where}: the exec plugin is interactive (interactiveMode: Always); use another user")
    command = str(entry.path(spec.command)) if "/" in spec.command else spec.command
    return msgspec.structs.replace(spec, command=command)
