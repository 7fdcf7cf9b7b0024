"""`python -m gputile.nvml`: what the driver of this machine shows, as a table."""

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
    except NoDriver as missing:
        print(missing, file=sys.stderr)
        return 1
    finally:
        driver.close()
    return 0


def report(driver: Driver) -> Iterator[str]:
    sight = driver.look()
    yield f"driver {sight.driver or 'unknown'}, CUDA {sight.cuda or 'unknown'}, {len(sight.gpus)} cards"
    if sight.gpus:
        yield from aligned([HEAD, *(_line(gpu, driver.processes(gpu.uuid)) for gpu in sight.gpus)])
    if sight.links:
        yield from aligned(_links(sight))
    yield from sight.nameless


def aligned(lines: list[tuple[str, ...]]) -> Iterator[str]:
    """Columns as wide as their widest word."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()


def _line(gpu: DriverGpu, processes: tuple[GpuProcess, ...] | None) -> tuple[str, ...]:
    return (
        str(gpu.index),
        gpu.uuid,
        f"{gpu.model} (MIG)" if gpu.is_mig else gpu.model,
        show_memory(gpu.memory),
        "-" if gpu.numa < 0 else str(gpu.numa),
        gpu.pci or "-",
        "-" if gpu.minor < 0 else f"/dev/nvidia{gpu.minor}",
        "?" if processes is None else ", ".join(map(_process, processes)) or "-",
        gpu.fault or "well",
    )


def _process(process: GpuProcess) -> str:
    memory = "" if process.memory is None else f" {show_memory(process.memory)}"
    cores = "" if process.cores is None else f" {process.cores}%"
    return f"{process.pid}{memory}{cores}"


def _links(sight: DriverSnapshot) -> list[tuple[str, ...]]:
    numbers = [str(gpu.index) for gpu in sight.gpus]
    rows = zip(numbers, sight.links, strict=True)
    return [("LINKS", *numbers), *((number, *map(str, weights)) for number, weights in rows)]


if __name__ == "__main__":
    sys.exit(main())
