"""Hypothesis draws the same examples every time: a red test stays red until it is fixed."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: a quarter of the time a test waits for a socket or a clock."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    """The collector runs between files only: over the objects of 6,000 tests it took a twentieth of all CPU time."""
    gc.collect()
    gc.freeze()
    gc.disable()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        gc.collect()  # what a test leaves open is reported in its own file
