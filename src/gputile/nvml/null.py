"""A driver for machines without one: every query raises `NoDriver`."""

from typing import NoReturn

from gputile.nvml.driver import NoDriver


class NullDriver:
    """A `Driver` that is never there."""

    def __init__(self, why: str = "no driver: this machine is set to have no GPUs") -> None:
        self._why = why

    def snapshot(self) -> NoReturn:
        raise NoDriver(self._why)

    def processes(self, uuid: str) -> NoReturn:
        raise NoDriver(self._why)

    def wait(self, seconds: float) -> NoReturn:
        raise NoDriver(self._why)

    def close(self) -> None:
        """There is nothing to disconnect."""
