"""What an agent may do in the cluster, with a token bound to its node."""

from collections.abc import Callable

import pytest

from tests.e2e import agents
from tests.e2e.agent.site import Site
from tests.e2e.api import ApiError
from tests.e2e.pods import tile


def test_an_agent_may_write_to_no_other_node_and_to_no_pod(site: Site, space: str) -> None:
    site.run(tile("p", 2048), space=space)
    bound = {"apiVersion": "v1", "kind": "Node", "name": "node-a"}
    token = site.kube.token_for(agents.ACCOUNT, agents.NAMESPACE, 3600, bound)
    note = {"metadata": {"annotations": {"gputile.io/test": "1"}}}
    sums = {"status": {"capacity": {"gputile.io/memory": "1"}}}
    holder = {"spec": {"holderIdentity": "me"}}
    with site.kube.as_token(token) as agent:
        lease = site.kube.get("Lease", "node-b", "gputile-agents")
        forbidden: dict[str, Callable[[], object]] = {
            "the inventory of another node": lambda: agent.patch("Node", "node-b", note),
            "the extended resources of another node": lambda: agent.patch("Node", "node-b", sums, subresource="status"),
            "the heartbeat of another node": lambda: agent.request(
                "PUT", "/apis/coordination.k8s.io/v1/namespaces/gputile-agents/leases/node-b", {**lease, **holder}
            ),
            "a pod": lambda: agent.patch("Pod", "p", note, space),
            "the status of a pod": lambda: agent.patch("Pod", "p", note, space, "status"),
            "the deletion of a pod": lambda: agent.delete("Pod", "p", space),
            "secrets": lambda: agent.list("Secret", "kube-system"),
            "another owner's label of its own node": lambda: agent.patch(
                "Node", "node-a", {"metadata": {"labels": {"a/b": "c"}}}
            ),
            "a removed label": lambda: agent.patch(
                "Node", "node-a", {"metadata": {"labels": {"kubernetes.io/hostname": None}}}
            ),
            "its own node's owner references": lambda: agent.patch(
                "Node",
                "node-a",
                {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "y"}]}},
            ),
            "the Ready condition of its own node": lambda: agent.patch(
                "Node",
                "node-a",
                {"status": {"conditions": [{"type": "Ready", "status": "False"}]}},
                subresource="status",
                how="strategic",
            ),
            "its own node's CPU": lambda: agent.patch(
                "Node", "node-a", {"status": {"allocatable": {"cpu": "1"}}}, subresource="status"
            ),
            "taints of its own node": lambda: agent.patch("Node", "node-a", {"spec": {"unschedulable": True}}),
        }
        for what, attempt in forbidden.items():
            with pytest.raises(ApiError) as refused:
                attempt()
            assert refused.value.status in (403, 422), what
        agent.patch("Node", "node-a", note)
        agent.patch("Node", "node-a", {"metadata": {"annotations": {"gputile.io/test": None}}})
