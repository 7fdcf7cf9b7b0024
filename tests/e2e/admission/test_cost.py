"""What the policies cost the API server: no pod is rejected, or slow to make, for what a tenant piles up on it."""

import time
from itertools import islice, product
from typing import Any

import pytest

from tests.e2e.admission.writers import (
    Writers,
    lifted,
    many,
)
from tests.e2e.api import Kube, Manifest
from tests.e2e.pods import pod


def tiny(count: int) -> dict[str, str]:
    """Keys as short as can be: so many fit into the 256 KiB that annotations may have."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    keys = ("".join(word) for length in (1, 2, 3) for word in product(letters, repeat=length))
    return dict.fromkeys(islice(keys, count), "")


BIG = {
    "10,000 annotations": pod("big", {}, annotations={f"example.com/key-{n}": "x" for n in range(10_000)}),
    "88,000 annotations": pod("big", {}, annotations=tiny(88_000)),
    "40,000 labels": pod("big", {}, labels={f"example.com/key-{n}": "x" for n in range(40_000)}),
    "10,000 unknown keys of ours": pod("big", {}, annotations={f"gputile.io/key-{n}": "x" for n in range(10_000)}),
    "5,000 containers": pod("big", {}, automountServiceAccountToken=False, containers=many(5_000)),
}
TIMES = 3


def seconds(kube: Kube, made: Manifest) -> float:
    """The median of making it. Nobody schedules it."""
    manifest = {**made, "spec": {**made["spec"], "schedulerName": "nobody"}}
    took = []
    for _ in range(TIMES):
        began = time.monotonic()
        kube.create(manifest)
        took.append(time.monotonic() - began)
        kube.delete("Pod", "big", grace=0)
    return sorted(took)[TIMES // 2]


@pytest.mark.timeout(600)
def test_no_pod_is_rejected_or_slow_for_the_number_of_its_keys(writers: Writers, capsys: Any) -> None:
    kube = writers["anybody"]
    guarded = {what: seconds(kube, made) for what, made in BIG.items()}
    lifted(kube)
    free = {what: seconds(kube, made) for what, made in BIG.items()}
    with capsys.disabled():
        for what in BIG:
            print(f"\n  {what}: {guarded[what]:.2f} s with the policies, {free[what]:.2f} s without", end="")
    for what in BIG:
        assert guarded[what] < 3 * free[what] + 0.5, what
