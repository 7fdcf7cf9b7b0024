"""The GPU driver: which cards there are, how they are, and who uses them.

Room:  one Protocol (`values.Driver`) with three makers: `real` (NVIDIA's NVML), `fake` (for tests and trials) and
       `null` (a machine without a driver). All calls block; whoever has a loop calls them in a thread.
Door:  `values.Driver`. `python -m gputile.nvml` shows what the driver of this machine says.
"""
