"""Inputs that no honest caller would send, for everything that reads what others write: `make fuzz`.

Door:  `python -m bench.fuzz`; `verbs.run`, and `running.run(TARGETS[name], ...)` for the others.
"""
