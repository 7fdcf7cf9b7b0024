"""What is nowhere on the wire and must be told: units and names that a cluster's owner chose."""

from typing import Literal

import msgspec

from gputile.model.cards import DEFAULT_SLOTS
from gputile.model.units import MiB

Unit = Literal["GiB", "MiB"]

UNIT: dict[str, MiB] = {"GiB": 1024, "MiB": 1}


class DialectSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of this room; the defaults are what the families ship."""

    gpushare_unit: Literal["GiB", "MiB", "auto"] = "GiB"
    """What one `aliyun.com/gpu-mem` is. `auto` guesses as its kubectl plugin does; see `gpushare.guess_unit`."""

    nano_unit: Unit = "GiB"
    """What one `nano-gpu.io/gpu-memory` is. Generation 1 never said; its README reads as GiB."""

    hami_memory_factor: int = 1
    """MiB per `nvidia.com/gpumem`, HAMi's `memoryFactor`."""

    vgpu_memory_factor: int = 1
    """MiB per `vgpu-memory`, vgpu-manager's `--device-memory-factor`."""

    vgpu_domain: str = "nvidia.com"
    """Prefix of vgpu-manager's names, its `--domain`."""

    slots_per_card: int = DEFAULT_SLOTS
    """Tiles per card where the node's own agent does not say."""


DEFAULTS = DialectSettings()
