"""The GPU driver: which cards there are, their health, and the processes that use them.

`driver.Driver` is the interface; it has three implementations: `real` (NVIDIA's NVML), `fake` (for tests) and `null` (a
machine without a driver). All calls block, so asyncio code must call them in a thread. `python -m gputile.nvml` prints
what the driver of this machine reports.
"""
