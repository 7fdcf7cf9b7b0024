"""Hypothesis draws the same examples every time: a red test stays red until it is fixed."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: a quarter of the time a test waits for a socket or a clock."""
    return (os.cpu_count() or 1) + 1
