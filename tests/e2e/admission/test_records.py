"""Only the scheduler writes what says which GPU a pod holds. `anybody` is the admin: policies hold for admins too."""

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
    is_rejected,
    label,
    status,
)
from tests.e2e.api import Kube
from tests.e2e.gputile import NAMESPACE
from tests.e2e.pods import pod


def test_nobody_makes_a_pod_with_a_key_that_says_which_gpu_it_holds(writers: Writers) -> None:
    """Every key, as an annotation and as a label; those with a container's name or number with that of `main`."""
    keys = [
        *strings("gputile-records", "keys"),
        *(f"{prefix}{'0' if prefix.endswith('idx-') else 'main'}" for prefix in prefixes()),
    ]
    for key in keys:
        for where in ("annotations", "labels"):
            said = is_rejected(lambda: writers["anybody"].create(pod("q", {}, **{where: {key: "x"}})))  # noqa: B023
            assert key.rstrip("0") in said, f"{key} in {where}"
            assert "only the gputile scheduler may set, change or remove it, not admin" in said


NUMBERED, NAMED = "tencent.com/predicate-gpu-idx-", "elasticgpu.io/container-"

MANY = {f"example.com/{n}": "x" for n in range(600)}
"""More than are walked through."""

LARGE = [
    pytest.param({GRANT: "x"}, GRANT, id="a grant"),
    pytest.param({"hami.io/vgpu-node": "x"}, "hami.io/vgpu-node", id="a record of HAMi's"),
    *(pytest.param({f"{prefix}0": "x"}, prefix, id=f"a record that begins with {prefix}") for prefix in prefixes()),
    pytest.param({"A": "first", f"{NUMBERED}0": "x", "z": "last"}, NUMBERED, id="one in the middle of others"),
    pytest.param({"example.com/says": f', "{NUMBERED}0":"0"'}, "", id="a value that speaks of one is none"),
    pytest.param({"example.com/says": f"{NAMED}main"}, "", id="a value that begins like one is none"),
    pytest.param({"example.com/says": f'\\", "{NAMED}main'}, "", id="a value that tries to look like one is none"),
    pytest.param({"elasticgpu.io/unknown": "x"}, "", id="a key of that family that says nothing"),
]


@pytest.mark.parametrize(("annotations", "says"), LARGE)
def test_records_are_found_among_many_keys(writers: Writers, annotations: dict[str, str], says: str) -> None:
    made = pod("q", {}, annotations=MANY | annotations, schedulerName="nobody")
    said = is_rejected(lambda: writers["anybody"].create(made))
    assert says in said if says else not said


def test_a_record_is_found_as_the_only_key_beside_many_labels(writers: Writers) -> None:
    made = pod("q", {}, annotations={f"{NAMED}main": "0"}, labels=MANY, schedulerName="nobody")
    assert NAMED in is_rejected(lambda: writers["anybody"].create(made))


def test_a_record_among_many_keys_stays_as_it_is(writers: Writers) -> None:
    """Where there is one, no annotation may change; labels and the status may."""
    kube = writers["anybody"]
    kube.create(pod("q", {}, annotations=MANY, schedulerName="nobody"))
    annotate(kube, "q", {"example.com/0": "y"})
    status(writers["scheduler"], "q", {"metadata": {"annotations": {f"{NUMBERED}0": "0"}}})
    for keys in ({f"{NUMBERED}0": "1"}, {f"{NUMBERED}0": None}, {"example.com/0": "z"}):
        assert NUMBERED in is_rejected(lambda: annotate(kube, "q", keys))  # noqa: B023
    label(kube, "q", {"a": "b"})
    status(kube, "q", {"status": {"phase": "Running"}})


HELD = {GRANT: "{}", "hami.io/vgpu-node": HOME}

UPDATES = [
    pytest.param(lambda kube: annotate(kube, "p", {GRANT: "other"}), GRANT, id="changed"),
    pytest.param(lambda kube: annotate(kube, "p", {GRANT: None}), GRANT, id="taken away"),
    pytest.param(lambda kube: annotate(kube, "p", {"hami.io/bind-time": "1"}), "hami.io/bind-time", id="added"),
    pytest.param(lambda kube: label(kube, "p", {"hami.io/vgpu-node": "x"}), "hami.io/vgpu-node", id="as a label"),
    pytest.param(
        lambda kube: status(kube, "p", {"metadata": {"annotations": {GRANT: "x"}}}), GRANT, id="through the status"
    ),
    pytest.param(lambda kube: annotate(kube, "p", {GRANT: "{}", "a": "b"}), "", id="written again as it is"),
    pytest.param(lambda kube: annotate(kube, "p", {"gputile.io/policy": "spread"}), "", id="what users write"),
    pytest.param(lambda kube: status(kube, "p", {"status": {"phase": "Running"}}), "", id="a kubelet's status"),
]


@pytest.mark.parametrize(("write", "says"), UPDATES)
def test_nobody_changes_a_record_and_everybody_may_carry_it_along(
    writers: Writers, write: Callable[[Kube], object], says: str
) -> None:
    status(writers["scheduler"], "p", {"metadata": {"annotations": HELD}})
    said = is_rejected(lambda: write(writers["anybody"]))
    assert says in said if says else not said


@pytest.mark.parametrize("subresource", ["resize", "ephemeralcontainers"])
def test_other_subresources_of_a_pod_write_no_annotations(writers: Writers, subresource: str) -> None:
    """No policy matches them; the API server drops metadata there."""
    path = f"/api/v1/namespaces/default/pods/p/{subresource}"
    writers["anybody"].request("PATCH", path, {"metadata": {"annotations": {GRANT: "x"}, "labels": {"a": "b"}}}, MERGE)
    found = writers["anybody"].get("Pod", "p")["metadata"]
    assert (found.get("annotations"), found.get("labels")) == (None, None)


BINDINGS = [
    pytest.param({GRANT: "x"}, {}, GRANT, id="a grant"),
    pytest.param({f"{NUMBERED}0": "0"}, {}, f"{NUMBERED}0", id="a record by number"),
    pytest.param({"nano-gpu.io/gpu-main": "0"}, {}, "nano-gpu.io/gpu-main", id="a record by name"),
    pytest.param({}, {"elasticgpu.io/assumed": "true"}, "elasticgpu.io/assumed", id="a label"),
    pytest.param(MANY | {f"{NAMED}main": "0"}, {}, NAMED, id="a record among many keys"),
    pytest.param(MANY, {}, "", id="many keys"),
    pytest.param({"team": "a"}, {"team": "a"}, "", id="somebody's own words"),
    pytest.param({}, {}, "", id="nothing, as kube-scheduler does"),
]


@pytest.mark.parametrize("path", ["pods/{}/binding", "bindings"])
@pytest.mark.parametrize(("annotations", "labels", "says"), BINDINGS)
def test_a_binding_is_no_way_around_it(
    writers: Writers, annotations: dict[str, str], labels: dict[str, str], says: str, path: str
) -> None:
    said = is_rejected(lambda: bind(writers["anybody"], "p", annotations, labels, path))
    assert says in said if says else not said


class Impersonating(Kube):
    """The admin in somebody else's name."""

    def __init__(self, admin: Kube, user: str) -> None:
        super().__init__(admin.server, admin.ca, admin.token)
        self._user = user

    def headers(self, content: str = "application/json") -> dict[str, str]:
        return {**super().headers(content), "Impersonate-User": self._user, "Impersonate-Group": "system:masters"}


OTHERS = [
    pytest.param("gpu-manager", {f"{NUMBERED}0": "0"}, True, id="gpu-manager says which GPU it gave"),
    pytest.param("gpu-manager", {"nvidia.com/gpu-assigned": "true"}, True, id="gpu-manager says that it did"),
    pytest.param("gpu-manager", {"hami.io/bind-phase": "success"}, False, id="gpu-manager writes no word of HAMi's"),
    pytest.param("gpu-manager", {GRANT: "x"}, False, id="gpu-manager writes no grant"),
    pytest.param("nano-gpu-scheduler", {"nano-gpu.io/gpu-main": "0"}, True, id="nano's scheduler writes its record"),
    pytest.param("nano-gpu-scheduler", {f"{NAMED}main": "0"}, False, id="nano's scheduler writes no elastic-gpu's"),
    pytest.param("hami-device-plugin", {"hami.io/bind-phase": "success"}, True, id="HAMi's plugin says success"),
    pytest.param("hami-device-plugin", {"hami.io/vgpu-node": "x"}, False, id="HAMi's plugin moves no pod"),
    pytest.param("gputile-agent", {GRANT: "x"}, False, id="our own agent writes no grant"),
]


@pytest.mark.parametrize(("account", "annotations", "may"), OTHERS)
def test_other_families_write_their_own_records_while_they_run(
    writers: Writers, account: str, annotations: dict[str, str], may: bool
) -> None:
    with Impersonating(writers["anybody"], f"system:serviceaccount:{NAMESPACE}:{account}") as other:
        assert bool(is_rejected(lambda: annotate(other, "p", annotations))) is not may
