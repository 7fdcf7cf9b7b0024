"""What the auditor finds, and what it lets pass."""

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
    made = [{"uuid": f"GPU-{on}-{i}", "index": i, "memory": memory, "cores": cores} for i, memory, cores in tiles]
    said = {
        "version": 1,
        "pod": f"uid-{name}",
        "node": on,
        "dialect": "gputile",
        "containers": [{"name": "c0", "tiles": made}],
        "at": 1_799_996_400_000_000_000,
        **changes,
    }
    return {GRANT: msgspec.json.encode(said).decode()}


def holder(name: str, *tiles: tuple[int, int, int], bound: str = THEN, **changes: Any) -> dict[str, Any]:
    asks = {"gputile.io/gpu": len(tiles), "gputile.io/memory": tiles[0][1], "gputile.io/cores": tiles[0][2]}
    made = pod(asks, name=name, uid=f"uid-{name}", annotations=grant(name, *tiles, **changes), on="n1")
    return with_status(made, bound)


def with_status(made: dict[str, Any], bound: str = "", phase: str = "Running", born: str = THEN) -> dict[str, Any]:
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": bound}] if bound else []
    made["metadata"]["creationTimestamp"] = born
    return {**made, "status": {"phase": phase, "conditions": conditions}}


def look(*pods: dict[str, Any], nodes: tuple[NodeBuilder, ...] = ()) -> AuditReport:
    found = nodes or (node("n1").cards(2, "Tesla T4", SIZE),)
    return audit([one.manifest() for one in found], pods, now=NOW)


def codes(report: AuditReport) -> list[str]:
    return [str(notice.code) for notice in report.findings]


def remarks(report: AuditReport) -> list[str]:
    return [str(notice.code) for notice in report.remarks]


# ---- sums -----------------------------------------------------------------------------------------------------------


def test_a_full_card_is_right() -> None:
    report = look(*(holder(f"p{n}", (0, 4000, 25)) for n in range(4)))
    assert report.is_right
    assert (report.nodes, report.cards, report.pods) == (1, 2, 4)
    assert (report.memory_sold, report.memory) == (16000, 32000)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        pytest.param((0, 8001, 10), "16001 of 16000 MiB", id="memory"),
        pytest.param((0, 10, 51), "101 of 100 % of its cores", id="cores"),
    ],
)
def test_one_more_than_a_card_has_is_found(last: tuple[int, int, int], said: str) -> None:
    report = look(holder("a", (0, 8000, 50)), holder("b", last))
    assert codes(report) == ["oversold"]
    assert said in report.findings[0].what
    assert report.findings[0].card is not None
    assert report.findings[0].card.uuid == "GPU-n1-0"


def test_more_tiles_than_slots_are_found() -> None:
    assert look(*(holder(f"p{n}", (0, 10, 1)) for n in range(10))).is_right
    report = look(*(holder(f"p{n}", (0, 10, 1)) for n in range(11)))
    assert codes(report) == ["oversold"]
    assert "11 of 10 slots" in report.findings[0].what


def test_a_dialect_without_slots_takes_none() -> None:
    assert look(*(holder(f"p{n}", (0, 10, 1), dialect="nano") for n in range(11))).is_right


def test_pods_that_have_ended_hold_nothing() -> None:
    over = with_status(holder("b", (0, 9000, 0)), THEN, "Succeeded")
    assert look(holder("a", (0, 9000, 0)), over).is_right


def test_a_pod_that_is_asked_to_go_still_holds() -> None:
    going = holder("b", (0, 9000, 0))
    going["metadata"]["deletionTimestamp"] = THEN
    report = look(holder("a", (0, 9000, 0)), going)
    assert codes(report) == ["oversold"]
    assert "being deleted" in report.findings[0].todo


def test_the_records_of_other_systems_count_and_are_named() -> None:
    theirs = pod(
        {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 9000},
        name="theirs",
        uid="uid-theirs",
        annotations={"hami.io/vgpu-node": "n1", "hami.io/vgpu-devices-allocated": "GPU-n1-0,NVIDIA,9000,0:;"},
        on="n1",
    )
    report = look(holder("a", (0, 9000, 0)), with_status(theirs, THEN))
    assert codes(report) == ["oversold"]
    assert "records of hami" in report.findings[0].todo


def test_the_story_names_who_came_last_and_what_to_do() -> None:
    report = look(holder("late", (0, 9000, 0), bound="2027-01-15T07:30:00Z"), holder("early", (0, 9000, 0), bound=THEN))
    text = "\n".join(finding_lines(report.findings))
    assert text.splitlines()[1:3] == [
        "      9000 MiB    0 %  default/early, since 2027-01-15T07:00:00Z, Running, by gputile",
        "      9000 MiB    0 %  default/late, since 2027-01-15T07:30:00Z, Running, by gputile, came last",
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
    """The auditor's sums and the book's, written by different hands, for any order of containers."""
    ordered = sorted(enumerate(parts), key=lambda one: one[1][0] is Role.APP)
    made = tuple(
        ContainerGrant(f"c{n}", (Tile(f"g{card}", card, memory, memory),), role) for n, (role, memory, card) in ordered
    )
    grant = Grant(pod="u", node="n", dialect="gputile", containers=made)
    found = at_once((role, {f"g{card}": HeldAmounts(memory, memory, 1)}) for _, (role, memory, card) in ordered)
    assert found == {uuid: HeldAmounts(use.memory, use.cores, use.slots) for uuid, use in grant.uses().items()}


def test_a_grant_cannot_call_a_container_init_to_hide_it() -> None:
    pair = [
        {"name": name, "tiles": [{"uuid": "GPU-n1-0", "index": 0, "memory": 9000, "cores": 0}], "role": "init"}
        for name in ("c0", "c1")
    ]
    wish = {"gputile.io/gpu": 1, "gputile.io/memory": 9000}
    made = pod(wish, wish, name="a", uid="uid-a", annotations=grant("a", containers=pair), on="n1")
    assert codes(look(with_status(made, THEN))) == ["no-such-container", "no-such-container", "oversold"]


# ---- grants and their pods ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        pytest.param({"pod": "uid-other"}, "not-its-grant", id="another-pods"),
        pytest.param({"node": "n2"}, "not-its-grant", id="of-another-node"),
        pytest.param({"version": 99}, "unreadable-grant", id="from-the-future"),
        pytest.param({"containers": "none"}, "unreadable-grant", id="broken"),
        pytest.param(
            {"containers": [{"name": "ghost", "tiles": [{"uuid": "GPU-n1-0", "index": 0, "memory": 1, "cores": 0}]}]},
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
def test_a_grant_that_is_not_right(changes: dict[str, Any], code: str) -> None:
    report = look(holder("a", (0, 9000, 0), **changes))
    assert codes(report) == [code]
    assert "default/a" in report.findings[0].what
    assert report.findings[0].todo


@pytest.mark.parametrize(
    ("bound", "found", "remarked"),
    [(JUST_NOW, [], ["no-grant"]), (THEN, ["no-grant"], []), ("", ["no-grant"], [])],
    ids=["young", "old", "nobody-knows-since-when"],
)
def test_a_bound_pod_without_a_grant(bound: str, found: list[str], remarked: list[str]) -> None:
    made = pod({"gputile.io/gpu": 1}, name="around", uid="u", on="n1")
    report = look(with_status(made, bound))
    assert (codes(report), remarks(report)) == (found, remarked)


def test_a_pod_that_asks_for_no_card_is_none_of_our_business() -> None:
    report = look(with_status(pod({"cpu": 1}, on="n1"), THEN))
    assert (report.is_right, report.remarks, report.pods) == (True, (), 0)


def test_a_grant_that_differs_from_the_wish_is_remarked() -> None:
    made = holder("a", (0, 9000, 0))
    made["spec"]["containers"][0]["resources"]["limits"]["gputile.io/memory"] = 8000
    report = look(made)
    assert (codes(report), remarks(report)) == ([], ["not-as-asked"])


# ---- nodes ----------------------------------------------------------------------------------------------------------


def test_a_card_that_two_nodes_claim() -> None:
    twins = (node("n1").cards(1, "T4", SIZE), node("n2").cards(1, "T4", SIZE))
    manifests = [one.manifest() for one in twins]
    manifests[1]["metadata"]["annotations"] = manifests[0]["metadata"]["annotations"]
    report = audit(manifests, [], now=NOW)
    assert codes(report) == ["card-on-two-nodes"]


def test_a_node_that_cannot_be_read_is_no_proof() -> None:
    broken = node("n1").cards(1, "T4", SIZE).manifest()
    broken["metadata"]["annotations"]["gputile.io/inventory"] = "{"
    report = audit([broken], [], now=NOW)
    assert codes(report) == ["unreadable-node"]


def test_a_node_that_is_gone_is_remarked() -> None:
    report = look(holder("a", (0, 9000, 0)), nodes=(node("n2").cards(1, "T4", SIZE),))
    assert (codes(report), remarks(report)) == ([], ["node-gone"])


def test_a_card_out_of_use_that_is_held_is_remarked() -> None:
    sick = node("n1").cards(1, "T4", SIZE, healthy=False, reason="Xid 79")
    report = look(holder("a", (0, 9000, 0)), nodes=(sick,))
    assert remarks(report) == ["card-out-of-use"]
    assert "Xid 79" in report.remarks[0].what


# ---- those who wait -------------------------------------------------------------------------------------------------


def waiting(limits: dict[str, Any], born: str = THEN, **rest: Any) -> dict[str, Any]:
    return with_status(pod(limits, name="wants", uid="uid-wants", **rest), phase="Pending", born=born)


def test_a_pod_that_waits_is_counted() -> None:
    tile = {"gputile.io/gpu": 1, "gputile.io/memory": 8000}
    report = look(waiting(tile), waiting({"cpu": 1}))
    assert (report.is_right, report.waiting) == (True, 1)


# ---- pods that are gone and whose containers run ---------------------------------------------------------------------


def ghost(name: str, memory: int, index: int = 0, on: str = "n1") -> Grant:
    tiles = (Tile(f"GPU-{on}-{index}", index, memory, 0),)
    return Grant(pod=f"uid-{name}", node=on, dialect="gputile", containers=(ContainerGrant("c0", tiles),))


def look_with(said: str, *pods: dict[str, Any]) -> AuditReport:
    """n1 has the annotation of its agent."""
    made = node("n1").cards(2, "Tesla T4", SIZE).manifest()
    made["metadata"]["annotations"][ORPHANED] = said
    return audit([made], pods, now=NOW)


def test_what_a_deleted_pods_containers_still_use_is_held() -> None:
    report = look_with(write_orphaned_pods([ghost("gone", 9000)]), holder("p1", (0, 7000, 0)))
    assert (codes(report), remarks(report)) == ([], ["lingering"])
    assert report.memory_sold == 16000
    assert "uid-gone" in report.remarks[0].what


def test_sold_while_they_use_it_is_sold_twice_and_the_cure_is_not_to_delete_a_pod() -> None:
    report = look_with(write_orphaned_pods([ghost("gone", 9000)]), holder("p1", (0, 9000, 0)))
    assert codes(report) == ["oversold"]
    assert "end them on the node" in report.findings[0].todo
    assert any("deleted/uid-gone" in line for line in finding_lines(report.findings))


def test_a_pod_that_is_there_is_counted_once() -> None:
    report = look_with(write_orphaned_pods([ghost("p1", 9000)]), holder("p1", (0, 9000, 0)))
    assert (report.is_right, remarks(report), report.memory_sold) == (True, [], 9000)


def test_one_that_has_ended_and_is_named_still_holds() -> None:
    over = with_status(holder("p1", (0, 9000, 0)), THEN, phase="Failed")
    report = look_with(write_orphaned_pods([ghost("p1", 9000)]), over)
    assert (remarks(report), report.memory_sold) == (["lingering"], 9000)


def test_a_card_that_the_node_has_no_more_holds_nothing() -> None:
    assert look_with(write_orphaned_pods([ghost("gone", 9000, index=7)])).memory_sold == 0


def test_an_agents_word_that_cannot_be_read_proves_nothing() -> None:
    report = look_with("{", holder("p1", (0, 9000, 0)))
    assert codes(report) == ["unreadable-node"]
    assert report.memory_sold == 9000, "the cards are known all the same"


def test_a_kubelet_without_our_plugin_is_no_unreadable_node() -> None:
    made = node("n1").cards(2, "Tesla T4", SIZE).manifest()
    made["status"]["allocatable"]["gputile.io/gpu"] = "0"
    report = audit([made], [holder("p1", (0, 9000, 0))], now=NOW)
    assert (report.is_right, report.memory_sold) == (True, 9000)
