"""gputile's scheduler in the tests, deployed as in deploy/: ServiceAccount and RBAC, TLS, extender stanza.

Replicas of `gputile scheduler` are child processes, each with a Pod object that carries the leader's label. Call
`rights(plane)` once per control plane.
"""

import json
import sys
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from ssl import create_default_context
from typing import Any, Self

import yaml

from tests.e2e.api import Manifest, manifests_of
from tests.e2e.configs import kubeconfig, write
from tests.e2e.control_plane import ControlPlane
from tests.e2e.processes import Child, free_port, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
ACCOUNT, NAMESPACE = "gputile-scheduler", "kube-system"
RIGHTS = ("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
DAY = 24 * 3600  # seconds
SERVER_NAME = "gputile-scheduler.kube-system.svc"


def rights(plane: ControlPlane) -> None:
    """Apply the RBAC of deploy/scheduler.yaml and the policies of deploy/admission.yaml, exactly as written."""
    for manifest in manifests_of(DEPLOY / "scheduler.yaml"):
        if manifest["kind"] in RIGHTS:
            plane.kube.apply(manifest)
    plane.kube.apply(DEPLOY / "admission.yaml")


class Replica:
    """One `gputile scheduler`, serving when the `with` begins."""

    patience = 30.0  # seconds to be ready, and again to be the leader

    def __init__(
        self,
        plane: ControlPlane,
        name: str = "gputile-0",
        *,
        wait_for_lease: bool = True,
        server: str = "",
        **settings: Any,
    ) -> None:
        """`settings` by their dotted names with `__` for the dot: `filter__keep=4`.
        `wait_for_lease`: wait until it is the leader. `server`: the API server's URL, if a proxy is in between."""
        self.plane, self.name, self.port = plane, name, free_port()
        self._server = server or plane.server
        self._sets = {key.replace("__", "."): value for key, value in settings.items()}
        self._wait_for_lease = wait_for_lease
        self._client = plane.authority.client("kube-scheduler")
        self.child: Child

    def __enter__(self) -> Self:
        self._make_pod()
        self._log = self.plane.folder / f"{self.name}.log"
        self._before = self._log.stat().st_size if self._log.exists() else 0
        self.child = self.plane.run(self.name, self._argv(), self._env(), self.is_ready, self.patience)
        if self._wait_for_lease:
            wait_until(self.is_leader, self.patience, f"{self.name} is the leader", [self.child])
        return self

    def __exit__(self, *_: object) -> None:
        self.child.stop()
        if self.plane.kube.find("Pod", self.name, NAMESPACE):
            self.plane.kube.delete("Pod", self.name, NAMESPACE, grace=0)

    def _make_pod(self) -> None:
        """Create the Pod object that this process would run in; no scheduler binds it."""
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.name,
                "namespace": NAMESPACE,
                "labels": {"app.kubernetes.io/name": ACCOUNT},
            },
            "spec": {"schedulerName": "nobody", "containers": [{"name": "scheduler", "image": "gputile"}]},
        }
        self.plane.kube.create(pod)

    def _argv(self) -> list[str | Path]:
        folder, tls = self.plane.folder, self.plane.authority.server(self.name, ["127.0.0.1", SERVER_NAME])
        document = next(m for m in manifests_of(DEPLOY / "scheduler.yaml") if m["kind"] == "ConfigMap")
        settings = yaml.safe_load(document["data"]["settings.yaml"])
        settings["listen"] = f"127.0.0.1:{self.port}"
        settings["tls"] = {"certificate": str(tls.cert), "key": str(tls.key), "client_ca": str(self.plane.authority.ca)}
        config = write(folder / f"{self.name}.settings.yaml", settings)
        token = self.plane.kube.token_for(ACCOUNT, NAMESPACE, DAY)
        account = write(folder / f"{self.name}.kubeconfig", kubeconfig(self._server, self.plane.authority.ca, token))
        sets = [f"--set={name}={value}" for name, value in self._sets.items()]
        program = Path(sys.executable).with_name("gputile")
        argv = [program, "scheduler", "--config", config, "--kubeconfig", account, *sets]
        return [str(word) for word in argv]

    def _env(self) -> dict[str, str]:
        return {"POD_NAME": self.name, "POD_NAMESPACE": NAMESPACE}

    # --- requests

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        connection = self.connection()
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def connection(self) -> HTTPConnection:
        """A connection with kube-scheduler's certificate."""
        trust = create_default_context(cafile=self.plane.authority.ca)
        trust.load_cert_chain(self._client.cert, self._client.key)
        return HTTPSConnection("127.0.0.1", self.port, timeout=10, context=trust)

    def is_ready(self) -> bool:
        return self.request("GET", "/readyz")[0] == 200

    def is_leader(self) -> bool:
        pod = self.plane.kube.get("Pod", self.name, NAMESPACE)
        return bool(pod["metadata"]["labels"].get("gputile.io/leader") == "true")

    def count(self, metric: str, **labels: str) -> float:
        """The sum of all samples of a metric that carry these labels."""
        pairs = [f'{key}="{value}"' for key, value in labels.items()]
        lines = self.request("GET", "/metrics")[1].splitlines()
        samples = [line for line in lines if line.startswith((f"{metric}{{", f"{metric} "))]
        return sum(float(line.rpartition(" ")[2]) for line in samples if all(pair in line for pair in pairs))

    def logged(self, message: str) -> list[Manifest]:
        """Its log lines with this message, without those of an earlier process of the same name."""
        lines = self._log.read_bytes()[self._before :].decode().splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in records if line["msg"] == message]

    # --- kube-scheduler's side

    def config(
        self, file: str = "default-scheduler.yaml", port: int | None = None, *, steers: bool = False, **changes: Any
    ) -> Manifest:
        """A KubeSchedulerConfiguration of deploy/kube-scheduler with the addresses and files of this run.

        `steers`: with the stanza for pods without GPUs before gputile's own. `changes` are those of gputile's stanza.
        """
        documents = manifests_of(DEPLOY / "kube-scheduler" / file)
        config = next((d for d in documents if d["kind"] == "KubeSchedulerConfiguration"), None)
        if config is None:  # inside the ConfigMap of a whole deployment
            data = next(d for d in documents if d["kind"] == "ConfigMap")["data"]
            config = yaml.safe_load(next(iter(data.values())))
        (stanza,) = config["extenders"]
        extenders = [*(_steering() if steers else []), {**stanza, **changes}]
        fast = {"qps": 5000, "burst": 5000}
        return {
            **config,
            "extenders": [self._reaching(extender, port or self.port) for extender in extenders],
            "leaderElection": {"leaderElect": False},
            "clientConnection": fast,
        }

    def _reaching(self, stanza: Manifest, port: int) -> Manifest:
        url = stanza["urlPrefix"]
        for host in ("CLUSTER-IP", SERVER_NAME):
            url = url.replace(f"{host}:12345", f"127.0.0.1:{port}")
        files = {
            "caFile": str(self.plane.authority.ca),
            "certFile": str(self._client.cert),
            "keyFile": str(self._client.key),
            "serverName": SERVER_NAME,
        }
        return {**stanza, "urlPrefix": url, "tlsConfig": {**stanza["tlsConfig"], **files}}


def _steering() -> list[Manifest]:
    text = (DEPLOY / "kube-scheduler" / "steer-cpu-pods.yaml").read_text()
    stanzas: list[Manifest] = yaml.safe_load(text)["extenders"]
    return stanzas
