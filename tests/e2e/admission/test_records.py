"""Only the scheduler writes the records of allocated GPUs. The policies reject the admin's writes too."""

from collections.abc import Callable

import pytest

from tests.deploy.test_admission import prefixes, strings
from tests.e2e.admission.writers import (
    GRANT,
    HOME,
    MERGE,
    Writers,
    annotate,
    bind,
    label,
    rejection,
    status,
)
from tests.e2e.api import Kube
from tests.e2e.gputile import NAMESPACE
from tests.e2e.pods import pod


def test_a_new_pod_with_a_record_of_an_allocated_gpu_is_rejected(writers: Writers) -> None:
    """Every key, as an annotation and as a label; keys per container with the name or number of `main`."""
    keys = [
        *strings("gputile-records", "keys"),
        *(f"{prefix}{'0' if prefix.endswith('idx-') else 'main'}" for prefix in prefixes()),
    ]
    for key in keys:
        for where in ("annotations", "labels"):
            message = rejection(lambda: writers["admin"].create(pod("q", {}, **{where: {key: "x"}})))  # noqa: B023
            assert key.rstrip("0") in message, f"{key} in {where}"
            assert "only the gputile scheduler may set, change or remove it, not admin" in message


NUMBERED, NAMED = "tencent.com/predicate-gpu-idx-", "elasticgpu.io/container-"

MANY = {f"example.com/{n}": "x" for n in range(600)}
"""More than the policies loop over."""

LARGE = [
    pytest.param({GRANT: "x"}, GRANT, id="a grant"),
    pytest.param({"hami.io/vgpu-node": "x"}, "hami.io/vgpu-node", id="a record of HAMi's"),
    *(pytest.param({f"{prefix}0": "x"}, prefix, id=f"a record that begins with {prefix}") for prefix in prefixes()),
    pytest.param({"A": "first", f"{NUMBERED}0": "x", "z": "last"}, NUMBERED, id="a record between other keys"),
    pytest.param({"example.com/note": f', "{NUMBERED}0":"0"'}, "", id="a value that contains a record's key"),
    pytest.param({"example.com/note": f"{NAMED}main"}, "", id="a value that begins like a record's key"),
    pytest.param({"example.com/note": f'\\", "{NAMED}main'}, "", id="a value that imitates a record's key"),
    pytest.param({"elasticgpu.io/unknown": "x"}, "", id="an unknown key of that family"),
]


@pytest.mark.parametrize(("annotations", "named"), LARGE)
def test_records_are_rejected_among_many_keys(writers: Writers, annotations: dict[str, str], named: str) -> None:
    manifest = pod("q", {}, annotations=MANY | annotations, schedulerName="nobody")
    message = rejection(lambda: writers["admin"].create(manifest))
    assert named in message if named else not message


def test_a_record_is_rejected_as_the_only_annotation_beside_many_labels(writers: Writers) -> None:
    manifest = pod("q", {}, annotations={f"{NAMED}main": "0"}, labels=MANY, schedulerName="nobody")
    assert NAMED in rejection(lambda: writers["admin"].create(manifest))


def test_a_record_among_many_keys_cannot_be_changed(writers: Writers) -> None:
    """With a record among many keys no annotation may change; labels and the status may."""
    kube = writers["admin"]
    kube.create(pod("q", {}, annotations=MANY, schedulerName="nobody"))
    annotate(kube, "q", {"example.com/0": "y"})
    status(writers["scheduler"], "q", {"metadata": {"annotations": {f"{NUMBERED}0": "0"}}})
    for keys in ({f"{NUMBERED}0": "1"}, {f"{NUMBERED}0": None}, {"example.com/0": "z"}):
        assert NUMBERED in rejection(lambda: annotate(kube, "q", keys))  # noqa: B023
    label(kube, "q", {"a": "b"})
    status(kube, "q", {"status": {"phase": "Running"}})


HELD = {GRANT: "{}", "hami.io/vgpu-node": HOME}

UPDATES = [
    pytest.param(lambda kube: annotate(kube, "p", {GRANT: "other"}), GRANT, id="changed"),
    pytest.param(lambda kube: annotate(kube, "p", {GRANT: None}), GRANT, id="removed"),
    pytest.param(lambda kube: annotate(kube, "p", {"hami.io/bind-time": "1"}), "hami.io/bind-time", id="added"),
    pytest.param(lambda kube: label(kube, "p", {"hami.io/vgpu-node": "x"}), "hami.io/vgpu-node", id="as a label"),
    pytest.param(
        lambda kube: status(kube, "p", {"metadata": {"annotations": {GRANT: "x"}}}), GRANT, id="through the status"
    ),
    pytest.param(lambda kube: annotate(kube, "p", {GRANT: "{}", "a": "b"}), "", id="written without a change"),
    pytest.param(lambda kube: annotate(kube, "p", {"gputile.io/policy": "spread"}), "", id="an annotation for users"),
    pytest.param(lambda kube: status(kube, "p", {"status": {"phase": "Running"}}), "", id="a kubelet's status"),
]


@pytest.mark.parametrize(("write", "named"), UPDATES)
def test_a_change_of_a_record_is_rejected_and_other_updates_are_accepted(
    writers: Writers, write: Callable[[Kube], object], named: str
) -> None:
    status(writers["scheduler"], "p", {"metadata": {"annotations": HELD}})
    message = rejection(lambda: write(writers["admin"]))
    assert named in message if named else not message


@pytest.mark.parametrize("subresource", ["resize", "ephemeralcontainers"])
def test_other_subresources_of_a_pod_write_no_annotations(writers: Writers, subresource: str) -> None:
    """No policy matches them; the API server drops metadata there."""
    path = f"/api/v1/namespaces/default/pods/p/{subresource}"
    writers["admin"].request("PATCH", path, {"metadata": {"annotations": {GRANT: "x"}, "labels": {"a": "b"}}}, MERGE)
    metadata = writers["admin"].get("Pod", "p")["metadata"]
    assert (metadata.get("annotations"), metadata.get("labels")) == (None, None)


BINDINGS = [
    pytest.param({GRANT: "x"}, {}, GRANT, id="a grant"),
    pytest.param({f"{NUMBERED}0": "0"}, {}, f"{NUMBERED}0", id="a record by number"),
    pytest.param({"nano-gpu.io/gpu-main": "0"}, {}, "nano-gpu.io/gpu-main", id="a record by name"),
    pytest.param({}, {"elasticgpu.io/assumed": "true"}, "elasticgpu.io/assumed", id="a label"),
    pytest.param(MANY | {f"{NAMED}main": "0"}, {}, NAMED, id="a record among many keys"),
    pytest.param(MANY, {}, "", id="many keys"),
    pytest.param({"team": "a"}, {"team": "a"}, "", id="keys of a user"),
    pytest.param({}, {}, "", id="nothing, as kube-scheduler does"),
]


@pytest.mark.parametrize("path", ["pods/{}/binding", "bindings"])
@pytest.mark.parametrize(("annotations", "labels", "named"), BINDINGS)
def test_a_binding_with_a_record_is_rejected(
    writers: Writers, annotations: dict[str, str], labels: dict[str, str], named: str, path: str
) -> None:
    message = rejection(lambda: bind(writers["admin"], "p", annotations, labels, path))
    assert named in message if named else not message


class Impersonating(Kube):
    """The admin, impersonating another user."""

    def __init__(self, admin: Kube, user: str) -> None:
        super().__init__(admin.server, admin.ca, admin.token)
        self._user = user

    def headers(self, content: str = "application/json") -> dict[str, str]:
        return {**super().headers(content), "Impersonate-User": self._user, "Impersonate-Group": "system:masters"}


OTHERS = [
    pytest.param("gpu-manager", {f"{NUMBERED}0": "0"}, True, id="gpu-manager writes the GPU's index"),
    pytest.param(
        "gpu-manager", {"nvidia.com/gpu-assigned": "true"}, True, id="gpu-manager writes that the GPU is assigned"
    ),
    pytest.param("gpu-manager", {"hami.io/bind-phase": "success"}, False, id="gpu-manager writes no record of HAMi's"),
    pytest.param("gpu-manager", {GRANT: "x"}, False, id="gpu-manager writes no grant"),
    pytest.param("nano-gpu-scheduler", {"nano-gpu.io/gpu-main": "0"}, True, id="nano's scheduler writes its record"),
    pytest.param(
        "nano-gpu-scheduler", {f"{NAMED}main": "0"}, False, id="nano's scheduler writes no record of elastic-gpu's"
    ),
    pytest.param("hami-device-plugin", {"hami.io/bind-phase": "success"}, True, id="HAMi's plugin writes success"),
    pytest.param("hami-device-plugin", {"hami.io/vgpu-node": "x"}, False, id="HAMi's plugin changes no node"),
    pytest.param("gputile-agent", {GRANT: "x"}, False, id="gputile's agent writes no grant"),
]


@pytest.mark.parametrize(("account", "annotations", "may"), OTHERS)
def test_other_families_write_their_own_records_while_they_run(
    writers: Writers, account: str, annotations: dict[str, str], may: bool
) -> None:
    with Impersonating(writers["admin"], f"system:serviceaccount:{NAMESPACE}:{account}") as other:
        assert bool(rejection(lambda: annotate(other, "p", annotations))) is not may
