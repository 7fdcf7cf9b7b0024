"""Clients of the users whose writes the admission policies check, and the writes themselves.

It must not repeat a policy: a row of a test has the write, and whether the API server accepts it.
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
    """Clients by user, each with its own token; `admin` is subject to the policies too."""

    def __init__(self, plane: ControlPlane) -> None:
        home = {"apiVersion": "v1", "kind": "Node", "name": HOME}
        kube = plane.kube
        self._clients = {
            "admin": kube,
            "scheduler": kube.as_token(kube.token_for(ACCOUNT, NAMESPACE)),
            "agent": kube.as_token(kube.token_for(agents.ACCOUNT, agents.NAMESPACE, 3600, home)),
            "agent without a node": kube.as_token(kube.token_for(agents.ACCOUNT, agents.NAMESPACE)),
        }

    def __getitem__(self, name: str) -> Kube:
        return self._clients[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


def rejection(attempt: Callable[[], object]) -> str:
    """The message of a rejection by a policy or RBAC; "" if the write was accepted. Other errors are raised."""
    try:
        attempt()
    except ApiError as error:
        if error.status not in (403, 422):
            raise
        return error.message
    return ""


def wait_until_in_force(writers: Writers) -> None:
    """Wait until each policy rejects a write that it alone rejects; that takes about a second."""
    samples: dict[str, Callable[[], object]] = {
        "gputile-records": lambda: annotate(writers["admin"], "p", {GRANT: "x"}, dry=True),
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
        wait_until(lambda: f"'{policy}'" in rejection(attempt), 20, f"{policy} in force")  # noqa: B023


def remove_policies(kube: Kube) -> None:
    """Remove the bindings of all policies, and wait until they are no longer in force."""
    for name in POLICIES:
        if kube.find(BINDING, name):
            kube.delete(BINDING, name)
    wait_until(
        lambda: not rejection(lambda: annotate(kube, "p", {GRANT: "x"}, dry=True)), 20, "the policies are removed"
    )


# ---- writes ---------------------------------------------------------------------------------------------------------

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
