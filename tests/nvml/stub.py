"""Hardware as a text file: builds `stub.c` into a `libnvidia-ml.so.1`, and writes the file it reads.

A process has the hardware of a file when it starts with `environment(folder, file)`; rewriting the file changes the
hardware of the running process:

    folder = build(tmp / "driver")
    machine = StubCards.of(8)
    machine.write(file)
    subprocess.Popen([...], env={**os.environ, **environment(folder, file)})
    machine.lose(3).event(79, 3).write(file)
"""

import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

VARIABLE = "STUB_NVML"  # not GPUTILE_...: those are settings
LIBRARY = "libnvidia-ml.so.1"
SOURCE = Path(__file__).with_name("stub.c")
MIB = 1024 * 1024

LOST, UNKNOWN, NOT_SUPPORTED, NOT_LOADED = 15, 999, 3, 9
EVERY_CALL = "*"

KEPT_EVENTS = 100
_numbers = count(1)  # of events, over all machines: a process may have one after the other


def build(folder: Path, *, old: bool = False) -> Path:
    """Build the library into the folder, for LD_LIBRARY_PATH. `old` omits newer functions."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise RuntimeError("the stub of the GPU driver needs a C compiler: install gcc or clang, or set CC")
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", *(["-DOLD"] if old else [])]
    command = [compiler, *flags, f"-Wl,-soname,{LIBRARY}", "-o", str(folder / LIBRARY), str(SOURCE)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"the stub of the GPU driver does not compile:\n{result.stderr}")
    return folder


def environment(folder: Path, file: Path) -> dict[str, str]:
    """The environment of a process with the hardware of `file`."""
    return {"LD_LIBRARY_PATH": str(folder), VARIABLE: str(file)}


@dataclass
class StubCard:
    """One card; None means "not supported"."""

    uuid: str
    name: str | None = "NVIDIA A100-SXM4-80GB"
    memory: int | None = 81920  # MiB
    minor: int | None = None
    pci: str | None = None  # 0000:3b:00
    nodes: int | None = None  # bits of NUMA nodes, as NVML returns them
    mig: bool | None = None
    ecc: int | None = None  # uncorrected errors since the driver was loaded
    pending: bool | None = None  # pages to be retired
    unmappable: bool | None = None  # rows that could not be replaced
    measures: bool = False  # whether it measures how busy a process is
    failures: dict[str, int] = field(default_factory=dict)  # code by function
    processes: list[str] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    nvlinks: list[str] = field(default_factory=list)
    near: dict[str, int] = field(default_factory=dict)  # level of the common ancestor, by UUID

    def process(self, pid: int, memory: int | None = None, kind: str = "compute", instance: int = 0) -> "StubCard":
        """Add a process; `memory` in MiB, None when the driver does not report it."""
        size = "-" if memory is None else str(memory * MIB)
        self.processes.append(f"{kind} {pid} {size} {instance}")
        return self

    def busy_with(self, pid: int, percent: int, at: float) -> "StubCard":
        """Add a sample of how busy the process kept the card; `at` in seconds, as `time.time` counts."""
        self.measures = True
        self.busy.append(f"{pid} {percent} {int(at * 1_000_000)}")
        return self

    def nvlink(self, to: str, *, active: bool = True, kind: str = "gpu") -> "StubCard":
        """Add an NVLink to the PCI address of a card, or of anything with `kind="switch"`."""
        self.nvlinks.append(f"{int(active)} {kind} {to}")
        return self

    def lines(self) -> Iterable[str]:
        yield f"card {self.uuid}"
        facts = {
            "name": self.name,
            "memory": None if self.memory is None else self.memory * MIB,
            "minor": self.minor,
            "pci": self.pci,
            "nodes": self.nodes,
            "mig": self.mig,
            "ecc": self.ecc,
            "pending": self.pending,
            "unmappable": self.unmappable,
            "measures": self.measures,
        }
        for key, fact in facts.items():
            if fact is not None:
                yield f"{key} {int(fact) if isinstance(fact, bool) else fact}"
        yield from (f"fail {function} {code}" for function, code in self.failures.items())
        yield from (f"process {line}" for line in self.processes)
        yield from (f"busy {line}" for line in self.busy)
        yield from (f"nvlink {line}" for line in self.nvlinks)
        yield from (f"near {uuid} {level}" for uuid, level in self.near.items())


@dataclass
class StubCards:
    """A machine: its driver and its cards. Every change returns the machine; `write` applies the changes."""

    cards: list[StubCard] = field(default_factory=list)
    driver: str | None = "550.54.15"
    cuda: int | None = 12040
    failures: dict[str, int] = field(default_factory=dict)  # code by function, of the whole driver
    events: list[str] = field(default_factory=list)
    counts_at_init: bool = False  # cards come and go only between shutdown and init

    @classmethod
    def of(cls, number: int, name: str = "NVIDIA A100-SXM4-80GB", memory: int = 81920) -> "StubCards":
        """Healthy cards, with UUIDs GPU-stub-0, 1, ...; all on one host bridge of a PCI bus that no machine has."""
        cards = [
            StubCard(
                f"GPU-stub-{n}",
                name,
                memory,
                minor=n,
                pci=f"fffe:{16 + n:02x}:00",
                mig=False,
                ecc=0,
                pending=False,
                unmappable=False,
                measures=True,
                near={f"GPU-stub-{other}": 30 for other in range(number) if other != n},
            )
            for n in range(number)
        ]
        return cls(cards)

    def fail(self, card: int, code: int, function: str = EVERY_CALL) -> "StubCards":
        """Make the card fail with that code: in every function of NVML, or in one."""
        self.cards[card].failures[function] = code
        return self

    def lose(self, card: int) -> "StubCards":
        """Make the card fall off the bus."""
        return self.fail(card, LOST)

    def heal(self, card: int) -> "StubCards":
        self.cards[card].failures.clear()
        return self

    def fail_driver(self, code: int, function: str = EVERY_CALL) -> "StubCards":
        """Make the whole driver fail with that code."""
        self.failures[function] = code
        return self

    def heal_driver(self) -> "StubCards":
        self.failures.clear()
        return self

    def event(self, xid: int, card: int | str | None = None) -> "StubCards":
        """Report an XID error of a card (by position or UUID), or of no card."""
        uuid = self.cards[card].uuid if isinstance(card, int) else card or "-"
        self.events = [*self.events[-KEPT_EVENTS:], f"{next(_numbers)} {xid} {uuid}"]
        return self

    def write(self, file: Path) -> None:
        """Atomically: a reader sees the old or the new machine, never a mix."""
        lines = [
            *(f"{key} {value}" for key, value in (("driver", self.driver), ("cuda", self.cuda)) if value is not None),
            *(["enumerate init"] if self.counts_at_init else []),
            *(f"fail {function} {code}" for function, code in self.failures.items()),
            *(f"event {line}" for line in self.events),
            *(line for card in self.cards for line in card.lines()),
        ]
        fresh = file.with_name(f"{file.name}.new")
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(file)
