"""Runs a scheduler on an in-memory cluster for a bench over HTTP. Prints its port, then serves until killed.

python -m bench.in_memory_scheduler NODES FOLDER        FOLDER: with tls.crt, tls.key and ca.crt; "": plain HTTP
"""

import asyncio
import json
import sys

import uvloop

from gputile.kube.fake import MemoryApi
from gputile.scheduler.app import SchedulerApp
from gputile.scheduler.settings import MetricsSettings, Settings, TlsSettings
from gputile.telemetry import logs
from gputile.telemetry.metrics import Metrics
from gputile.testing.builders import node, pod

NODES, CARDS = 1250, 8
TILE = {"gputile.io/gpu": 1, "gputile.io/memory": 1024}


def filter_body(number: int) -> bytes:
    """A body as kube-scheduler sends it, with the names of a hundred nodes; another pod for each number."""
    manifest = pod(TILE, name=f"filter-{number}", uid=f"uid-filter-{number}")
    return json.dumps({"Pod": manifest, "Nodes": None, "NodeNames": [f"node-{n}" for n in range(100)]}).encode()


def settings(folder: str) -> Settings:
    tls = TlsSettings()
    if folder:
        tls = TlsSettings(certificate=f"{folder}/tls.crt", key=f"{folder}/tls.key", client_ca=f"{folder}/ca.crt")
    return Settings(listen="127.0.0.1:0", tls=tls, metrics=MetricsSettings(cards=10**6))


async def serve(nodes: int, folder: str) -> None:
    manifests = [node(f"node-{n}", cpu="128").cards(CARDS, size=80).manifest() for n in range(nodes)]
    process = SchedulerApp(MemoryApi(manifests, []), settings(folder), Metrics())
    running = asyncio.create_task(process.run(asyncio.Event()))
    while not (process.server.port and process.may_write()):
        await asyncio.sleep(0.05)
    print(process.server.port, flush=True)
    await running


if __name__ == "__main__":
    logs.start("error")
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2]))
