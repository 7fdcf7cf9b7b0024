"""A machine without a driver.

Room:  says so whenever it is asked. Who asks decides how often that is worth telling.
Door:  `NullDriver`.
"""

from typing import NoReturn

from gputile.nvml.driver import NoDriver


class NullDriver:
    """Keeps `values.Driver`."""

    def __init__(self, why: str = "no driver: this machine is set to have no GPUs") -> None:
        self._why = why

    def look(self) -> NoReturn:
        raise NoDriver(self._why)

    def processes(self, uuid: str) -> NoReturn:
        raise NoDriver(self._why)

    def wait(self, seconds: float) -> NoReturn:
        raise NoDriver(self._why)

    def close(self) -> None:
        """Nothing was held."""
