"""Fuzzing of every component that parses external input: `make fuzz`.

`python -m bench.fuzz` runs it; `verbs.run` and `fuzz_loop.run` are the entry points for tests.
"""
