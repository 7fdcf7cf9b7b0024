"""Every container sees exactly its card: in every dialect, with many pods at once, and every kind of container."""

import random
import re
from typing import Any

from tests.e2e.agent.site import PATIENCE, SHOW_ENV, Site
from tests.e2e.api import Manifest
from tests.e2e.audit import audit, tiles
from tests.e2e.pods import container, pod, real, tile
from tests.e2e.processes import wait_until

# --- every dialect

DIALECTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {  # limits; env besides the card
    "gputile": ({"gputile.io/gpu": 1, "gputile.io/memory": 3072, "gputile.io/cores": 30}, {"GPUTILE_CORES": "30"}),
    "gpushare": ({"aliyun.com/gpu-mem": 3}, {"ALIYUN_COM_GPU_MEM_CONTAINER": "3"}),
    "nano": ({"nano-gpu.io/gpu-core": 20, "nano-gpu.io/gpu-memory": 4}, {}),
    "nano-percent": ({"nano-gpu/gpu-percent": 20}, {}),
    "elastic": ({"elasticgpu.io/gpu-core": 20, "elasticgpu.io/gpu-memory": 4096}, {}),
    "vcuda": ({"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 12}, {}),
    "vcuda-fork": ({"nvidia.com/vcuda-core": 30, "nvidia.com/vcuda-memory": 3072}, {}),
    "nvidia": ({"nvidia.com/gpu": 1}, {}),
    "hami": ({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}, {"CUDA_DEVICE_MEMORY_LIMIT_0": "3000m"}),
    "vgpu": ({"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 2048}, {"CUDA_MEM_LIMIT_0": "2048m"}),
}
BY_INDEX = {"gpushare": "ALIYUN_COM_GPU_MEM_IDX"}  # dialects whose containers get the card's index too
HOMES = {"hami": "node-b", "vgpu": "node-b", "nvidia": "node-a"}  # both nodes serve `nvidia.com/gpu`


def test_a_pod_of_every_dialect_prints_its_own_card(site: Site, space: str) -> None:
    homes = {name: {"kubernetes.io/hostname": home} for name, home in HOMES.items()}
    pods = [pod(name, limits, nodeSelector=homes.get(name, {})) for name, (limits, _) in DIALECTS.items()]
    running = site.run(*pods, space=space)
    site.assert_own_cards(space)
    for name, (_, env) in DIALECTS.items():
        printed = site.env(running[name])
        assert {key: printed.get(key) for key in env} == env, name
    for name, variable in BY_INDEX.items():
        assert site.env(running[name])[variable] == str(tiles(running[name])[0]["index"])
    held = {key[1:3]: {re.split("::|-_-", it)[0] for it in ids} for key, ids in site.devices(space).items()}
    assert held == {(name, "main"): {it["uuid"] for it in tiles(running[name])} for name in DIALECTS}
    audit(site.kube)


# --- many pods at once


def test_forty_equal_pods_at_once_each_hold_their_own_card(site: Site, space: str) -> None:
    site.run(*(tile(f"p{n}", 4096) for n in range(40)), space=space)
    site.assert_own_cards(space)
    audit(site.kube)


def test_forty_mixed_pods_at_once_each_hold_their_own_cards(site: Site, space: str) -> None:
    dice = random.Random(7)
    running = site.run(*(_mixed(n, dice.choice([1024, 2048, 4096])) for n in range(40)), space=space)
    site.assert_own_cards(space)
    audit(site.kube)
    models = {name: {_model(it["uuid"]) for it in tiles(pod)} for name, pod in running.items()}
    assert all(models[f"p{n}"] == {"A100"} for n in range(0, 40, 4))
    assert all(models[f"p{n}"] == {"T4"} for n in range(1, 40, 4))


def _mixed(number: int, memory: int) -> Manifest:
    """Pods with one or two containers, one or two cards, and either of two models."""
    name = f"p{number}"
    match number % 4:
        case 0:
            return tile(name, memory, annotations={"gputile.io/model": "A100"})
        case 1:
            return tile(name, memory, annotations={"gputile.io/model": "T4"})
        case 2:
            return tile(name, memory, cards=2)
    manifest = tile(name, memory)
    manifest["spec"]["containers"].append(container("second", {"gputile.io/gpu": 1, "gputile.io/memory": memory}))
    return manifest


def _model(uuid: str) -> str:
    """The first four cards of a machine are A100s."""
    return "A100" if int(uuid.rpartition("-")[2]) < 4 else "T4"


# --- kinds of containers


def test_init_containers_and_sidecars_see_their_cards_too(site: Site, space: str) -> None:
    limits = {"gputile.io/gpu": 1, "gputile.io/memory": 2048}
    first = container("first", limits)
    sidecar = container("beside", limits, restartPolicy="Always")
    running = site.run(pod("p", limits, initContainers=[first, sidecar]), space=space)
    assert {it["container"] for it in tiles(running["p"])} == {"first", "beside", "main"}
    site.assert_own_cards(space)


def test_a_pod_that_requests_all_cards_by_env_still_sees_only_its_own(site: Site, space: str) -> None:
    manifest = tile("greedy", 2048)
    manifest["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    site.run(manifest, space=space)
    site.assert_own_cards(space)


def test_a_restarted_container_sees_the_same_card(site: Site, space: str) -> None:
    manifest = tile("again", 2048)
    manifest["spec"]["containers"][0]["command"] = ["/bin/sh", "-c", "env; sleep 2; exit 1"]
    site.kube.create(real(manifest), space)

    def restarted() -> bool:
        statuses = site.kube.get("Pod", "again", space)["status"].get("containerStatuses") or [{}]
        return bool(statuses[0].get("restartCount", 0) >= 1 and "running" in statuses[0]["state"])

    wait_until(restarted, PATIENCE, "the container restarted and runs")
    site.assert_own_cards(space)


def test_a_pod_bound_by_another_scheduler_is_granted_and_starts(site: Site, space: str) -> None:
    before = site.gputile.count("gputile_adopted_pods_total")
    site.kube.create(real(tile("bypassing", 2048), node="node-a", script=SHOW_ENV), space)
    wait_until(lambda: site.running(space), PATIENCE, "the pod runs")
    site.assert_own_cards(space)
    assert site.gputile.count("gputile_adopted_pods_total") == before + 1
