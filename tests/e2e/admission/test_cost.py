"""The cost of the policies in the API server: the number of a pod's keys must not make writes slow or rejected.

A CEL loop over 10,000 keys takes seconds (its cost is quadratic), and an expression beyond its cost budget rejects the
write. The baseline is the same writes without policies.
"""

import time
from typing import Any

import pytest

from tests.e2e.admission.writers import GRANT, Writers, annotate, many, remove_policies, status
from tests.e2e.api import Kube, Manifest
from tests.e2e.pods import pod

KEYS = {f"example.com/key-{n}": "x" for n in range(10_000)}
PODS = {
    "10,000 annotations": pod("big", {}, annotations=KEYS),
    "10,000 unknown keys of gputile": pod("big", {}, annotations={f"gputile.io/key-{n}": "x" for n in range(10_000)}),
    "10,000 labels": pod("big", {}, labels=KEYS),
    "1,300 containers": pod("big", {}, containers=many(1_300)),
    "1,300 containers, 10,000 annotations": pod("big", {}, annotations=KEYS, containers=many(1_300)),
}
TIMES = 3
Took = dict[str, dict[str, float]]


def write_times(writers: Writers, manifest: Manifest) -> dict[str, float]:
    """The seconds of each write of a pod, the best of some rounds; a rejection fails the test."""
    kube, scheduler = writers["admin"], writers["scheduler"]
    quiet = {**manifest, "spec": {**manifest["spec"], "schedulerName": "nobody", "automountServiceAccountToken": False}}
    steps = {
        "created": lambda: kube.create(quiet),
        "status by a kubelet": lambda: status(kube, "big", {"status": {"phase": "Running"}}),
        "annotated by a tenant": lambda: annotate(kube, "big", {"example.com/more": "x"}),
        "granted by the scheduler": lambda: status(scheduler, "big", {"metadata": {"annotations": {GRANT: "{}"}}}),
    }
    rounds = []
    for _ in range(TIMES):
        rounds.append({what: seconds(step) for what, step in steps.items()})
        kube.delete("Pod", "big", grace=0)
    return {what: min(round_times[what] for round_times in rounds) for what in steps}


def seconds(write: Any) -> float:
    began = time.monotonic()
    write()
    return time.monotonic() - began


@pytest.mark.timeout(600)
def test_no_pod_is_rejected_or_slow_for_the_number_of_its_keys(writers: Writers, capsys: Any) -> None:
    with_policies: Took = {what: write_times(writers, manifest) for what, manifest in PODS.items()}
    remove_policies(writers["admin"])
    without: Took = {what: write_times(writers, manifest) for what, manifest in PODS.items()}
    with capsys.disabled():
        print(f"\n  {'seconds with the policies, and without':40}{'':26}")
        for what in PODS:
            for step, took in with_policies[what].items():
                print(f"  {what:40}{step:26}{took:6.2f}{without[what][step]:6.2f}")
    for what in PODS:
        for step, took in with_policies[what].items():
            assert took < 4 * without[what][step] + 2.0, (what, step)


def tiny(count: int) -> dict[str, str]:
    """This many keys of minimal length."""
    return {f"{n:x}": "" for n in range(count)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("annotations", "labels"),
    [
        pytest.param(tiny(50_000), {}, id="as many annotations as the API server accepts"),
        pytest.param({}, tiny(40_000), id="40,000 labels"),
        pytest.param({"a": "\x01" * 250_000}, tiny(600), id="a value that is longest when it is escaped"),
        pytest.param({"a": '"' * 250_000}, tiny(600), id="a value of quotes"),
    ],
)
def test_no_cost_limit_rejects_the_largest_pods(
    writers: Writers, annotations: dict[str, str], labels: dict[str, str]
) -> None:
    """The API server itself rejects larger ones."""
    kube: Kube = writers["admin"]
    kube.create(pod("big", {}, annotations=annotations, labels=labels, schedulerName="nobody"))
    status(kube, "big", {"status": {"phase": "Running"}})
    annotate(kube, "big", {"b": "x"})
    status(writers["scheduler"], "big", {"metadata": {"annotations": {GRANT: "{}"}}})
