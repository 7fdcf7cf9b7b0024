"""The usage of a pod, as the agent of its node reports it."""

import pytest

from gputile.dialects.usage_annotation import USE, write_usage
from gputile.model.usage import CardUsage, PodUsage, Usage
from gputile.scheduler.state.usage import used_on
from gputile.testing.builders import node
from tests.scheduler.rig import Rig, tile

MINE: Usage = {"uid-web-0": {"c0": {"GPU-n1-0": CardUsage(3000, 40)}}}


async def placed(*, on: str = "n1", usage: str = "") -> Rig:
    """The pod web-0 is bound to n1, and the agent of `on` reports this."""
    rig = Rig(node("n1").cards(2, size="16Gi"), node("n2").cards(2, size="16Gi"))
    rig.arrive(tile(4096))
    rig.filter(nodes=["n1"])
    assert await rig.bind() == ""
    for renewed in ("1", "2"):
        words = {USE: usage} if usage else None
        rig.api.add_lease(on, words, holderIdentity=on, leaseDurationSeconds=9, renewTime=renewed)
    rig.catch_up()
    return rig


async def test_by_container_and_card() -> None:
    rig = await placed(usage=write_usage(MINE, ["GPU-n1-0"]))
    assert rig.cluster_state.used_by("uid-web-0") == {"c0": {"GPU-n1-0": CardUsage(3000, 40)}}


@pytest.mark.parametrize(
    ("on", "usage"),
    [
        pytest.param("n1", "", id="its-agent-reports-nothing"),
        pytest.param("n1", write_usage({}, ["GPU-n1-0"]), id="its-agent-does-not-report-it"),
        pytest.param("n1", "{not json", id="the-report-is-undecodable"),
        pytest.param("n2", write_usage(MINE, []), id="an-agent-reports-only-pods-of-its-own-node"),
    ],
)
async def test_unknown(on: str, usage: str) -> None:
    assert (await placed(on=on, usage=usage)).cluster_state.used_by("uid-web-0") is None


async def test_a_pod_without_a_node() -> None:
    assert (await placed(usage=write_usage(MINE, []))).cluster_state.used_by("uid-other") is None


async def test_unknown_when_the_agent_is_stale() -> None:
    rig = await placed(usage=write_usage(MINE, []))
    rig.wait(8)
    assert used_on(rig.cluster_state.agents, "n1") is not None
    rig.wait(2)
    assert used_on(rig.cluster_state.agents, "n1") is None
    known: PodUsage | None = rig.cluster_state.used_by("uid-web-0")
    assert known is None
