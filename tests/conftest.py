"""Hypothesis draws the same examples every time: a red test stays red until it is fixed."""

from hypothesis import HealthCheck, settings

settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
