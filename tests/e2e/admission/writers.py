"""Those who write, each with a token of its own, and the writes that policies are about.

Room:  no policy is repeated here; a row of a test says what is written, and whether the API server takes it.
Door:  `Writers(plane)["scheduler"]`, `is_rejected(attempt)`, `in_force(writers)`, `lifted(kube)`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gputile.cli.checks.control import POLICIES
from gputile.dialects import gputile
from tests.e2e import agents
from tests.e2e.api import ApiError, Kube, Manifest
from tests.e2e.control_plane import ControlPlane
from tests.e2e.gputile import ACCOUNT, NAMESPACE
from tests.e2e.pods import container
from tests.e2e.processes import wait_until

BINDING = "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicyBinding"
HOME, AWAY = "home", "away"
ZONES = {"topology.kubernetes.io/zone": "z1", "topology.kubernetes.io/region": "r1"}
GRANT = gputile.GRANT


class Writers(Mapping[str, Kube]):
    """The API as each of those who write, by name, with their own tokens."""

    def __init__(self, plane: ControlPlane) -> None:
        home = {"apiVersion": "v1", "kind": "Node", "name": HOME}
        kube = plane.kube
        self._doors = {
            "anybody": kube,
            "scheduler": kube.as_token(kube.token_for(ACCOUNT, NAMESPACE)),
            "agent": kube.as_token(kube.token_for(agents.ACCOUNT, agents.NAMESPACE, 3600, home)),
            "agent without a node": kube.as_token(kube.token_for(agents.ACCOUNT, agents.NAMESPACE)),
        }

    def __getitem__(self, name: str) -> Kube:
        return self._doors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._doors)

    def __len__(self) -> int:
        return len(self._doors)


def is_rejected(attempt: Callable[[], object]) -> str:
    """The sentence of the no; "" if it was taken. Any other no than a policy's or RBAC's is an error of the test."""
    try:
        attempt()
    except ApiError as no:
        if no.status not in (403, 422):
            raise
        return no.message
    return ""


def in_force(writers: Writers) -> None:
    """One write per policy that it alone rejects. They come into force within about a second."""
    samples: dict[str, Callable[[], object]] = {
        "gputile-records": lambda: annotate(writers["anybody"], "p", {GRANT: "x"}, dry=True),
        "gputile-scheduler": lambda: status(writers["scheduler"], "p", {"metadata": {"labels": {"a": "b"}}}, dry=True),
        "gputile-scheduler-objects": lambda: writers["scheduler"].request(
            "POST", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases?dryRun=All", lease("other")
        ),
        "gputile-agents": lambda: writers["agent"].request(
            "PATCH", f"/api/v1/nodes/{AWAY}?dryRun=All", {"metadata": {"labels": {"gputile.io/x": "y"}}}, MERGE
        ),
    }
    assert set(samples) == set(POLICIES)
    for policy, attempt in samples.items():
        wait_until(lambda: f"'{policy}'" in is_rejected(attempt), 20, f"{policy} in force")  # noqa: B023


def lifted(kube: Kube) -> None:
    """No policy in force."""
    for name in POLICIES:
        if kube.find(BINDING, name):
            kube.delete(BINDING, name)
    wait_until(lambda: not is_rejected(lambda: annotate(kube, "p", {GRANT: "x"}, dry=True)), 20, "the policies lifted")


# ---- writes -----------------------------------------------------------------------------------------------------

MERGE = "application/merge-patch+json"


def _patch(kube: Kube, path: str, body: Manifest, dry: bool) -> Any:
    return kube.request("PATCH", f"{path}?dryRun=All" if dry else path, body, MERGE)


def annotate(kube: Kube, name: str, keys: Mapping[str, str | None], *, dry: bool = False) -> Any:
    return _patch(kube, f"/api/v1/namespaces/default/pods/{name}", {"metadata": {"annotations": dict(keys)}}, dry)


def label(kube: Kube, name: str, keys: Mapping[str, str | None], *, dry: bool = False) -> Any:
    return _patch(kube, f"/api/v1/namespaces/default/pods/{name}", {"metadata": {"labels": dict(keys)}}, dry)


def status(kube: Kube, name: str, body: Manifest, *, dry: bool = False) -> Any:
    return _patch(kube, f"/api/v1/namespaces/default/pods/{name}/status", body, dry)


def bind(
    kube: Kube,
    name: str,
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    path: str = "pods/{}/binding",
) -> Any:
    meta = {"name": name, "annotations": dict(annotations or {}), "labels": dict(labels or {})}
    target = {"apiVersion": "v1", "kind": "Node", "name": HOME}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": target}
    return kube.request("POST", f"/api/v1/namespaces/default/{path.format(name)}", body)


def lease(name: str) -> Manifest:
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": {}}


def many(count: int, *more: str) -> list[Manifest]:
    return [container(f"c{n}") for n in range(count)] + [container(name) for name in more]


def meta(**metadata: Any) -> Manifest:
    return {"metadata": metadata}
