"""A new dialect is one file and one line of the registry: the eighth walks through scheduler, agent and audit."""

from typing import Any

import pytest

from gputile.agent.cards import CardInventory
from gputile.agent.settings import AgentSettings, checked
from gputile.audit.audit import audit
from gputile.dialects import records, registry
from gputile.kube.api import Json
from gputile.model.cards import Use
from gputile.model.errors import InputError
from gputile.model.grants import Grant
from gputile.model.refusals import SENTENCE, BadRequest, NodeReason, RequestError
from gputile.nvml.fake import FakeDriver, cards
from gputile.telemetry.agent_metrics import AgentMetrics
from gputile.testing.builders import node
from gputile.testing.builders import pod as make_pod
from tests.dialects.eighth import MEMORY, NAME, NODE, RECORD, TENTHS
from tests.dialects.shortcuts import node_of, object_of, read
from tests.scheduler.rig import Rig
from tests.scheduler.test_server import bind_body, serving

OURS = node("n1").cards(2, size=1000)
ITS_OWN: Json = {
    "metadata": {"name": "n1"},
    "status": {"capacity": {TENTHS: 20, MEMORY: 2000}, "allocatable": {"cpu": "64", "memory": "512Gi", TENTHS: 20}},
}
"""A node that the agent of the eighth dialect serves."""


def rig(served_by: Any = OURS, **settings: Any) -> Rig:
    running = Rig(served_by, listen="127.0.0.1:0", **settings)
    running.arrive({TENTHS: 3}, {})
    return running


@pytest.mark.usefixtures("registered_eighth")
class TestRegistered:
    def test_a_pod_is_read(self) -> None:
        request = read(make_pod({TENTHS: 3}, {TENTHS: 20}))
        assert (request.dialect, request.slots) == (NAME, 0)
        assert [(ask.cards, ask.memory_percent, ask.cores) for ask in request.asks] == [(1, 30, 30), (2, 100, 100)]
        refused = registry.read_pod(make_pod({TENTHS: 15}))
        assert isinstance(refused, BadRequest)
        assert refused.code is RequestError.OUT_OF_RANGE

    async def test_a_pod_is_filtered_and_bound_on_the_dialects_own_paths(self) -> None:
        async with serving(rig()) as line:
            assert (await line.post("/tenths/predicates", line.rig.body()))["NodeNames"] == ["n1"]
            assert await line.post("/tenths/bind", bind_body()) == {"Error": ""}
            line.rig.catch_up()
            annotations, grant = line.rig.live()["metadata"]["annotations"], line.rig.written()
        assert (annotations[RECORD], annotations[NODE]) == ('{"c0":{"0":[300,30]}}', "n1")
        assert grant is not None
        assert (grant["dialect"], grant["containers"][0]["tiles"][0]["memory"]) == (NAME, 300)

    async def test_what_a_pod_holds_is_the_same_after_a_restart_and_for_the_audit(self) -> None:
        running = rig()
        assert await running.bind() == ""
        running.catch_up()
        restarted = Rig(OURS, pods=[running.live()])
        for ledger in (running.ledger, restarted.ledger):
            (holder,) = ledger.holders("n1")
            assert holder.uses == {"GPU-n1-0": Use(300, 30, 0)}
        report = audit([OURS.manifest()], [running.live()])
        assert report.is_right
        ((held,),) = report.holders.values()
        assert (held.memory, held.cores, held.slots, held.by) == (300, 30, 0, "gputile")

    def test_a_record_of_its_own_system_counts_under_its_own_agent(self) -> None:
        annotations = {RECORD: '{"c0":{"1":[400,40]}}', NODE: "n1"}
        running = make_pod({TENTHS: 4}, annotations=annotations, on="n1")
        grant = records.read_grant(object_of(running), node_of(ITS_OWN))
        assert isinstance(grant, Grant)
        assert grant.uses() == {"n1#1": Use(400, 40, 0)}
        assert records.requested_gpus(object_of(make_pod({TENTHS: 25}))) == 3

    def test_the_audit_reads_that_record_with_the_reader_of_its_own(self) -> None:
        running = make_pod({TENTHS: 4}, annotations={RECORD: '{"c0":{"1":[400,40]}}', NODE: "n1"}, on="n1")
        old = OURS.manifest()  # without `since`: pods of the system before still run
        ((held,),) = audit([old], [running]).holders.values()
        assert (held.memory, held.cores, held.slots, held.by) == (400, 40, 0, NAME)

    def test_its_own_agent_guesses_so_its_nodes_are_refused_if_the_operator_wants_that(self) -> None:
        assert rig(ITS_OWN).filter().names == ["n1"]
        refusing = rig(ITS_OWN, other_agents="refuse").filter()
        assert {**refusing.failed, **refusing.unresolvable} == {"n1": SENTENCE[NodeReason.OTHER_AGENT]}

    async def test_while_one_pod_starts_under_its_own_agent_the_next_waits(self) -> None:
        running = rig(ITS_OWN)
        assert await running.bind() == ""
        running.catch_up()
        running.arrive({TENTHS: 3}, name="web-1")
        assert running.filter("web-1").unresolvable == {"n1": SENTENCE[NodeReason.AGENT_BUSY]}

    def test_our_agent_serves_its_devices_and_sums(self) -> None:
        settings = checked(AgentSettings(node="n1", serve=("gputile", NAME)))
        inventory = CardInventory(settings, AgentMetrics())
        inventory.seen(FakeDriver(cards(2, memory=1000)).snapshot(), now=0.0)
        served = {resource.resource: len(resource.devices) for resource in inventory.device_resources()}
        assert served == {"gputile.io/gpu": 20, TENTHS: 20}
        assert registry.status_resources((NAME,), inventory.current(), settings.dialects) == {MEMORY: 2000}


def test_without_its_line_in_the_registry_the_dialect_is_unknown() -> None:
    assert registry.read_pod(make_pod({TENTHS: 3})) is None
    assert "/tenths/bind" not in registry.extender_paths()
    with pytest.raises(InputError, match="unknown dialect tenths"):
        checked(AgentSettings(node="n1", serve=(NAME,)))
