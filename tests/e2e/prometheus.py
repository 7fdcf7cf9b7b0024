"""A real Prometheus that scrapes what a test runs: Debian's package, unpacked into the cache and not installed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from tests.e2e.agents import NodeAgent
from tests.e2e.configs import write
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import Replica
from tests.e2e.node_programs import fetched
from tests.e2e.processes import free_port, wait_until

READY = 30.0  # seconds


class Prometheus:
    """A running Prometheus server, queried over its HTTP API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            with urlopen(f"{self._url}/-/ready", timeout=5) as response:
                return bool(response.status == 200)
        except URLError:
            return False

    def query(self, expression: str) -> list[Any]:
        """The series of an instant query; an expression that Prometheus does not accept is an HTTPError."""
        with urlopen(f"{self._url}/api/v1/query?{urlencode({'query': expression})}", timeout=10) as response:
            return list(json.load(response)["data"]["result"])


@contextmanager
def prometheus(plane: ControlPlane, replica: Replica, agent: NodeAgent) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes the scheduler with a client certificate, as in docs/metrics.md, and the agent."""
    port, client = free_port(), plane.authority.client("prometheus")
    tls = {"ca_file": str(plane.authority.ca), "cert_file": str(client.cert), "key_file": str(client.key)}
    jobs = [
        _job("gputile-scheduler", replica.port, scheme="https", tls_config=tls),
        _job("gputile-agent", agent.port),
    ]
    config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}
    program = fetched(print, ("prometheus",)) / "usr" / "bin" / "prometheus"
    argv: list[str | Path] = [
        program,
        f"--config.file={write(plane.folder / 'prometheus.yaml', config)}",
        f"--storage.tsdb.path={plane.folder / 'prometheus'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    server = Prometheus(port)
    child = plane.run("prometheus", argv, ready=server.is_ready)
    try:
        wait_until(lambda: len(server.query("up == 1")) == len(jobs), READY, "both jobs are scraped", [child])
        yield server
    finally:
        child.stop()


def _job(name: str, port: int, **more: Any) -> dict[str, Any]:
    return {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}], **more}
