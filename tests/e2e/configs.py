"""The configuration files of Kubernetes programs: kubeconfigs and kube-scheduler's configuration. Only `write` does
I/O."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import yaml

from tests.e2e.api import Manifest
from tests.e2e.certificates import Pair

QPS = 5000  # so that the client is not the limit


class ClientTls(msgspec.Struct, frozen=True):
    """kube-scheduler's TLS settings for an extender: the CA and the client certificate."""

    ca: Path
    client: Pair | None = None


class Extender(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `extenders:`. An empty verb is not called."""

    url: str
    filter: str = "filter"
    prioritize: str = ""
    bind: str = "bind"
    preempt: str = ""
    weight: int = 1
    managed: Mapping[str, bool] = {}  # resource name: is it ignored by kube-scheduler's own check? Empty: every pod
    node_cache_capable: bool = True
    timeout: str = "5s"
    ignorable: bool = False
    tls: ClientTls | None = None

    def entry(self) -> Manifest:
        verbs = {"filter": self.filter, "prioritize": self.prioritize, "bind": self.bind, "preempt": self.preempt}
        entry: Manifest = {
            "urlPrefix": self.url,
            **{f"{name}Verb": verb for name, verb in verbs.items() if verb},
            "weight": self.weight,
            "nodeCacheCapable": self.node_cache_capable,
            "httpTimeout": self.timeout,
            "ignorable": self.ignorable,
            "managedResources": [
                {"name": name, "ignoredByScheduler": not_ours} for name, not_ours in self.managed.items()
            ],
        }
        return {**entry, "enableHTTPS": True, "tlsConfig": _tls(self.tls)} if self.tls else entry


def scheduler_config(
    kubeconfig: Path,
    *extenders: Extender,
    scheduler_names: Sequence[str] = ("default-scheduler",),
    backoff: tuple[int, int] = (1, 10),
) -> Manifest:
    """A KubeSchedulerConfiguration v1: one profile per name, all nodes scored, no leader election."""
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": QPS, "burst": QPS},
        "leaderElection": {"leaderElect": False},
        "percentageOfNodesToScore": 100,
        "podInitialBackoffSeconds": backoff[0],
        "podMaxBackoffSeconds": backoff[1],
        "profiles": [{"schedulerName": name} for name in scheduler_names],
        "extenders": [extender.entry() for extender in extenders],
    }


def kubeconfig(
    server: str, ca: Path, token: str = "", client: Pair | None = None, namespace: str = "default"
) -> Manifest:
    """A kubeconfig for a token or a client certificate; all files are embedded, so it may be moved."""
    user = {"token": token} if token else {}
    if client:
        user |= {"client-certificate-data": _inline(client.cert), "client-key-data": _inline(client.key)}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "e2e",
        "clusters": [{"name": "e2e", "cluster": {"server": server, "certificate-authority-data": _inline(ca)}}],
        "users": [{"name": "e2e", "user": user}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e", "namespace": namespace}}],
    }


def write(path: Path, content: Manifest) -> Path:
    """Write YAML, readable only by the owner."""
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def _tls(tls: ClientTls) -> Manifest:
    files = {"caFile": str(tls.ca)}
    return {**files, "certFile": str(tls.client.cert), "keyFile": str(tls.client.key)} if tls.client else files


def _inline(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
