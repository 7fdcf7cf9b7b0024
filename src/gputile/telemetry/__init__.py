"""Log lines and metrics of the processes: `logs` writes JSON lines, the other modules are Prometheus metrics.

Nothing here makes decisions.
"""
