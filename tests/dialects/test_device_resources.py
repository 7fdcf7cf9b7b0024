"""How many devices each dialect's resource has per card, and how many the kubelet accepts."""

from collections.abc import Sequence

import pytest

from gputile.dialects.device_resources import LARGEST_MESSAGE, DeviceResource
from gputile.dialects.registry import device_resources, status_resources
from gputile.dialects.settings import DialectSettings
from gputile.model.cards import Card

A = Card(index=0, uuid="GPU-a", memory=4096, slots=3)
B = Card(index=1, uuid="GPU-b", memory=2500, slots=3)
MIG = Card(index=2, uuid="GPU-m", memory=4096, mode="mig")
PLAIN = DialectSettings()


def served(dialect: str, *, cards: Sequence[Card], settings: DialectSettings = PLAIN) -> dict[str, DeviceResource]:
    return {resource.resource: resource for resource in device_resources([dialect], cards, settings)}


@pytest.mark.parametrize(
    ("dialect", "counts"),
    [
        pytest.param("gputile", {"gputile.io/gpu": 6}, id="slots"),
        pytest.param("hami", {"nvidia.com/gpu": 6}, id="hami-shares-nvidias-name"),
        pytest.param("nvidia", {"nvidia.com/gpu": 2}, id="whole-cards"),
        pytest.param("vgpu", {"nvidia.com/vgpu-number": 6}, id="vgpu-slots"),
        pytest.param("gpushare", {"aliyun.com/gpu-mem": 4 + 2}, id="whole-GiB-of-each-card"),
        pytest.param(
            "nano",
            {"nano-gpu.io/gpu-core": 200, "nano-gpu/gpu-percent": 200, "elasticgpu.io/gpu-core": 200},
            id="three-generations",
        ),
        pytest.param("vcuda", {"tencent.com/vcuda-core": 200, "nvidia.com/vcuda-core": 200}, id="two-editions"),
    ],
)
def test_how_much_a_node_offers(dialect: str, counts: dict[str, int]) -> None:
    assert {name: len(resource.devices) for name, resource in served(dialect, cards=[A, B, MIG]).items()} == counts


@pytest.mark.parametrize("serve", [("nvidia", "hami"), ("hami", "nvidia")], ids="-then-".join)
def test_nvidias_name_is_hamis_where_both_are_served(serve: tuple[str, ...]) -> None:
    assert {resource.dialect for resource in device_resources(serve, [A], PLAIN)} == {"hami"}


@pytest.mark.parametrize(
    ("dialect", "settings", "first"),
    [
        pytest.param("gputile", PLAIN, ("GPU-a::0", "GPU-a"), id="uuid-and-number"),
        pytest.param("gpushare", PLAIN, ("GPU-a-_-0", "GPU-a"), id="gpushares-own-spelling"),
        pytest.param("gpushare", DialectSettings(gpushare_unit="MiB"), ("0-_-0", "GPU-a"), id="short-in-MiB"),
    ],
)
def test_names_of_devices(dialect: str, settings: DialectSettings, first: tuple[str, str]) -> None:
    (resource,) = served(dialect, cards=[A], settings=settings).values()
    assert resource.devices[0] == first
    assert len({name for name, _ in resource.devices}) == len(resource.devices)


def test_more_devices_than_the_kubelet_accepts_are_a_fault_with_what_to_do() -> None:
    large = [Card(index=n, uuid=f"GPU-{n}", memory=81920) for n in range(8)]
    (resource,) = served("gpushare", cards=large, settings=DialectSettings(gpushare_unit="MiB")).values()
    assert resource.devices == ()
    assert "655,360 devices" in resource.fault
    assert "GiB" in resource.fault


def test_in_mib_a_node_of_one_large_card_still_fits() -> None:
    (resource,) = served(
        "gpushare", cards=[Card(index=0, uuid="GPU-0", memory=81920)], settings=DialectSettings(gpushare_unit="MiB")
    ).values()
    assert len(resource.devices) == 81920
    assert sum(len(name) + 15 for name, _ in resource.devices) < LARGEST_MESSAGE


@pytest.mark.parametrize(
    ("dialect", "sums"),
    [
        pytest.param("gputile", {"gputile.io/memory": 6596, "gputile.io/cores": 200}, id="ours"),
        pytest.param("gpushare", {"aliyun.com/gpu-count": 2}, id="cards"),
        pytest.param("nano", {"nano-gpu.io/gpu-memory": 6, "elasticgpu.io/gpu-memory": 6596}, id="in-its-units"),
        pytest.param("vcuda", {"tencent.com/vcuda-memory": 25, "nvidia.com/vcuda-memory": 6596}, id="in-blocks"),
        pytest.param("nvidia", {}, id="nothing-besides"),
    ],
)
def test_sums_without_devices(dialect: str, sums: dict[str, int]) -> None:
    sick = Card(index=3, uuid="GPU-s", memory=9999, healthy=False)
    assert status_resources([dialect], [A, B, MIG, sick], PLAIN) == sums
