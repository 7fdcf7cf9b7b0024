"""Fuzzing of every component that parses external input: `make fuzz`.

`python -m bench.fuzz` runs it; `verbs.run` and `running.run` are the entry points for tests.
"""
