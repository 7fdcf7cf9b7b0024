"""The cluster's metrics on the scheduler's /metrics page."""
