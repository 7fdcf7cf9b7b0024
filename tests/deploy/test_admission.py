"""deploy/admission.yaml names the keys that the code writes, and no others. The e2e tests apply it."""

import re
from typing import Any

import pytest

from gputile.agent.inventory import labels
from gputile.agent.node_reporter import CONDITION
from gputile.cli.checks.control import POLICIES
from gputile.dialects import gputile, registry
from gputile.dialects.kube_objects import GrantContext, PodRecord
from gputile.dialects.settings import DEFAULTS
from gputile.engine.placement.place import Placement, place
from gputile.kube.quota_config_maps import LAST_GOOD
from gputile.model.cards import NodeView
from gputile.nvml.driver import DriverSnapshot
from gputile.scheduler import leadership
from gputile.testing.builders import pod
from tests.deploy.test_manifests import NAME, NAMESPACE, objects
from tests.dialects.shortcuts import AT, SHELF, Manifest, object_of, read

SCHEDULER = f"system:serviceaccount:{NAMESPACE}:{NAME}"


def spec(policy: str) -> Any:
    return objects("admission.yaml")["ValidatingAdmissionPolicy", policy]["spec"]


def variables(policy: str) -> dict[str, str]:
    return {each["name"]: each["expression"] for each in spec(policy)["variables"]}


def strings(policy: str, variable: str) -> list[str]:
    """The strings in a variable."""
    return re.findall(r"'([^']*)'", variables(policy)[variable])


def prefixes() -> tuple[str, ...]:
    return tuple(strings("gputile-records", "prefixes"))


def all_expressions(policy: str) -> str:
    return " ".join([*variables(policy).values(), *(each["expression"] for each in spec(policy)["validations"])])


# ---- records of the dialects ----------------------------------------------------------------------------------------


def written_for(manifest: Manifest) -> PodRecord:
    request = read(manifest)
    placement = place(request, NodeView.empty(SHELF))
    assert isinstance(placement, Placement), placement
    grant = placement.grant("uid-1", request)
    return registry.write_grant(
        GrantContext(grant=grant, pod=object_of(manifest), asked=request, cards=SHELF.cards, at=AT, settings=DEFAULTS)
    )


@pytest.mark.parametrize(
    "manifest",
    [
        pytest.param(pod({"gputile.io/gpu": 2, "gputile.io/memory": 3000}), id="gputile"),
        pytest.param(pod({"aliyun.com/gpu-mem": 3}), id="gpushare on one card"),
        pytest.param(pod({"aliyun.com/gpu-mem": 4}, labels={"aliyun.com/gpu-count": "2"}), id="gpushare on two"),
        pytest.param(pod({"nano-gpu.io/gpu-core": 20, "nano-gpu.io/gpu-memory": 2}), id="nano 1"),
        pytest.param(pod({"nano-gpu/gpu-percent": 20}, {}), id="nano 2 with an idle container"),
        pytest.param(pod({"elasticgpu.io/gpu-core": 20, "elasticgpu.io/gpu-memory": 200}), id="nano 3"),
        pytest.param(pod({"tencent.com/vcuda-core": 20, "tencent.com/vcuda-memory": 2}), id="vcuda"),
        pytest.param(pod({"nvidia.com/vcuda-core": 20, "nvidia.com/vcuda-memory": 2}), id="vcuda's fork"),
        pytest.param(pod({"nvidia.com/gpu": 1}), id="nvidia"),
        pytest.param(pod({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}), id="hami"),
        pytest.param(pod({"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 3000}), id="vgpu"),
    ],
)
def test_users_may_not_write_the_records_of_any_dialect(manifest: Manifest) -> None:
    written, keys = written_for(manifest), strings("gputile-records", "keys")
    assert gputile.GRANT in written.annotations
    assert [
        key for key in (*written.annotations, *written.labels) if not (key in keys or key.startswith(prefixes()))
    ] == []


def test_users_may_not_write_nominations_and_may_write_their_own_keys() -> None:
    keys = strings("gputile-records", "keys")
    assert gputile.NOMINATION in keys
    inputs = {*gputile.SELECTIONS, "aliyun.com/gpu-count", "tencent.com/vcuda-core-limit", "nvidia.com/use-gputype"}
    assert not inputs & set(keys)
    assert not [key for key in inputs if key.startswith(prefixes())]


def test_no_other_family_may_write_our_keys() -> None:
    rows = re.findall(r"\[([^]]*)\]", variables("gputile-records")["others"])
    allowed = [word for row in rows for word in re.findall(r"'([^']*)'", row)]
    assert allowed
    assert not [word for word in allowed if gputile.GRANT.startswith(word) or word.startswith("gputile.io/")]


def conditions(policy: str) -> dict[str, str]:
    return {each["name"]: each["expression"] for each in spec(policy)["matchConditions"]}


def test_only_our_scheduler_is_exempt_from_the_check_of_records() -> None:
    spared = conditions("gputile-records")
    assert spared.pop("not-by-our-scheduler") == f"request.userInfo.username != '{SCHEDULER}'"
    (only,) = spared.values()
    words = re.findall(r"'([^']*)'", only)
    keys = words[: words.index("%s")]
    assert keys == strings("gputile-records", "keys")
    shortened = {word for word in words if word.startswith('"')}
    assert all(f'"{prefix}'.startswith(tuple(shortened)) for prefix in prefixes())
    assert max(map(len, shortened)) <= 10  # a longer one would exceed the CEL cost limit for the largest pods


def test_every_prefix_of_a_record_is_checked_in_large_objects_too() -> None:
    """Each has a variable of its own, because the CEL cost limit applies to one expression."""
    expressions = variables("gputile-records")
    assert [n for n in range(20) if f"large{n}" in expressions] == list(range(len(prefixes())))
    for n, prefix in enumerate(prefixes()):
        assert len(prefix) >= 16
        assert f"variables.prefixes[{n}].substring(0, 16)" in expressions[f"large{n}"]
        assert f"variables.large{n}" in expressions["rejected"]


WALK = re.compile(r"variables\.(?:annotations|labels)(?:Before)?\.(?:map|filter|exists|all)\(")


def test_checks_of_every_pod_iterate_over_the_keys_of_small_ones_only() -> None:
    """A pod may have 88,000 annotations, and more labels."""
    walking = [expression for expression in variables("gputile-records").values() if WALK.search(expression)]
    assert walking
    assert all(expression.startswith("!variables.isSmall ? []") for expression in walking)
    others = [each["expression"] for each in spec("gputile-records")["validations"]]
    assert not [each for each in (*others, *conditions("gputile-records").values()) if WALK.search(each)]


# ---- our scheduler --------------------------------------------------------------------------------------------------


def test_the_scheduler_may_write_the_records_and_the_nudge_and_no_other_key() -> None:
    records = {*strings("gputile-records", "keys"), gputile.NUDGED}
    assert set(strings("gputile-scheduler", "keys")) == records
    assert strings("gputile-scheduler", "prefixes") == [*prefixes()]
    assert leadership.LABEL in records


def test_the_scheduler_is_known_by_the_same_name_everywhere() -> None:
    ours = f"request.userInfo.username == '{SCHEDULER}'"
    for policy in ("gputile-scheduler", "gputile-scheduler-objects"):
        assert [*conditions(policy).values()] == [ours]


def test_of_a_quota_the_scheduler_may_write_the_last_good_text() -> None:
    assert f"k == '{LAST_GOOD}'" in all_expressions("gputile-scheduler-objects")
    assert f"object.metadata.name == '{NAME}'" in all_expressions("gputile-scheduler-objects")


# ---- agents ---------------------------------------------------------------------------------------------------------


def test_an_agent_may_change_its_extended_resources_and_no_device_plugin_resources() -> None:
    reported = registry.status_resources(registry.names(), SHELF.cards, DEFAULTS).keys()
    assert set(strings("gputile-agents", "sums")) == reported
    served = registry.device_resources(registry.names(), SHELF.cards, DEFAULTS)
    assert not {carrier.resource for carrier in served} & reported


def nodes_chosen() -> set[str]:
    """The labels by which an operator chooses where agents run."""
    return set(objects("agent.yaml")["DaemonSet", "gputile-agent"]["spec"]["template"]["spec"]["nodeSelector"])


def test_an_agent_may_change_its_condition_and_its_keys_but_no_keys_of_users() -> None:
    assert f"c.type != '{CONDITION}'" in all_expressions("gputile-agents")
    *_, ours, first, second, third = strings("gputile-agents", "strangeKeys")
    peoples = {first, second, third}
    written = {gputile.INVENTORY, gputile.ORPHANED, *labels(DriverSnapshot(), "none")}
    assert all(key.startswith(ours) for key in written)
    assert peoples == {gputile.CORDON, gputile.POOL, *nodes_chosen()}
    assert not written & peoples


# ---- in force -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["admission.yaml", "admission-optional.yaml"])
def test_every_policy_is_in_force_for_all_namespaces(file: str) -> None:
    manifests = objects(file)
    policies = {name for kind, name in manifests if kind.endswith("Policy")}
    bindings = [each["spec"] for (kind, _), each in manifests.items() if kind.endswith("PolicyBinding")]
    assert {binding["policyName"] for binding in bindings} == policies
    assert all(binding.get("validationActions", ["Deny"]) == ["Deny"] for binding in bindings)
    assert all("matchResources" not in binding for binding in bindings)


def test_doctor_looks_for_every_policy() -> None:
    manifests = objects("admission.yaml")
    assert {name for kind, name in manifests if kind == "ValidatingAdmissionPolicy"} == set(POLICIES)
    assert all(spec(policy)["failurePolicy"] == "Fail" for policy in POLICIES)
