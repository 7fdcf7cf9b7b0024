"""A connection to NVML, from init to shutdown.

NVML counts inits, and disconnects after as many shutdowns. So `RealDriver.snapshot` and `RealDriver.wait`, which run in
different threads, each have a session of their own, and neither can disconnect the other.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gputile.nvml.errors import Nvml, no_driver


class NvmlSession:
    """One init of NVML.

    closed --open--> open --close, or an NVML error that leaves `connected`--> closed
    """

    def __init__(self) -> None:
        self._nvml: Nvml | None = None

    @property
    def is_open(self) -> bool:
        return self._nvml is not None

    @contextmanager
    def connected(self) -> Iterator[Nvml]:
        """NVML, connected. An NVML error that is not handled inside is the driver's: it ends the session."""
        nvml = self.open()
        try:
            yield nvml
        except nvml.NVMLError as error:
            self.close()
            raise no_driver(error) from error

    def open(self) -> Nvml:
        if self._nvml is None:
            import pynvml  # a quarter of a megabyte of Python: imported only when a driver is queried

            try:
                pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)  # a driver without cards is no failure
            except pynvml.NVMLError as error:
                raise no_driver(error) from error
            self._nvml = pynvml
        return self._nvml

    def close(self) -> None:
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with suppress(nvml.NVMLError):  # the driver is gone already
                nvml.nvmlShutdown()
