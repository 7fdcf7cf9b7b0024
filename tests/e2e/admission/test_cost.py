"""What the policies cost the API server: no pod is rejected, or slow to write, for what a tenant piles up on it.

Walking through 10,000 keys in CEL takes seconds (it goes with the square), and an expression beyond its budget rejects
the write. The same writes without any policy are the measure.
"""

import time
from typing import Any

import pytest

from tests.e2e.admission.writers import GRANT, Writers, annotate, lifted, many, status
from tests.e2e.api import Kube, Manifest
from tests.e2e.pods import pod

KEYS = {f"example.com/key-{n}": "x" for n in range(10_000)}
PODS = {
    "10,000 annotations": pod("big", {}, annotations=KEYS),
    "10,000 unknown keys of ours": pod("big", {}, annotations={f"gputile.io/key-{n}": "x" for n in range(10_000)}),
    "10,000 labels": pod("big", {}, labels=KEYS),
    "1,300 containers": pod("big", {}, containers=many(1_300)),
    "1,300 containers, 10,000 annotations": pod("big", {}, annotations=KEYS, containers=many(1_300)),
}
TIMES = 3
Took = dict[str, dict[str, float]]


def life(writers: Writers, manifest: Manifest) -> dict[str, float]:
    """How long each write of a pod takes; a rejection fails the test. The best of some: the machine has other work."""
    kube, scheduler = writers["anybody"], writers["scheduler"]
    made = {**manifest, "spec": {**manifest["spec"], "schedulerName": "nobody", "automountServiceAccountToken": False}}
    steps = {
        "made": lambda: kube.create(made),
        "status by a kubelet": lambda: status(kube, "big", {"status": {"phase": "Running"}}),
        "annotated by a tenant": lambda: annotate(kube, "big", {"example.com/more": "x"}),
        "granted by the scheduler": lambda: status(scheduler, "big", {"metadata": {"annotations": {GRANT: "{}"}}}),
    }
    rounds = []
    for _ in range(TIMES):
        rounds.append({what: seconds(step) for what, step in steps.items()})
        kube.delete("Pod", "big", grace=0)
    return {what: min(took[what] for took in rounds) for what in steps}


def seconds(write: Any) -> float:
    began = time.monotonic()
    write()
    return time.monotonic() - began


@pytest.mark.timeout(600)
def test_no_pod_is_rejected_or_slow_for_the_number_of_its_keys(writers: Writers, capsys: Any) -> None:
    guarded: Took = {what: life(writers, made) for what, made in PODS.items()}
    lifted(writers["anybody"])
    free: Took = {what: life(writers, made) for what, made in PODS.items()}
    with capsys.disabled():
        print(f"\n  {'seconds with the policies, and without':40}{'':26}")
        for what in PODS:
            for step, took in guarded[what].items():
                print(f"  {what:40}{step:26}{took:6.2f}{free[what][step]:6.2f}")
    for what in PODS:
        for step, took in guarded[what].items():
            assert took < 4 * free[what][step] + 2.0, (what, step)


def tiny(count: int) -> dict[str, str]:
    """Keys as short as can be."""
    return {f"{n:x}": "" for n in range(count)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("annotations", "labels"),
    [
        pytest.param(tiny(50_000), {}, id="as many annotations as there is room for"),
        pytest.param({}, tiny(40_000), id="40,000 labels"),
        pytest.param({"a": "\x01" * 250_000}, tiny(600), id="a value that is longest when it is written out"),
        pytest.param({"a": '"' * 250_000}, tiny(600), id="a value of quotes"),
    ],
)
def test_no_cost_limit_rejects_the_largest_pods(
    writers: Writers, annotations: dict[str, str], labels: dict[str, str]
) -> None:
    """What comes next would be rejected by the API server itself."""
    kube: Kube = writers["anybody"]
    kube.create(pod("big", {}, annotations=annotations, labels=labels, schedulerName="nobody"))
    status(kube, "big", {"status": {"phase": "Running"}})
    annotate(kube, "big", {"b": "x"})
    status(writers["scheduler"], "big", {"metadata": {"annotations": {GRANT: "{}"}}})
