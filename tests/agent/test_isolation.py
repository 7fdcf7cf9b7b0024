"""What a container sees of its cards under each isolation."""

import json
import os
from pathlib import Path

import pytest
import yaml

from gputile.agent import host_files
from gputile.agent.host_files import HostFiles
from gputile.agent.isolation import IsolationUnavailable, Json, edits, spec
from gputile.agent.settings import ISOLATIONS, FolderSettings
from gputile.model.grants import ContainerGrant, Tile
from gputile.nvml.driver import DriverGpu, DriverSnapshot
from tests.text.test_documents import LAUGHS

ENV = {"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
GRANT = ContainerGrant("main", (Tile("GPU-a", 0, 3072, 30), Tile("GPU-b", 1, 3072, 30)))
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
    """A node with two GPUs and the files of all isolations."""
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
    files.snapshot = DriverSnapshot(
        gpus=tuple(DriverGpu(index=n, uuid=f"GPU-{u}", model="T4", memory=1, minor=n) for n, u in enumerate("ab"))
    )
    return files


def test_none_sets_only_the_environment(host: HostFiles) -> None:
    assert edits("none", GRANT, ENV, host) == {"env": ["NVIDIA_VISIBLE_DEVICES=GPU-a,GPU-b"]}


def test_devices_adds_device_nodes_and_the_driver(host: HostFiles, tmp_path: Path) -> None:
    result = edits("devices", GRANT, ENV, host)
    names = [node["path"].removeprefix(f"{tmp_path}/dev/") for node in result["deviceNodes"]]
    assert names == ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"]
    (mount,) = result["mounts"]
    assert mount == {
        "hostPath": f"{tmp_path}/driver",
        "containerPath": f"{tmp_path}/driver",
        "options": ["ro", "nosuid", "nodev", "bind"],
    }
    assert f"LD_LIBRARY_PATH={tmp_path}/driver/lib64:{tmp_path}/driver/lib" in result["env"]


def test_cdi_copies_nvidias_spec_by_uuid_or_index(host: HostFiles) -> None:
    result = edits("cdi", GRANT, ENV, host)
    assert [node["path"] for node in result["deviceNodes"]] == ["/dev/nvidia0", "/dev/nvidia1"]
    assert [mount["hostPath"] for mount in result["mounts"]] == ["/lib/cuda.so"]


def test_mps_limits_memory_by_ordinal_and_threads(host: HostFiles, tmp_path: Path) -> None:
    result = edits("mps", GRANT, ENV, host)
    assert result["env"][1:] == [
        f"CUDA_MPS_PIPE_DIRECTORY={tmp_path}/mps",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=3072M,1=3072M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30",
    ]
    assert result["mounts"][0]["hostPath"] == f"{tmp_path}/mps"


def test_preload_adds_the_library_and_its_limits(host: HostFiles, tmp_path: Path) -> None:
    result = edits("preload", GRANT, ENV, host)
    assert result["env"][1:] == [
        "CUDA_DEVICE_MEMORY_LIMIT_0=3072m",
        "CUDA_DEVICE_MEMORY_LIMIT_1=3072m",
        "CUDA_DEVICE_SM_LIMIT=30",
        f"LD_PRELOAD={tmp_path}/limit.so",
    ]


def test_cores_that_are_not_requested_are_not_limited(host: HostFiles) -> None:
    grant = ContainerGrant("main", (Tile("GPU-a", 0, 3072, 0),))
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100" in edits("mps", grant, ENV, host)["env"]
    assert not any("SM_LIMIT" in line for line in edits("preload", grant, ENV, host)["env"])


def test_the_limit_of_the_dialect_is_replaced(host: HostFiles) -> None:
    env = {**ENV, "CUDA_DEVICE_MEMORY_LIMIT_0": "1m"}
    lines = edits("preload", GRANT, env, host)["env"]
    assert [line for line in lines if line.startswith("CUDA_DEVICE_MEMORY_LIMIT_0=")] == [
        "CUDA_DEVICE_MEMORY_LIMIT_0=3072m"
    ]


@pytest.mark.parametrize(
    ("isolation", "message"),
    [
        ("devices", "no device node of GPU GPU-a"),
        ("cdi", "no CDI spec of this node has the GPU GPU-a"),
        ("mps", "control pipe of an MPS daemon"),
        ("preload", "does not have the limiting library"),
        ("steel", "unknown isolation 'steel'; use one of none, devices, cdi, mps, preload"),
    ],
)
def test_an_isolation_without_its_files_is_rejected(tmp_path: Path, isolation: str, message: str) -> None:
    bare = HostFiles(
        FolderSettings(
            dev=str(tmp_path), driver="/none", mps="/none", preload="/none", nvidia_cdi=(str(tmp_path / "none"),)
        )
    )
    with pytest.raises(IsolationUnavailable, match=message):
        edits(isolation, GRANT, ENV, bare)


def test_every_isolation_of_the_settings_is_implemented(host: HostFiles) -> None:
    assert all(edits(isolation, GRANT, ENV, host)["env"] for isolation in ISOLATIONS)


def test_limits_are_by_bus_order_and_add_up_the_tiles_of_a_gpu(host: HostFiles) -> None:
    tiles = (Tile("GPU-b", 1, 2048, 0), Tile("GPU-a", 0, 1024, 0), Tile("GPU-b", 1, 1024, 0))
    env = edits("preload", ContainerGrant("main", tiles), ENV, host)["env"]
    assert {line for line in env if "MEMORY_LIMIT" in line} == {
        "CUDA_DEVICE_MEMORY_LIMIT_0=1024m",
        "CUDA_DEVICE_MEMORY_LIMIT_1=3072m",
    }


def test_a_tile_without_memory_has_no_memory_limit(host: HostFiles) -> None:
    env = edits("mps", ContainerGrant("main", (Tile("GPU-a", 0, 0, 30),)), ENV, host)["env"]
    assert not any("MEM_LIMIT" in line for line in env)


@pytest.mark.parametrize(
    ("more", "version"),
    [({}, "0.5.0"), ({"additionalGids": [44]}, "0.7.0"), ({"additionalGids": [44], "netDevices": []}, "1.1.0")],
)
def test_a_spec_has_the_oldest_version_with_all_its_fields(more: Json, version: str) -> None:
    assert json.loads(spec("aa", {"env": [], **more}))["cdiVersion"] == version


def test_nvidias_specs_are_cached_until_they_change(
    host: HostFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = host.nvidia_edits("GPU-a")
    with monkeypatch.context() as patch:
        patch.setattr(host_files, "_read", lambda path: pytest.fail(f"{path} was read again"))
        assert host.nvidia_edits("GPU-a") == before
    (tmp_path / "cdi" / "nvidia.yaml").write_text(yaml.safe_dump({**NVIDIA, "devices": []}))
    assert host.nvidia_edits("GPU-a") == []


def test_files_that_are_no_cdi_spec_are_skipped(host: HostFiles, tmp_path: Path) -> None:
    """Reading a pipe would hang, and nested YAML aliases would fill the memory."""
    os.mkfifo(tmp_path / "cdi" / "a-pipe.yaml")
    (tmp_path / "cdi" / "b-laughs.yaml").write_text(LAUGHS)
    (tmp_path / "cdi" / "c-deep.json").write_text('{"kind": "nvidia.com/gpu", "x": ' + "[" * 100_000)
    (tmp_path / "cdi" / "d-folder.json").mkdir()
    (tmp_path / "cdi" / "e-endless.yaml").symlink_to("/dev/zero")
    assert host.nvidia_edits("GPU-b")
