"""What a container sees of its cards under each isolation."""

import json
import os
from pathlib import Path

import pytest
import yaml

from gputile.agent.host_files import HostFiles
from gputile.agent.isolation import IsolationUnavailable, Json, edits, spec
from gputile.agent.settings import ISOLATIONS, FolderSettings
from gputile.model.grants import ContainerGrant, Tile
from gputile.nvml.driver import DriverGpu, DriverSnapshot
from tests.text.test_documents import LAUGHS

ENV = {"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
HELD = ContainerGrant("main", (Tile("GPU-a", 0, 3072, 30), Tile("GPU-b", 1, 3072, 30)))
NVIDIA = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "containerEdits": {"mounts": [{"hostPath": "/lib/cuda.so", "containerPath": "/lib/cuda.so"}]},
    "devices": [
        {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}},
        {"name": "GPU-b", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia1"}]}},
    ],
}


@pytest.fixture
def host(tmp_path: Path) -> HostFiles:
    """A node with two cards and everything that an isolation may want."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    for folder in ("driver", "mps/control", "cdi"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "limit.so").touch()
    (tmp_path / "cdi" / "nvidia.yaml").write_text(yaml.safe_dump(NVIDIA))
    (tmp_path / "cdi" / "broken.json").write_text("{")
    folders = FolderSettings(
        dev=f"{tmp_path}/dev",
        driver=f"{tmp_path}/driver",
        mps=f"{tmp_path}/mps",
        preload=f"{tmp_path}/limit.so",
        nvidia_cdi=(f"{tmp_path}/cdi",),
    )
    files = HostFiles(folders)
    files.sight = DriverSnapshot(
        gpus=tuple(DriverGpu(index=n, uuid=f"GPU-{u}", model="T4", memory=1, minor=n) for n, u in enumerate("ab"))
    )
    return files


def test_none_is_the_environment_alone(host: HostFiles) -> None:
    assert edits("none", HELD, ENV, host) == {"env": ["NVIDIA_VISIBLE_DEVICES=GPU-a,GPU-b"]}


def test_devices_brings_nodes_and_the_driver(host: HostFiles, tmp_path: Path) -> None:
    found = edits("devices", HELD, ENV, host)
    names = [node["path"].removeprefix(f"{tmp_path}/dev/") for node in found["deviceNodes"]]
    assert names == ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"]
    (mount,) = found["mounts"]
    assert mount == {
        "hostPath": f"{tmp_path}/driver",
        "containerPath": f"{tmp_path}/driver",
        "options": ["ro", "nosuid", "nodev", "bind"],
    }
    assert f"LD_LIBRARY_PATH={tmp_path}/driver/lib64:{tmp_path}/driver/lib" in found["env"]


def test_cdi_takes_over_what_nvidias_spec_says_by_uuid_or_index(host: HostFiles) -> None:
    found = edits("cdi", HELD, ENV, host)
    assert [node["path"] for node in found["deviceNodes"]] == ["/dev/nvidia0", "/dev/nvidia1"]
    assert [mount["hostPath"] for mount in found["mounts"]] == ["/lib/cuda.so"]


def test_mps_limits_memory_by_ordinal_and_threads(host: HostFiles, tmp_path: Path) -> None:
    found = edits("mps", HELD, ENV, host)
    assert found["env"][1:] == [
        f"CUDA_MPS_PIPE_DIRECTORY={tmp_path}/mps",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=3072M,1=3072M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30",
    ]
    assert found["mounts"][0]["hostPath"] == f"{tmp_path}/mps"


def test_preload_brings_the_library_and_its_limits(host: HostFiles, tmp_path: Path) -> None:
    found = edits("preload", HELD, ENV, host)
    assert found["env"][1:] == [
        "CUDA_DEVICE_MEMORY_LIMIT_0=3072m",
        "CUDA_DEVICE_MEMORY_LIMIT_1=3072m",
        "CUDA_DEVICE_SM_LIMIT=30",
        f"LD_PRELOAD={tmp_path}/limit.so",
    ]


def test_cores_that_were_not_asked_for_are_not_limited(host: HostFiles) -> None:
    held = ContainerGrant("main", (Tile("GPU-a", 0, 3072, 0),))
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100" in edits("mps", held, ENV, host)["env"]
    assert not any("SM_LIMIT" in line for line in edits("preload", held, ENV, host)["env"])


def test_the_dialects_own_limit_is_said_once(host: HostFiles) -> None:
    env = {**ENV, "CUDA_DEVICE_MEMORY_LIMIT_0": "1m"}
    lines = edits("preload", HELD, env, host)["env"]
    assert [line for line in lines if line.startswith("CUDA_DEVICE_MEMORY_LIMIT_0=")] == [
        "CUDA_DEVICE_MEMORY_LIMIT_0=3072m"
    ]


@pytest.mark.parametrize(
    ("isolation", "says"),
    [
        ("devices", "no device node of card GPU-a"),
        ("cdi", "no CDI spec of this node names the card GPU-a"),
        ("mps", "control pipe of an MPS daemon"),
        ("preload", "not installed"),
        ("steel", "'steel' is not known; write one of none, devices, cdi, mps, preload"),
    ],
)
def test_what_a_bare_node_cannot_serve_is_refused(tmp_path: Path, isolation: str, says: str) -> None:
    bare = HostFiles(
        FolderSettings(
            dev=str(tmp_path), driver="/none", mps="/none", preload="/none", nvidia_cdi=(str(tmp_path / "none"),)
        )
    )
    with pytest.raises(IsolationUnavailable, match=says):
        edits(isolation, HELD, ENV, bare)


def test_every_isolation_that_can_be_set_is_made(host: HostFiles) -> None:
    assert all(edits(isolation, HELD, ENV, host)["env"] for isolation in ISOLATIONS)


def test_limits_go_by_the_cards_place_on_the_bus_and_count_all_its_tiles(host: HostFiles) -> None:
    tiles = (Tile("GPU-b", 1, 2048, 0), Tile("GPU-a", 0, 1024, 0), Tile("GPU-b", 1, 1024, 0))
    env = edits("preload", ContainerGrant("main", tiles), ENV, host)["env"]
    assert {line for line in env if "MEMORY_LIMIT" in line} == {
        "CUDA_DEVICE_MEMORY_LIMIT_0=1024m",
        "CUDA_DEVICE_MEMORY_LIMIT_1=3072m",
    }


def test_a_tile_without_memory_is_not_limited_to_none(host: HostFiles) -> None:
    env = edits("mps", ContainerGrant("main", (Tile("GPU-a", 0, 0, 30),)), ENV, host)["env"]
    assert not any("MEM_LIMIT" in line for line in env)


@pytest.mark.parametrize(
    ("more", "version"),
    [({}, "0.5.0"), ({"additionalGids": [44]}, "0.7.0"), ({"additionalGids": [44], "netDevices": []}, "1.1.0")],
)
def test_a_spec_says_the_version_that_knows_all_of_it(more: Json, version: str) -> None:
    assert json.loads(spec("aa", {"env": [], **more}))["cdiVersion"] == version


def test_nvidias_specs_are_read_again_only_when_they_change(
    host: HostFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = host.nvidia_edits("GPU-a")
    with monkeypatch.context() as none:
        none.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read again"))
        assert host.nvidia_edits("GPU-a") == before
    (tmp_path / "cdi" / "nvidia.yaml").write_text(yaml.safe_dump({**NVIDIA, "devices": []}))
    assert host.nvidia_edits("GPU-a") == []


def test_files_that_are_no_cdi_spec_cost_nothing_but_themselves(host: HostFiles, tmp_path: Path) -> None:
    """A pipe would wait for ever, and aliases that double fill the memory."""
    os.mkfifo(tmp_path / "cdi" / "a-pipe.yaml")
    (tmp_path / "cdi" / "b-laughs.yaml").write_text(LAUGHS)
    (tmp_path / "cdi" / "c-deep.json").write_text('{"kind": "nvidia.com/gpu", "x": ' + "[" * 100_000)
    (tmp_path / "cdi" / "d-folder.json").mkdir()
    (tmp_path / "cdi" / "e-endless.yaml").symlink_to("/dev/zero")
    assert host.nvidia_edits("GPU-b")
