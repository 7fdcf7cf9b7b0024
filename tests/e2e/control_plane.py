"""Runs a real control plane on one machine: etcd, kube-apiserver, kube-schedulers and, on request, controllers.

Data, certificates, configurations and logs are below one run folder; no process and no file outlives the `with`.
"""

import os
import secrets
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.e2e.api import ApiError, Kube, Manifest
from tests.e2e.certificates import Authority, Pair, service_account_keys
from tests.e2e.configs import QPS, Extender, kubeconfig, scheduler_config, write
from tests.e2e.folders import run_folder
from tests.e2e.processes import Child, free_port, interruptible, stop_all, wait_until
from tests.e2e.programs import Programs

READY = 60.0  # seconds for a program to be ready; the API server needs 4 to 5 on two idle cores
OPEN_PATHS = "/healthz,/livez,/readyz,/metrics"
FRONT_PROXY = "front-proxy-client"
USERS = {  # user: groups; each gets a token of its own
    "admin": "system:masters",
    "system:kube-scheduler": "",
    "system:kube-controller-manager": "",
}


class Scheduler:
    """A running kube-scheduler: its process, and its metrics. As a context manager it is stopped at the end."""

    def __init__(self, child: Child, client: Kube) -> None:
        self.child, self._client = child, client

    def __enter__(self) -> "Scheduler":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.child.stop()
        self._client.close()

    def metrics(self) -> str:
        return str(self._client.request("GET", "/metrics"))

    def count(self, name: str, **labels: str) -> float:
        """The sum of all samples of a metric that carry these labels."""
        pairs = [f'{key}="{value}"' for key, value in labels.items()]
        lines = (line for line in self.metrics().splitlines() if line.startswith((f"{name}{{", f"{name} ")))
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(pair in line for pair in pairs))

    def restart(self) -> "Scheduler":
        self.child.restart()
        self.wait()
        return self

    def wait(self) -> None:
        wait_until(
            lambda: self._client.raw("GET", "/readyz")[0] == 200, READY, f"{self.child.name} ready", [self.child]
        )


class ControlPlane:
    """etcd and kube-apiserver from `with` to its end; more by `start_scheduler`, `start_controllers`, `run`."""

    def __init__(
        self,
        programs: Programs,
        feature_gates: Mapping[str, bool] | None = None,
        api_server_flags: Sequence[str] = (),
    ) -> None:
        self.programs = programs
        self._gates, self._more = dict(feature_gates or {}), list(api_server_flags)
        self._stack = ExitStack()
        self._children: dict[str, Child] = {}
        self._tokens = {user: secrets.token_hex(16) for user in USERS}

    def __enter__(self) -> "ControlPlane":
        with ExitStack() as stack:  # a failed or interrupted start is undone
            stack.enter_context(interruptible())
            self.folder = stack.enter_context(run_folder())
            stack.callback(self._stop_all)
            self._prepare()
            self.kube = stack.enter_context(self.kube_as("admin"))
            self._start_etcd()
            self._start_api_server()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            print(self.tails())  # the logs are removed with the folder; pytest shows the output of a failed test
        self._stack.close()

    def tails(self, lines: int = 15) -> str:
        """The end of every log."""
        return "\n".join(child.tail(lines) for child in self.children)

    def _prepare(self) -> None:
        self.authority = Authority.create(self.folder / "certificates")
        self._etcd_port, self._api_port = free_port(), free_port()
        self.server = f"https://127.0.0.1:{self._api_port}"
        self.admin_kubeconfig = self.kubeconfig("admin", self._tokens["admin"])

    def _stop_all(self) -> None:
        """Stop in reverse order of start; etcd last, because the others need it to stop."""
        (*etcd,) = (child for name, child in self._children.items() if name == "etcd")
        stop_all([child for child in reversed(self._children.values()) if child not in etcd])
        stop_all(etcd)

    # --- the programs

    @property
    def children(self) -> Sequence[Child]:
        return list(self._children.values())

    @property
    def etcd(self) -> Child:
        return self._children["etcd"]

    @property
    def api_server(self) -> Child:
        return self._children["kube-apiserver"]

    def run(
        self,
        name: str,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        ready: Callable[[], object] | None = None,
        seconds: float = READY,
    ) -> Child:
        """Start a program for this run: its name is unique, its log is `<name>.log`, and it is stopped at the end.

        Its environment is PATH, HOME and TMPDIR (both in the run's folder) and `env`.
        """
        if name in self._children and self._children[name].alive:
            raise RuntimeError(f"{name} is already running; choose another name")
        base = {"PATH": os.environ.get("PATH", ""), "HOME": str(self.folder), "TMPDIR": str(self.folder)}
        child = Child(name, argv, self.folder / f"{name}.log", {**base, **(env or {})}, self.folder)
        self._children[name] = child.start()
        if ready:
            wait_until(ready, seconds, f"{name} ready", [child])
        return child

    def forget(self, children: Iterable[Child]) -> None:
        """Drop programs that are no longer needed: failure reports omit their logs."""
        done = set(children)
        self._children = {name: child for name, child in self._children.items() if child not in done}

    def _start_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, free_port()))
        argv: list[str | Path] = [
            self.programs.etcd,
            "--name=e2e",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=e2e={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]
        self.run("etcd", argv)

    def _start_api_server(self) -> None:
        self.run("kube-apiserver", [self.programs.kube_apiserver, *self._api_server_flags()])
        self.wait_for_api_server()

    def wait_for_api_server(self) -> None:
        """Wait until it is ready and has created its namespaces and roles (after a restart they exist already)."""
        wait_until(lambda: self.kube.raw("GET", "/readyz")[0] == 200, READY, "the API server ready", self.children[:2])
        for name in ("default", "kube-system"):
            wait_until(partial(self.kube.find, "Namespace", name), READY, f"namespace {name}")
            self._default_account(name)

    def restart_api_server(self, kill: bool = False) -> None:
        """Stop (or kill -9) the API server and start it on the same port; etcd keeps running and keeps every object."""
        if kill:
            self.api_server.kill()
        self.api_server.restart()
        self.wait_for_api_server()

    def _api_server_flags(self) -> list[str]:
        folder, tls, accounts = self.folder, self.authority.server("kube-apiserver"), service_account_keys(self.folder)
        flags = [
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--secure-port={self._api_port}",
            "--bind-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--tls-cert-file={tls.cert}",
            f"--tls-private-key-file={tls.key}",
            f"--cert-dir={folder / 'certificates'}",
            f"--client-ca-file={self.authority.ca}",
            f"--token-auth-file={self._token_file()}",
            "--authorization-mode=Node,RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={accounts.cert}",
            f"--service-account-signing-key-file={accounts.key}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--allow-privileged=true",
            *self._aggregation_flags(),
        ]
        gates = ",".join(f"{name}={str(on).lower()}" for name, on in self._gates.items())
        return [*flags, *([f"--feature-gates={gates}"] if gates else []), *self._more]

    def _aggregation_flags(self) -> list[str]:
        """The API server as the front proxy of aggregated APIs, with a CA that signs nothing else."""
        self.front_authority = Authority.create(self.folder / "front-proxy", "gputile e2e front proxy")
        self.front_proxy = self.front_authority.client(FRONT_PROXY)
        return [
            f"--requestheader-client-ca-file={self.front_authority.ca}",
            f"--requestheader-allowed-names={FRONT_PROXY}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-uid-headers=X-Remote-Uid",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={self.front_proxy.cert}",
            f"--proxy-client-key-file={self.front_proxy.key}",
        ]

    def _token_file(self) -> Path:
        lines = [f'{self._tokens[user]},{user},{user},"{groups}"' for user, groups in USERS.items()]
        path = self.folder / "tokens.csv"
        path.touch(mode=0o600)
        path.write_text("\n".join(lines) + "\n")
        return path

    def start_scheduler(
        self,
        *extenders: Extender,
        name: str = "kube-scheduler",
        scheduler_names: Sequence[str] = ("default-scheduler",),
        backoff: tuple[int, int] = (1, 10),
        config: Manifest | None = None,
        flags: Sequence[str] = (),
    ) -> Scheduler:
        """Start a kube-scheduler with these extenders, and wait until it is ready. `config` replaces the default one;
        its `clientConnection.kubeconfig` is filled in."""
        kubeconfig = self.kubeconfig("system:kube-scheduler", self._tokens["system:kube-scheduler"])
        settings = config or scheduler_config(kubeconfig, *extenders, scheduler_names=scheduler_names, backoff=backoff)
        settings = {
            **settings,
            "clientConnection": {**settings.get("clientConnection", {}), "kubeconfig": str(kubeconfig)},
        }
        file = write(self.folder / f"{name}.yaml", settings)
        argv: list[str | Path] = [self.programs.kube_scheduler, f"--config={file}", *flags]
        scheduler = Scheduler(*self._serving(name, argv))
        scheduler.wait()
        return scheduler

    def start_controllers(self, controllers: str = "*,-node-lifecycle-controller") -> Child:
        """Start kube-controller-manager, without the controller that marks fake nodes unreachable after 40 s."""
        user = "system:kube-controller-manager"
        argv: list[str | Path] = [
            self.programs.kube_controller_manager,
            f"--kubeconfig={self.kubeconfig(user, self._tokens[user])}",
            f"--controllers={controllers}",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={self.folder / 'service-accounts.key'}",
            f"--root-ca-file={self.authority.ca}",
            "--leader-elect=false",
            f"--kube-api-qps={QPS}",
            f"--kube-api-burst={QPS}",
        ]
        child, client = self._serving("kube-controller-manager", argv)
        wait_until(lambda: client.raw("GET", "/healthz")[0] == 200, READY, "kube-controller-manager ready", [child])
        return child

    def _serving(
        self, name: str, argv: Sequence[str | Path], env: Mapping[str, str] | None = None
    ) -> tuple[Child, Kube]:
        """Start a program that serves health and metrics without authorization, on a port of its own."""
        port, tls = free_port(), self.authority.server(name)
        serving = [
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--tls-cert-file={tls.cert}",
            f"--tls-private-key-file={tls.key}",
            f"--authorization-always-allow-paths={OPEN_PATHS}",
        ]
        client = self._stack.enter_context(Kube(f"https://127.0.0.1:{port}", self.authority.ca))
        return self.run(name, [*argv, *serving], env), client

    # --- users

    def kube_as(self, user: str) -> Kube:
        """A client with the token of one of `USERS`."""
        return Kube(self.server, self.authority.ca, self._tokens[user])

    def kubeconfig(self, name: str, token: str = "", client: Pair | None = None) -> Path:
        """Write a kubeconfig for a token or a client certificate."""
        path = self.folder / f"{name.replace(':', '-')}.kubeconfig"
        return write(path, kubeconfig(self.server, self.authority.ca, token, client))

    def kubeconfig_for(self, service_account: str, namespace: str = "default") -> Path:
        """A kubeconfig with a token of this ServiceAccount (TokenRequest, one hour), and only its rights."""
        return self.kubeconfig(f"{namespace}-{service_account}", self.kube.token_for(service_account, namespace))

    def namespace(self, name: str) -> str:
        """Create a namespace with its `default` ServiceAccount, which pods need and the controllers would create."""
        self._make({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        self._default_account(name)
        return name

    def _default_account(self, namespace: str) -> None:
        account = {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": namespace},
        }
        self._make(account)

    def _make(self, manifest: Manifest) -> None:
        try:
            self.kube.create(manifest)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise

    def clear(self) -> None:
        """Delete all pods, without grace period, and all nodes: the next test starts on an empty cluster."""
        for namespace in {pod["metadata"]["namespace"] for pod in self.kube.list("Pod")}:
            self.kube.delete_all("Pod", namespace, grace=0)
        self.kube.request("DELETE", "/api/v1/nodes", {})

    def kubectl(self, *words: str, kubeconfig: Path | None = None) -> str:
        """The output of kubectl, run as the admin unless a kubeconfig is given."""
        env = {
            "KUBECONFIG": str(kubeconfig or self.admin_kubeconfig),
            "HOME": str(self.folder),
            "PATH": "/usr/bin:/bin",
        }
        done = subprocess.run(
            [self.programs.kubectl, *words], env=env, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise AssertionError(f"kubectl {' '.join(words)} failed ({done.returncode}): {done.stderr.strip()}")
        return done.stdout
