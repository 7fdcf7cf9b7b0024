"""Being connected to NVML: from init to shutdown.

Room:  NVML counts inits, and lets go at as many shutdowns. So `look` and `wait`, which are called in different threads,
       each have a session, and neither can pull the library away under the other.
Door:  `NvmlSession.asking`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gputile.nvml.errors import Nvml, no_driver


class NvmlSession:
    """
    closed --open--> open --close, or a failure that passes through `asking`--> closed
    """

    def __init__(self) -> None:
        self._nvml: Nvml | None = None

    @property
    def is_open(self) -> bool:
        return self._nvml is not None

    @contextmanager
    def asking(self) -> Iterator[Nvml]:
        """NVML, connected. An NVML failure that nobody caught inside is the driver's, and ends the session."""
        nvml = self.open()
        try:
            yield nvml
        except nvml.NVMLError as failed:
            self.close()
            raise no_driver(failed) from failed

    def open(self) -> Nvml:
        if self._nvml is None:
            import pynvml  # a quarter of a megabyte of Python: only where there is somebody to ask

            try:
                pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)  # a driver without cards is no failure
            except pynvml.NVMLError as failed:
                raise no_driver(failed) from failed
            self._nvml = pynvml
        return self._nvml

    def close(self) -> None:
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with suppress(nvml.NVMLError):  # gone already: as good as closed
                nvml.nvmlShutdown()
