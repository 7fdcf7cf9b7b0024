"""/metrics over HTTP: which clients see names of pods, and which replica shows the cluster."""

from pathlib import Path
from typing import Any

import pytest

from gputile.scheduler.settings import MetricsSettings
from gputile.telemetry.exposition import PAGE_TYPE
from tests.kube.certificates import Authority
from tests.scheduler.test_server import client, rig, serving, written


@pytest.mark.parametrize(
    ("certified", "pods_to", "shown"),
    [
        pytest.param(True, "certified", True, id="a-client-with-a-certificate-sees-pods"),
        pytest.param(False, "certified", False, id="a-client-without-one-does-not"),
        pytest.param(False, "anyone", True, id="unless-the-setting-is-anyone"),
    ],
)
async def test_which_clients_see_names_of_pods(tmp_path: Path, certified: bool, pods_to: Any, shown: bool) -> None:
    authority = Authority()
    r = rig(tls=written(tmp_path, authority), metrics=MetricsSettings(pods_to=pods_to))
    r.filter()
    assert await r.bind() == ""
    async with serving(r, client(authority, signed_by=authority if certified else None)) as line:
        line.scheme = "https"
        _, text = await line.get("/metrics")
    assert ('pod="web-0"' in text) is shown
    assert 'gputile_node_pods{node="n1"} 1\n' in text


async def test_without_tls_every_client_does() -> None:
    r = rig()
    r.filter()
    assert await r.bind() == ""
    async with serving(r) as line:
        assert 'pod="web-0"' in (await line.get("/metrics"))[1]


async def test_only_the_leader_shows_the_cluster_so_that_sums_do_not_count_it_twice() -> None:
    r = rig()
    async with serving(r) as line:
        assert "gputile_node_memory_bytes" in (await line.get("/metrics"))[1]
        r.leading = False
        status, text = await line.get("/metrics")
        assert status == 200
        assert "gputile_node_memory_bytes" not in text
        assert "gputile_verbs_total" in text


def test_the_content_type_is_that_of_prometheus() -> None:
    assert PAGE_TYPE.startswith("text/plain; version=0.0.4")
