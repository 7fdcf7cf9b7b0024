"""What is a finding of the audit, and what is not."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.audit.advice import finding_lines
from gputile.audit.audit import audit
from gputile.audit.holdings import HeldAmounts, at_once
from gputile.audit.report import AuditReport
from gputile.dialects.gputile import GRANT, ORPHANED, write_orphaned_pods
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.model.requests import Role
from gputile.testing.builders import NodeBuilder, node, pod
from tests.effort import examples

NOW = 1_800_000_000.0
THEN = "2027-01-15T07:00:00Z"  # an hour before
JUST_NOW = "2027-01-15T07:59:30Z"
SIZE = 16000


def grant(name: str, *tiles: tuple[int, int, int], on: str = "n1", **changes: Any) -> dict[str, str]:
    """The annotation; a tile is index, memory, cores."""
    entries = [{"uuid": f"GPU-{on}-{i}", "index": i, "memory": memory, "cores": cores} for i, memory, cores in tiles]
    record = {
        "version": 1,
        "pod": f"uid-{name}",
        "node": on,
        "dialect": "gputile",
        "containers": [{"name": "c0", "tiles": entries}],
        "at": 1_799_996_400_000_000_000,
        **changes,
    }
    return {GRANT: msgspec.json.encode(record).decode()}


def holder(name: str, *tiles: tuple[int, int, int], bound: str = THEN, **changes: Any) -> dict[str, Any]:
    asks = {"gputile.io/gpu": len(tiles), "gputile.io/memory": tiles[0][1], "gputile.io/cores": tiles[0][2]}
    manifest = pod(asks, name=name, uid=f"uid-{name}", annotations=grant(name, *tiles, **changes), on="n1")
    return with_status(manifest, bound)


def with_status(manifest: dict[str, Any], bound: str = "", phase: str = "Running", born: str = THEN) -> dict[str, Any]:
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": bound}] if bound else []
    manifest["metadata"]["creationTimestamp"] = born
    return {**manifest, "status": {"phase": phase, "conditions": conditions}}


def look(*pods: dict[str, Any], nodes: tuple[NodeBuilder, ...] = ()) -> AuditReport:
    builders = nodes or (node("n1").cards(2, "Tesla T4", SIZE),)
    return audit([builder.manifest() for builder in builders], pods, now=NOW)


def codes(report: AuditReport) -> list[str]:
    return [str(notice.code) for notice in report.findings]


def remarks(report: AuditReport) -> list[str]:
    return [str(notice.code) for notice in report.remarks]


# ---- sums -----------------------------------------------------------------------------------------------------------


def test_a_full_card_is_no_finding() -> None:
    report = look(*(holder(f"p{n}", (0, 4000, 25)) for n in range(4)))
    assert report.is_right
    assert (report.nodes, report.cards, report.pods) == (1, 2, 4)
    assert (report.memory_allocated, report.memory) == (16000, 32000)


@pytest.mark.parametrize(
    ("last", "sums"),
    [
        pytest.param((0, 8001, 10), "16001 of 16000 MiB", id="memory"),
        pytest.param((0, 10, 51), "101 of 100 % of its cores", id="cores"),
    ],
)
def test_one_more_than_a_card_has_is_a_finding(last: tuple[int, int, int], sums: str) -> None:
    report = look(holder("a", (0, 8000, 50)), holder("b", last))
    assert codes(report) == ["double-allocated"]
    assert sums in report.findings[0].what
    assert report.findings[0].card is not None
    assert report.findings[0].card.uuid == "GPU-n1-0"


def test_more_tiles_than_slots_are_a_finding() -> None:
    assert look(*(holder(f"p{n}", (0, 10, 1)) for n in range(10))).is_right
    report = look(*(holder(f"p{n}", (0, 10, 1)) for n in range(11)))
    assert codes(report) == ["double-allocated"]
    assert "11 of 10 slots" in report.findings[0].what


def test_a_dialect_without_slots_takes_none() -> None:
    assert look(*(holder(f"p{n}", (0, 10, 1), dialect="nano") for n in range(11))).is_right


def test_pods_that_have_ended_hold_nothing() -> None:
    ended = with_status(holder("b", (0, 9000, 0)), THEN, "Succeeded")
    assert look(holder("a", (0, 9000, 0)), ended).is_right


def test_a_terminating_pod_still_holds_its_gpus() -> None:
    terminating = holder("b", (0, 9000, 0))
    terminating["metadata"]["deletionTimestamp"] = THEN
    report = look(holder("a", (0, 9000, 0)), terminating)
    assert codes(report) == ["double-allocated"]
    assert "being deleted" in report.findings[0].todo


def test_the_records_of_other_systems_count_and_are_named() -> None:
    other = pod(
        {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 9000},
        name="other",
        uid="uid-other",
        annotations={"hami.io/vgpu-node": "n1", "hami.io/vgpu-devices-allocated": "GPU-n1-0,NVIDIA,9000,0:;"},
        on="n1",
    )
    report = look(holder("a", (0, 9000, 0)), with_status(other, THEN))
    assert codes(report) == ["double-allocated"]
    assert "records of hami" in report.findings[0].todo


def test_the_lines_of_a_finding_name_the_newest_pod_and_what_to_do() -> None:
    report = look(holder("late", (0, 9000, 0), bound="2027-01-15T07:30:00Z"), holder("early", (0, 9000, 0), bound=THEN))
    text = "\n".join(finding_lines(report.findings))
    assert text.splitlines()[1:3] == [
        "      9000 MiB    0 %  default/early, since 2027-01-15T07:00:00Z, Running, by gputile",
        "      9000 MiB    0 %  default/late, since 2027-01-15T07:30:00Z, Running, by gputile, newest",
    ]
    assert "kubectl -n default delete pod late" in text


# ---- containers that do not run at the same time --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "most"),
    [
        pytest.param([(Role.APP, 3), (Role.APP, 4)], (7, 0, 2), id="two-at-once"),
        pytest.param([(Role.INIT, 9), (Role.APP, 4)], (9, 0, 1), id="init-before"),
        pytest.param([(Role.INIT, 3), (Role.INIT, 5), (Role.APP, 4)], (5, 0, 1), id="one-by-one"),
        pytest.param([(Role.SIDECAR, 2), (Role.INIT, 9), (Role.APP, 4)], (11, 0, 2), id="beside-init"),
        pytest.param([(Role.INIT, 9), (Role.SIDECAR, 2), (Role.APP, 4)], (9, 0, 2), id="after-init"),
    ],
)
def test_the_most_a_pod_holds_at_one_time(parts: list[tuple[Role, int]], most: tuple[int, int, int]) -> None:
    assert at_once((role, {"g": HeldAmounts(memory, 0, 1)}) for role, memory in parts) == {"g": HeldAmounts(*most)}


@examples(300)
@given(st.lists(st.tuples(st.sampled_from(list(Role)), st.integers(0, 9), st.integers(0, 2)), max_size=6))
def test_both_sums_agree(parts: list[tuple[Role, int, int]]) -> None:
    """The auditor's sums and those of the ledger, which share no code, for any order of containers."""
    ordered = sorted(enumerate(parts), key=lambda entry: entry[1][0] is Role.APP)
    containers = tuple(
        ContainerGrant(f"c{n}", (Tile(f"g{card}", card, memory, memory),), role) for n, (role, memory, card) in ordered
    )
    grant = Grant(pod="u", node="n", dialect="gputile", containers=containers)
    sums = at_once((role, {f"g{card}": HeldAmounts(memory, memory, 1)}) for _, (role, memory, card) in ordered)
    assert sums == {uuid: HeldAmounts(use.memory, use.cores, use.slots) for uuid, use in grant.uses().items()}


def test_a_grant_cannot_call_a_container_init_to_hide_it() -> None:
    pair = [
        {"name": name, "tiles": [{"uuid": "GPU-n1-0", "index": 0, "memory": 9000, "cores": 0}], "role": "init"}
        for name in ("c0", "c1")
    ]
    request = {"gputile.io/gpu": 1, "gputile.io/memory": 9000}
    manifest = pod(request, request, name="a", uid="uid-a", annotations=grant("a", containers=pair), on="n1")
    assert codes(look(with_status(manifest, THEN))) == ["no-such-container", "no-such-container", "double-allocated"]


# ---- grants and their pods ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        pytest.param({"pod": "uid-other"}, "not-its-grant", id="of-another-pod"),
        pytest.param({"node": "n2"}, "not-its-grant", id="of-another-node"),
        pytest.param({"version": 99}, "unreadable-grant", id="of-a-newer-version"),
        pytest.param({"containers": "none"}, "unreadable-grant", id="broken"),
        pytest.param(
            {"containers": [{"name": "unknown", "tiles": [{"uuid": "GPU-n1-0", "index": 0, "memory": 1, "cores": 0}]}]},
            "no-such-container",
            id="a-container-it-does-not-have",
        ),
        pytest.param(
            {"containers": [{"name": "c0", "tiles": [{"uuid": "GPU-x", "index": 0, "memory": 1, "cores": 0}]}]},
            "no-such-card",
            id="a-card-that-is-not-there",
        ),
    ],
)
def test_an_invalid_grant_is_a_finding(changes: dict[str, Any], code: str) -> None:
    report = look(holder("a", (0, 9000, 0), **changes))
    assert codes(report) == [code]
    assert "default/a" in report.findings[0].what
    assert report.findings[0].todo


@pytest.mark.parametrize(
    ("bound", "findings", "remarked"),
    [(JUST_NOW, [], ["no-grant"]), (THEN, ["no-grant"], []), ("", ["no-grant"], [])],
    ids=["young", "old", "since-when-is-unknown"],
)
def test_a_bound_pod_without_a_grant(bound: str, findings: list[str], remarked: list[str]) -> None:
    manifest = pod({"gputile.io/gpu": 1}, name="bound-elsewhere", uid="u", on="n1")
    report = look(with_status(manifest, bound))
    assert (codes(report), remarks(report)) == (findings, remarked)


def test_a_pod_without_gpus_is_ignored() -> None:
    report = look(with_status(pod({"cpu": 1}, on="n1"), THEN))
    assert (report.is_right, report.remarks, report.pods) == (True, (), 0)


def test_a_grant_that_differs_from_the_request_is_a_remark() -> None:
    manifest = holder("a", (0, 9000, 0))
    manifest["spec"]["containers"][0]["resources"]["limits"]["gputile.io/memory"] = 8000
    report = look(manifest)
    assert (codes(report), remarks(report)) == ([], ["not-as-requested"])


# ---- nodes ----------------------------------------------------------------------------------------------------------


def test_a_card_that_two_nodes_claim() -> None:
    twins = (node("n1").cards(1, "T4", SIZE), node("n2").cards(1, "T4", SIZE))
    manifests = [builder.manifest() for builder in twins]
    manifests[1]["metadata"]["annotations"] = manifests[0]["metadata"]["annotations"]
    report = audit(manifests, [], now=NOW)
    assert codes(report) == ["card-on-two-nodes"]


def test_an_unreadable_node_is_a_finding() -> None:
    broken = node("n1").cards(1, "T4", SIZE).manifest()
    broken["metadata"]["annotations"]["gputile.io/inventory"] = "{"
    report = audit([broken], [], now=NOW)
    assert codes(report) == ["unreadable-node"]


def test_a_deleted_node_is_a_remark() -> None:
    report = look(holder("a", (0, 9000, 0)), nodes=(node("n2").cards(1, "T4", SIZE),))
    assert (codes(report), remarks(report)) == ([], ["node-gone"])


def test_a_card_out_of_use_that_is_held_is_a_remark() -> None:
    unhealthy = node("n1").cards(1, "T4", SIZE, healthy=False, reason="Xid 79")
    report = look(holder("a", (0, 9000, 0)), nodes=(unhealthy,))
    assert remarks(report) == ["gpu-out-of-use"]
    assert "Xid 79" in report.remarks[0].what


# ---- pending pods ---------------------------------------------------------------------------------------------------


def pending_pod(limits: dict[str, Any], born: str = THEN, **rest: Any) -> dict[str, Any]:
    return with_status(pod(limits, name="wants", uid="uid-wants", **rest), phase="Pending", born=born)


def test_a_pending_pod_is_counted() -> None:
    tile = {"gputile.io/gpu": 1, "gputile.io/memory": 8000}
    report = look(pending_pod(tile), pending_pod({"cpu": 1}))
    assert (report.is_right, report.pending) == (True, 1)


# ---- orphaned pods --------------------------------------------------------------------------------------------------


def orphan(name: str, memory: int, index: int = 0, on: str = "n1") -> Grant:
    tiles = (Tile(f"GPU-{on}-{index}", index, memory, 0),)
    return Grant(pod=f"uid-{name}", node=on, dialect="gputile", containers=(ContainerGrant("c0", tiles),))


def look_with(annotation: str, *pods: dict[str, Any]) -> AuditReport:
    """The audit of n1 with this annotation of its agent."""
    manifest = node("n1").cards(2, "Tesla T4", SIZE).manifest()
    manifest["metadata"]["annotations"][ORPHANED] = annotation
    return audit([manifest], pods, now=NOW)


def test_an_orphaned_pod_still_holds_its_gpus() -> None:
    report = look_with(write_orphaned_pods([orphan("gone", 9000)]), holder("p1", (0, 7000, 0)))
    assert (codes(report), remarks(report)) == ([], ["orphaned"])
    assert report.memory_allocated == 16000
    assert "uid-gone" in report.remarks[0].what


def test_a_double_allocation_with_an_orphaned_pod_is_not_cured_by_deleting_a_pod() -> None:
    report = look_with(write_orphaned_pods([orphan("gone", 9000)]), holder("p1", (0, 9000, 0)))
    assert codes(report) == ["double-allocated"]
    assert "stop them on the node" in report.findings[0].todo
    assert any("deleted/uid-gone" in line for line in finding_lines(report.findings))


def test_a_listed_pod_that_exists_is_counted_once() -> None:
    report = look_with(write_orphaned_pods([orphan("p1", 9000)]), holder("p1", (0, 9000, 0)))
    assert (report.is_right, remarks(report), report.memory_allocated) == (True, [], 9000)


def test_an_ended_pod_that_the_agent_lists_still_holds() -> None:
    ended = with_status(holder("p1", (0, 9000, 0)), THEN, phase="Failed")
    report = look_with(write_orphaned_pods([orphan("p1", 9000)]), ended)
    assert (remarks(report), report.memory_allocated) == (["orphaned"], 9000)


def test_a_card_that_the_node_lost_is_not_counted() -> None:
    assert look_with(write_orphaned_pods([orphan("gone", 9000, index=7)])).memory_allocated == 0


def test_an_unreadable_annotation_of_the_agent_is_a_finding() -> None:
    report = look_with("{", holder("p1", (0, 9000, 0)))
    assert codes(report) == ["unreadable-node"]
    assert report.memory_allocated == 9000, "the cards are known all the same"


def test_a_kubelet_without_our_plugin_is_no_finding() -> None:
    manifest = node("n1").cards(2, "Tesla T4", SIZE).manifest()
    manifest["status"]["allocatable"]["gputile.io/gpu"] = "0"
    report = audit([manifest], [holder("p1", (0, 9000, 0))], now=NOW)
    assert (report.is_right, report.memory_allocated) == (True, 9000)
