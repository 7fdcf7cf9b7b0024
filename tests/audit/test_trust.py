"""Which record counts: our grant, the record of the family that serves the node, other records, the request; and the
findings where none of them does."""

from typing import Any

import pytest

from tests.audit.nodes import (
    JUST_NOW,
    SIZE,
    THEN,
    Json,
    codes,
    elastic,
    gpushare,
    hami,
    held,
    look,
    node,
    ours,
    pod,
    remarks,
    stock,
    unplaced,
    vcuda,
    vgpu,
)
from tests.audit.test_records import BARE, INDEX, MEM, ONE, OUR_TILE, TILE, TOTAL, grant, hami_record, vgpu_record

SINCE = "2027-01-15T07:30:00Z"  # half an hour after the pods of these tests started
BOTH = vgpu_record("c0[0_g0_20_7000]") | hami_record("g1,NVIDIA,6000,10:;")


# ---- order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node_manifest", "manifest", "expected"),
    [
        pytest.param(
            hami("g0", "g1"), pod({}, notes=BOTH), {"g1": (6000, 10)}, id="the family of the node's agent first"
        ),
        pytest.param(vgpu("g0", "g1"), pod({}, notes=BOTH), {"g0": (7000, 20)}, id="whichever family that is"),
        pytest.param(
            hami("g0", "g1"),
            pod({}, notes=vgpu_record("c0[0_g0_20_7000]")),
            {"g0": (7000, 20)},
            id="another family's record where the agent's own is missing",
        ),
        pytest.param(
            hami("g0", "g1"),
            pod({}, notes=BOTH | hami_record("g1,NVIDIA,6000,10:;", on="m")),
            {"g0": (7000, 20)},
            id="another family's record where the agent's own is copied",
        ),
        pytest.param(
            hami("g0", "g1"),
            pod(TILE, notes=grant(("g0", 6000, 10), pod="uid-other") | hami_record("g1,NVIDIA,6000,10:;")),
            {"g1": (6000, 10)},
            id="a record where our grant is a copy",
        ),
    ],
)
def test_which_record_counts(node_manifest: Json, manifest: Json, expected: dict[str, Any]) -> None:
    report = look(node_manifest, manifest)
    assert (held(report), unplaced(report)) == (expected, [])


@pytest.mark.parametrize(
    ("node_manifest", "manifest", "counted"),
    [
        pytest.param(hami("g0", "g1"), pod(TILE, notes=hami_record(ONE, on="m")), (0, 1, 6000), id="of another node"),
        pytest.param(hami("x0"), pod(TILE, notes=hami_record(ONE)), (0, 1, 6000), id="of a GPU that the node lacks"),
        pytest.param(
            hami("g0"), pod(TILE, notes=hami_record("g0,NVIDIA,16001,10:;")), (0, 1, 6000), id="of more than a GPU has"
        ),
        pytest.param(
            hami("g0"), pod(TILE, notes=hami_record("g0,NVIDIA,60,101:;")), (0, 1, 6000), id="of more cores than it has"
        ),
        pytest.param(hami("g0"), pod(TILE, notes=hami_record("g0,NVIDIA,x,1:;")), (0, 1, 6000), id="with no number"),
        pytest.param(hami("g0"), pod(TILE, notes=hami_record(";")), (0, 1, 6000), id="that names no GPU"),
        pytest.param(
            vgpu("v0"),
            pod({"nvidia.com/vgpu-number": 1}, notes=vgpu_record("c0[0_v0_1_1]", on="m")),
            (1, 0, 0),
            id="vgpu-manager's of another node",
        ),
        pytest.param(
            vcuda(),
            pod({"tencent.com/vcuda-core": 200}, notes={"tencent.com/predicate-gpu-idx-0": "0,7"}),
            (2, 0, 0),
            id="vcuda's of an index that the node lacks",
        ),
        pytest.param(
            vcuda(),
            pod(
                {"tencent.com/vcuda-core": 100},
                notes={"tencent.com/predicate-gpu-idx-0": "0", "tencent.com/predicate-node": "m"},
            ),
            (1, 0, 0),
            id="vcuda's of another node",
        ),
        pytest.param(
            gpushare(15),
            pod({MEM: 5}, notes={INDEX: "2", TOTAL: "5"}),
            (0, 1, 5120),
            id="gpushare's of an index too far",
        ),
        pytest.param(
            gpushare(15), pod({MEM: 5}, notes={INDEX: "0", TOTAL: "16"}), (0, 1, 5120), id="gpushare's of too much"
        ),
        pytest.param(
            elastic(),
            pod({"elasticgpu.io/gpu-core": 100}, notes={"elasticgpu.io/container-c0": "0"}),
            (1, 0, 0),
            id="elastic-gpu's without the mark",
        ),
        pytest.param(
            elastic(),
            pod(
                {"elasticgpu.io/gpu-core": 100},
                notes={"elasticgpu.io/assumed": "true", "elasticgpu.io/container-c0": "zero"},
            ),
            (1, 0, 0),
            id="elastic-gpu's that is no index",
        ),
    ],
)
def test_an_invalid_record_leaves_the_request_counted_by_number(
    node_manifest: Json, manifest: Json, counted: tuple[int, int, int]
) -> None:
    report = look(node_manifest, manifest)
    assert (held(report), unplaced(report)) == ({}, [counted])
    assert codes(report) == ["no-grant"]
    assert "counts by number" in report.findings[0].what


# ---- the larger of record and request -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("manifest", "expected", "rest"),
    [
        pytest.param(
            pod({**TILE, "nvidia.com/gpu": 3}, notes=hami_record(ONE)),
            {"g0": (6000, 10)},
            [(0, 2, 12000)],
            id="a record of fewer GPUs: the rest counts by number",
        ),
        pytest.param(
            pod({"nvidia.com/gpu": 2}, notes=hami_record("g0,NVIDIA,100,0:;")),
            {"g0": (SIZE, 100)},
            [(1, 0, 0)],
            id="of whole GPUs, too",
        ),
        pytest.param(
            pod(TILE, TILE, notes=hami_record("g0,NVIDIA,6000,10:;;")),
            {"g0": (6000, 10)},
            [(0, 1, 6000)],
            id="a container that the record leaves out",
        ),
        pytest.param(
            pod(TILE, notes=hami_record("g0,NVIDIA,7000,10:g1,NVIDIA,50,5:;")),
            {"g0": (7000, 10), "g1": (6000, 10)},
            [],
            id="a record of more GPUs counts with all of them",
        ),
        pytest.param(
            pod({**BARE, "nvidia.com/gpumem-percentage": 150}, notes=hami_record("g0,NVIDIA,10,1:;")),
            {"g0": (10, 1)},
            [],
            id="a request that cannot be read is not compared",
        ),
        pytest.param(
            pod({"nvidia.com/gpu": 2, "nvidia.com/gpumem-percentage": 150}),
            {},
            [(2, 0, 0)],
            id="neither can be read: as many GPUs as it requests",
        ),
    ],
)
def test_under_another_agent_the_larger_counts(manifest: Json, expected: dict[str, Any], rest: list[Any]) -> None:
    report = look(hami("g0", "g1", "g2", "g3"), manifest)
    assert (held(report), unplaced(report)) == (expected, rest)


# ---- our own agent --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("since", "started", "counts"),
    [
        pytest.param(SINCE, THEN, True, id="it started before our agent served the node"),
        pytest.param(THEN, SINCE, False, id="it started later: only a grant would count"),
        pytest.param(THEN, THEN, False, id="at the same moment is not before"),
        pytest.param(SINCE, None, False, id="it has not started"),
        pytest.param(None, SINCE, True, id="the age of our agent is unknown"),
        pytest.param(None, None, True, id="neither time is known"),
        pytest.param("yesterday", SINCE, True, id="the time of our agent is invalid"),
        pytest.param("2027-01-15T09:30:00+02:00", "2027-01-15T07:29:59Z", True, id="in another time zone"),
    ],
)
def test_under_our_agent_a_record_counts_of_pods_that_were_there_before(
    since: str | None, started: str | None, counts: bool
) -> None:
    report = look(ours("g0", since=since), pod(TILE, notes=hami_record(ONE), started=started))
    assert held(report) == ({"g0": (6000, 10)} if counts else {})
    assert unplaced(report) == []
    assert codes(report) == ([] if counts else ["no-grant"])


def test_under_our_agent_the_request_is_not_compared_with_an_old_record() -> None:
    report = look(ours("g0", since=SINCE), pod(TILE, notes=hami_record("g0,NVIDIA,2000,5:;")))
    assert (held(report), unplaced(report)) == ({"g0": (2000, 5)}, [])


@pytest.mark.parametrize(
    ("since", "counted"),
    [
        pytest.param(THEN, [], id="it holds nothing: our agent allocates nothing without a grant"),
        pytest.param(None, [], id="nor where the age of our agent is unknown"),
        pytest.param(SINCE, [(0, 1, 6000)], id="it started before our agent, and counts by number"),
    ],
)
def test_under_our_agent_a_pod_without_a_grant_is_a_finding(since: str | None, counted: list[Any]) -> None:
    report = look(ours("g0", since=since), pod(OUR_TILE))
    assert (held(report), unplaced(report), codes(report)) == ({}, counted, ["no-grant"])


# ---- GPUs by number -------------------------------------------------------------------------------------------------


def test_pods_of_the_nvidia_plugin_count_by_number_without_a_finding() -> None:
    report = look(stock(4), pod({"nvidia.com/gpu": 3}, name="a"), pod({"nvidia.com/gpu": 1}, name="b"))
    assert (held(report), unplaced(report)) == ({}, [(3, 0, 0), (1, 0, 0)])
    assert (codes(report), remarks(report)) == ([], ["by-number"])
    assert (report.pods, report.memory_allocated) == (2, 4 * SIZE)


@pytest.mark.parametrize(
    ("node_manifest", "pods", "findings"),
    [
        pytest.param(stock(2), [pod({"nvidia.com/gpu": 3})], ["node-overcommitted"], id="more whole GPUs than it has"),
        pytest.param(
            hami("g0", "g1"),
            [pod(TILE, notes=hami_record(ONE), name="a"), pod({"nvidia.com/gpu": 2}, name="b", bound=JUST_NOW)],
            ["node-overcommitted"],
            id="a GPU with a holder is no whole GPU",
        ),
        pytest.param(
            hami("g0", "g1"),
            [pod(TILE, notes=hami_record(ONE), name="a"), pod({"nvidia.com/gpu": 1}, name="b", bound=JUST_NOW)],
            [],
            id="the other one is",
        ),
        pytest.param(
            hami("g0"),
            [pod(TILE, name=f"p{n}", bound=JUST_NOW) for n in range(3)],
            ["node-overcommitted"],
            id="shares with more memory than all GPUs have",
        ),
        pytest.param(hami("g0"), [pod(TILE, name=f"p{n}", bound=JUST_NOW) for n in range(2)], [], id="shares that fit"),
        pytest.param(
            stock(2, replicas=4), [pod({"nvidia.com/gpu": 8})], [], id="replicas of the NVIDIA plugin are slots"
        ),
        pytest.param(
            stock(2, replicas=4),
            [pod({"nvidia.com/gpu": 9})],
            ["node-overcommitted"],
            id="more replicas than the node has",
        ),
        pytest.param(
            node("n", {}),
            [pod({"nvidia.com/gpu": 1}, bound=JUST_NOW)],
            ["node-overcommitted"],
            id="a node without GPUs",
        ),
    ],
)
def test_numbers_against_the_node(node_manifest: Json, pods: list[Json], findings: list[str]) -> None:
    assert codes(look(node_manifest, *pods)) == findings


# ---- pods that are not counted --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node_manifest", "manifest", "findings", "remarked"),
    [
        pytest.param(
            hami("g0"),
            pod({"hami.io/gpu": 1}),
            ["not-counted"],
            [],
            id="a resource with gpu in its name, near our GPUs",
        ),
        pytest.param(node("n", {}), pod({"amd.com/gpu": 1}), [], ["not-counted"], id="GPUs of another vendor"),
        pytest.param(stock(1), pod({"nvidia.com/mig-1g.5gb": 1}), [], ["not-counted"], id="MIG devices, kept apart"),
        pytest.param(hami("x0"), pod({"cpu": 1}, notes=hami_record(ONE)), ["not-counted"], [], id="an invalid record"),
        pytest.param(
            elastic(),
            pod({"cpu": 1}, notes={"elasticgpu.io/assumed": "true", "elasticgpu.io/container-c0": "0"}),
            ["not-counted"],
            [],
            id="a record without amounts, and no request",
        ),
        pytest.param(
            ours("g0"),
            pod(OUR_TILE, notes=grant(containers=[])),
            ["not-counted"],
            ["not-as-requested"],
            id="a grant of nothing",
        ),
        pytest.param(hami("g0"), pod({"cpu": 1}), [], [], id="a pod that has nothing to do with GPUs"),
        pytest.param(hami("g0"), pod({"nvidia.com/gpu": 0}), [], [], id="a request for 0 GPUs"),
    ],
)
def test_every_pod_that_is_not_counted_is_listed(
    node_manifest: Json, manifest: Json, findings: list[str], remarked: list[str]
) -> None:
    report = look(node_manifest, manifest)
    assert (held(report), codes(report), remarks(report)) == ({}, findings, remarked)


INVALID_RECORDS = [
    (hami("x0"), pod(TILE, notes=hami_record(ONE))),
    (hami("x0"), pod({"cpu": 1}, notes=hami_record(ONE))),
    (ours("g0"), pod(OUR_TILE)),
    (ours("g0"), pod(OUR_TILE, notes={"gputile.io/grant": "{"})),
    (ours("g0"), pod(OUR_TILE, notes=grant(("g0", 6000, 0), pod="uid-other"))),
    (ours("g0"), pod(OUR_TILE, notes=grant(("gone", 6000, 0)))),
    (ours("g0"), pod({**OUR_TILE, "name": "x"}, notes=grant(("g0", 6000, 0)))),
    (hami("g0"), pod({"hami.io/gpu": 1})),
    (stock(1), pod({"nvidia.com/gpu": 3})),
]


@pytest.mark.parametrize(("node_manifest", "manifest"), INVALID_RECORDS)
def test_an_invalid_record_is_no_reason_to_delete_a_pod(node_manifest: Json, manifest: Json) -> None:
    report = look(node_manifest, manifest)
    assert report.findings
    for finding in report.findings:
        assert finding.todo
        assert "delete" not in finding.todo


def test_an_invalid_record_beside_a_valid_one_is_a_remark() -> None:
    report = look(hami("g0", "g1"), pod({}, notes=BOTH | hami_record("g1,NVIDIA,6000,10:;", on="m")))
    assert (codes(report), remarks(report)) == ([], ["invalid-record"])
    assert "it was written for node m" in report.remarks[0].what


def test_deliberate_overcommitment_shows_by_how_much() -> None:
    pods = [
        pod({**TILE, "nvidia.com/gpumem": 9000}, notes=hami_record("g0,NVIDIA,9000,10:;"), name=f"p{n}") for n in (1, 2)
    ]
    report = look(hami("g0"), *pods)
    assert codes(report) == ["double-allocated"]
    assert "18000 of 16000 MiB" in report.findings[0].what
    assert "overcommits on purpose" in report.findings[0].todo
