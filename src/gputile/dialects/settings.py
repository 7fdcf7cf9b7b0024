"""Settings of the dialects: units and names that are not part of any API object, so the operator must set them."""

from typing import Literal

import msgspec

from gputile.model.cards import DEFAULT_SLOTS
from gputile.model.units import MiB

Unit = Literal["GiB", "MiB"]

UNIT: dict[str, MiB] = {"GiB": 1024, "MiB": 1}


class DialectSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the dialects; the defaults are those of the original systems."""

    gpushare_unit: Literal["GiB", "MiB", "auto"] = "GiB"
    """Unit of `aliyun.com/gpu-mem`. `auto` derives it from the nodes, as `kubectl inspect gpushare` does."""

    nano_unit: Unit = "GiB"
    """Unit of `nano-gpu.io/gpu-memory`. Generation 1 does not define it; its README suggests GiB."""

    hami_memory_factor: int = 1
    """MiB per unit of `nvidia.com/gpumem`: HAMi's `memoryFactor`."""

    vgpu_memory_factor: int = 1
    """MiB per unit of `vgpu-memory`: vgpu-manager's `--device-memory-factor`."""

    vgpu_domain: str = "nvidia.com"
    """Prefix of vgpu-manager's resource names and annotations: its `--domain`."""

    slots_per_card: int = DEFAULT_SLOTS
    """Tiles (shares of one GPU) per GPU, on nodes whose own agent does not publish the number."""


DEFAULTS = DialectSettings()
