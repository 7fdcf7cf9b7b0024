"""`python -m gputile.nvml`: prints what the driver of this machine reports, as a table."""

import sys
from collections.abc import Iterator

from gputile.model.units import show_memory
from gputile.nvml.driver import Driver, DriverGpu, DriverSnapshot, GpuProcess, NoDriver
from gputile.nvml.real import RealDriver

HEAD = ("GPU", "UUID", "MODEL", "MEMORY", "NUMA", "PCI", "DEVICE", "USED BY", "HEALTH")


def main() -> int:
    driver = RealDriver()
    try:
        print("\n".join(report(driver)))
    except NoDriver as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        driver.close()
    return 0


def report(driver: Driver) -> Iterator[str]:
    """The lines of the table."""
    snapshot = driver.snapshot()
    yield f"driver {snapshot.driver or 'unknown'}, CUDA {snapshot.cuda or 'unknown'}, {len(snapshot.gpus)} GPUs"
    if snapshot.gpus:
        yield from aligned([HEAD, *(_row(gpu, driver.processes(gpu.uuid)) for gpu in snapshot.gpus)])
    if snapshot.links:
        yield from aligned(_links(snapshot))
    yield from snapshot.unidentified


def aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Rows as lines, with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(gpu: DriverGpu, processes: tuple[GpuProcess, ...] | None) -> tuple[str, ...]:
    return (
        str(gpu.index),
        gpu.uuid,
        f"{gpu.model} (MIG)" if gpu.is_mig else gpu.model,
        show_memory(gpu.memory),
        "-" if gpu.numa < 0 else str(gpu.numa),
        gpu.pci or "-",
        "-" if gpu.minor < 0 else f"/dev/nvidia{gpu.minor}",
        "?" if processes is None else ", ".join(map(_process, processes)) or "-",
        gpu.fault or "healthy",
    )


def _process(process: GpuProcess) -> str:
    memory = "" if process.memory is None else f" {show_memory(process.memory)}"
    cores = "" if process.cores is None else f" {process.cores}%"
    return f"{process.pid}{memory}{cores}"


def _links(snapshot: DriverSnapshot) -> list[tuple[str, ...]]:
    numbers = [str(gpu.index) for gpu in snapshot.gpus]
    rows = zip(numbers, snapshot.links, strict=True)
    return [("LINKS", *numbers), *((number, *map(str, weights)) for number, weights in rows)]


if __name__ == "__main__":
    sys.exit(main())
