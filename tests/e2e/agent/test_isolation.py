"""Each isolation from inside the container: environment, device nodes, mounts."""

import json
import os
import shutil
import stat
from collections.abc import Iterator

import pytest

from tests.e2e.agent.site import ON_A, PATIENCE, Site
from tests.e2e.audit import tiles
from tests.e2e.disks import Disk
from tests.e2e.pods import events_of, real, tile
from tests.e2e.processes import wait_until

ISOLATIONS = ("none", "devices", "cdi", "mps", "preload")
NULL = os.makedev(1, 3)


@pytest.fixture
def equipped(site: Site) -> Iterator[Disk]:
    """node-a has device nodes, a driver's folder, NVIDIA's CDI spec, MPS and a limiting library, for one test."""
    disk = site.a.machine.disk
    nodes = [disk.dev / name for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(8)))]
    for node in nodes:
        os.mknod(node, 0o666 | stat.S_IFCHR, NULL)
    lib = disk.folder / "lib"
    for folder in ("nvidia/lib64", "nvidia-mps/control", "vgpu"):
        (lib / folder).mkdir(parents=True)
    (lib / "nvidia" / "lib64" / "libcuda.so.1").write_text("the driver's")
    (lib / "vgpu" / "libvgpu.so").write_text("")
    (disk.static_cdi / "nvidia.json").write_text(json.dumps(nvidia_spec()))
    yield disk
    for node in nodes:
        node.unlink()
    for folder in ("nvidia", "nvidia-mps", "vgpu"):
        shutil.rmtree(lib / folder)
    (disk.static_cdi / "nvidia.json").unlink()


def nvidia_spec() -> dict[str, object]:
    """A CDI spec as `nvidia-ctk cdi generate` writes it: common edits, and each card by its index."""
    devices = [
        {"name": str(n), "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{n}"}], "env": [f"BY_CDI={n}"]}}
        for n in range(8)
    ]
    mount = {"hostPath": "/var/lib/nvidia/lib64/libcuda.so.1", "containerPath": "/usr/lib/libcuda.so.1"}
    common = {"mounts": [{**mount, "options": ["ro", "bind"]}], "env": ["NVIDIA_VISIBLE_DEVICES=void"]}
    return {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices, "containerEdits": common}


def test_every_isolation_as_seen_inside_the_container(site: Site, space: str, equipped: Disk) -> None:
    limits = {"gputile.io/cores": "30"}
    pods = [tile(mode, 2048, annotations={"gputile.io/isolation": mode}, **ON_A) for mode in ISOLATIONS]
    for manifest in pods:
        manifest["spec"]["containers"][0]["resources"]["limits"] |= limits
    running = site.run(*pods, space=space)
    index = {mode: tiles(running[mode])[0]["index"] for mode in ISOLATIONS}
    own = {mode: {f"nvidia{index[mode]}"} for mode in ISOLATIONS}
    shared = {"nvidiactl", "nvidia-uvm"}
    assert {mode: nodes(site, space, mode) for mode in ISOLATIONS} == {
        "none": set(),
        "devices": own["devices"] | shared,
        "cdi": own["cdi"],
        "mps": set(),
        "preload": set(),
    }
    assert {mode: mounts(site, space, mode) for mode in ISOLATIONS} == {
        "none": set(),
        "devices": {"/var/lib/nvidia"},
        "cdi": {"/usr/lib/libcuda.so.1"},
        "mps": {"/var/lib/nvidia-mps"},
        "preload": {"/var/lib/vgpu/libvgpu.so"},
    }
    env = {mode: site.env(running[mode]) for mode in ISOLATIONS}
    assert env["devices"]["LD_LIBRARY_PATH"] == "/var/lib/nvidia/lib64:/var/lib/nvidia/lib"
    assert env["cdi"]["BY_CDI"] == str(index["cdi"])
    assert env["mps"]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=2048M"
    assert env["mps"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
    assert env["preload"]["LD_PRELOAD"] == "/var/lib/vgpu/libvgpu.so"
    assert env["preload"]["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2048m"
    assert env["preload"]["CUDA_DEVICE_SM_LIMIT"] == "30"
    for mode in ("none", "devices", "mps", "preload"):
        assert env[mode]["NVIDIA_VISIBLE_DEVICES"] == tiles(running[mode])[0]["uuid"]


@pytest.mark.parametrize("mode", ISOLATIONS[1:])
def test_an_isolation_that_the_node_cannot_serve_is_rejected_with_an_event_on_the_pod(
    site: Site, space: str, mode: str
) -> None:
    site.kube.create(real(tile("limited", 2048, annotations={"gputile.io/isolation": mode}, **ON_A)), space)

    def has_event() -> bool:
        return any(f"isolation `{mode}`" in event["message"] for event in events_of(site.kube, space, "limited"))

    wait_until(has_event, PATIENCE, "an event with the reason")
    assert not site.containers(space)


def nodes(site: Site, space: str, pod: str) -> set[str]:
    """The device nodes of GPUs in a container, each a character device."""
    script = "for it in /dev/nvidia*; do test -c $it && echo ${it#/dev/}; done; true"
    return set(site.a.machine.inside(pod, "main", "/bin/sh", "-c", script, namespace=space).split())


def mounts(site: Site, space: str, pod: str) -> set[str]:
    """The mounts of the node's driver and libraries in a container."""
    table = site.a.machine.inside(pod, "main", "/bin/cat", "/proc/self/mountinfo", namespace=space)
    points = {line.split()[4] for line in table.splitlines()}
    return {point for point in points if any(word in point for word in ("nvidia", "libcuda", "vgpu"))} - {
        point for point in points if point.startswith("/dev/")
    }
