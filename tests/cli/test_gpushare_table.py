"""`kubectl inspect gpushare`, byte for byte."""

from typing import Any

from gputile.cli.gpushare_table import table
from gputile.testing.builders import pod


def shared(name: str, address: str, memory: int, count: int) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "status": {
            "allocatable": {"aliyun.com/gpu-mem": str(memory), "aliyun.com/gpu-count": str(count)},
            "addresses": [{"type": "InternalIP", "address": address}],
        },
    }


def holding(memory: int, on: str, index: int | None, name: str = "p") -> dict[str, Any]:
    annotations = {} if index is None else {"ALIYUN_COM_GPU_MEM_IDX": str(index)}
    return pod({"aliyun.com/gpu-mem": memory}, name=name, uid=name, on=on, annotations=annotations)


NODES = [shared("node-b", "10.0.0.12", 23, 1), shared("node-a", "10.0.0.11", 30, 2)]
PODS = [holding(4, "node-a", 0, "web-0"), holding(2, "node-a", 0, "web-1"), holding(3, "node-b", 0, "api")]

PLAIN = """\
NAME    IPADDRESS  GPU0(Allocated/Total)  GPU1(Allocated/Total)  GPU Memory(GiB)
node-a  10.0.0.11  6/15                   0/15                   6/30
node-b  10.0.0.12  3/23                   0/0                    3/23
----------------------------------------------------
Allocated/Total GPU Memory In Cluster:
9/53 (16%)\x20\x20
"""

PENDING = """\
NAME    IPADDRESS  GPU0(Allocated/Total)  GPU1(Allocated/Total)  PENDING(Allocated)  GPU Memory(GiB)
node-a  10.0.0.11  6/15                   0/15                                       6/30
node-b  10.0.0.12  3/23                   0/0                    2                   5/23
-----------------------------------------------------
Allocated/Total GPU Memory In Cluster:
11/53 (20%)\x20\x20
"""


def test_two_nodes() -> None:
    assert table(NODES, PODS) == PLAIN


def test_a_pod_whose_card_nobody_knows_is_pending() -> None:
    assert table(NODES, [*PODS, holding(2, "node-b", None)]) == PENDING


def test_finished_pods_hold_nothing() -> None:
    done = [
        {**holding(9, "node-a", 1, f"done-{phase}"), "status": {"phase": phase}} for phase in ("Succeeded", "Failed")
    ]
    assert table(NODES, [*PODS, *done]) == PLAIN


def test_the_newer_annotation_spreads_a_pod_over_cards() -> None:
    spread = pod(
        {"aliyun.com/gpu-mem": 6},
        on="node-a",
        labels={"aliyun.com/gpu-count": "2"},
        annotations={"scheduler.framework.gpushare.allocation": '{"0":{"0":3,"1":3}}'},
    )
    assert "node-a  10.0.0.11  3/15                   3/15                   6/30\n" in table(NODES, [spread])


def test_many_units_on_a_card_are_read_as_MiB() -> None:  # noqa: N802
    told = table([shared("n", "10.0.0.1", 30218, 2)], [holding(3000, "n", 1)])
    assert "GPU Memory(MiB)" in told
    assert "0/15109" in told
    assert "3000/15109" in told


def test_no_shared_nodes() -> None:
    assert table([], []) == ("NAME  IPADDRESS  GPU Memory()\n\nAllocated/Total GPU Memory In Cluster:\n0/0 (0%)  \n")


def test_a_node_without_address_is_unknown() -> None:
    bare = shared("n", "", 16, 1)
    bare["status"]["addresses"] = []
    assert "n     unknown    0/16" in table([bare], [])
