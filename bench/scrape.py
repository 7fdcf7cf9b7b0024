"""Measures how long a scrape of the scheduler's /metrics takes, and how long it delays verbs.

    make bench-scrape        100 to 5,000 nodes x 8 GPUs with 6 pods on each: default settings, all series, HAMi's names

"delay" is the longest time for which no other request was answered. Both are CPU time, independent of other programs.
"""

import asyncio
import gc
import time

import click
import numpy as np

from gputile.dialects.kube_objects import Pod
from gputile.dialects.settings import DEFAULTS
from gputile.dialects.usage_annotation import write_usage
from gputile.kube.api import AgentLease, LeaseAnnotations, LeaseMetadata, LeaseRenewal
from gputile.ledger.events import Confirmed, NodeSeen
from gputile.ledger.ledger import Ledger
from gputile.model.allocations import Allocation
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.usage import CardUsage, Usage
from gputile.scheduler.metrics.cluster_metrics import ClusterMetrics
from gputile.scheduler.settings import MetricsSettings
from gputile.scheduler.state.cluster_state import ClusterState
from gputile.testing.builders import ask, node, wants

SIZES = (100, 1_000, 5_000)
CARDS, PODS = 8, 6  # per node
MANY = 10**6
CASES = {
    "default": MetricsSettings(),
    "all GPUs and pods": MetricsSettings(cards=MANY, pods=MANY),
    "and HAMi's names": MetricsSettings(cards=MANY, pods=MANY, hami=True),
}
GOALS = {"took, default, 5,000 nodes": 2.0, "delay, default": 0.05}  # seconds


@click.command()
def main() -> None:
    """Measure how long a scrape of the scheduler's /metrics takes, and how long it delays verbs."""
    print(f"{'nodes':>7}{'GPUs':>8}{'pods':>8}  {'case':<20}{'took':>9}{'delay':>10}{'series':>10}{'MB':>8}")
    worst, default = 0.0, 0.0
    for nodes in SIZES:
        cluster_state = cluster(nodes)
        gc.collect()
        gc.freeze()  # as the scheduler does after its first list
        for case, settings in CASES.items():
            took, delay, text = asyncio.run(measured(ClusterMetrics(cluster_state, settings)))
            if case == "default":
                worst, default = max(worst, delay), took
            series = sum(not line.startswith(b"#") for line in text.splitlines())
            columns = f"{took * 1000:>6.0f} ms{delay * 1000:>7.1f} ms{series:>10}{len(text) / 1e6:>8.1f}"
            print(f"{nodes:>7}{nodes * CARDS:>8}{nodes * PODS:>8}  {case:<20}{columns}")
    print()
    for (title, goal), seconds in zip(GOALS.items(), (default, worst), strict=True):
        print(f"{'ok  ' if seconds <= goal else 'SLOW'} {title}: {seconds:.3f} s, at most {goal} s")


def cluster(nodes: int) -> ClusterState:
    """Nodes with six pods each, whose agents report their usage."""
    ledger, rng = Ledger(), np.random.default_rng(7)
    cluster_state = ClusterState(ledger, DEFAULTS)
    ledger.fleet.scorer.learn_all([wants(ask(size, cores=20), cpu=1000) for size in ("4Gi", "20Gi", "32Gi")])
    for number in range(nodes):
        name = f"node-{number}"
        ledger.handle(NodeSeen(node(name, cpu="128").cards(CARDS, "NVIDIA A100-SXM4-80GB", "80Gi").node()))
        usage: Usage = {}
        for n in range(PODS):
            allocation = pod(name, number * PODS + n, int(rng.integers(0, CARDS)), int(rng.choice([4096, 20480])))
            ledger.handle(Confirmed(allocation))
            cluster_state._bound[allocation.pod] = Pod()
            usage[allocation.pod] = {"main": {uuid: CardUsage(3000, 40) for uuid in allocation.uses()}}
        use = write_usage(usage, [f"GPU-{name}-{card}" for card in range(CARDS)])
        for renewal in ("1", "2"):
            cluster_state.agents.changed(
                AgentLease(LeaseMetadata(name, LeaseAnnotations(use)), LeaseRenewal(name, 3600, renewal))
            )
    return cluster_state


def pod(node_name: str, number: int, card: int, memory: int) -> Allocation:
    uid = f"0f3c1a2b-1111-2222-3333-{number:012}"
    part = ContainerGrant("main", (Tile(f"GPU-{node_name}-{card}", card, memory, 20),))
    grant = Grant(pod=uid, node=node_name, dialect="gputile", containers=(part,))
    return Allocation(pod=uid, node=node_name, name=f"team-{number % 20}/train-{number}", grant=grant, cpu=1000)


async def measured(metrics: ClusterMetrics) -> tuple[float, float, bytes]:
    """Seconds, the longest gap between two turns of another task, and the text."""
    gaps: list[float] = []

    async def measure_gaps() -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            gaps.append((now := time.thread_time()) - before)
            before = now

    measuring = asyncio.create_task(measure_gaps())
    start_time = time.thread_time()
    text = await metrics.text()
    took = time.thread_time() - start_time
    await asyncio.sleep(0)
    measuring.cancel()
    return took, max(gaps), text


if __name__ == "__main__":
    main()
