"""What the processes say about themselves: log lines and numbers.

Room:  `logs` (one JSON object per line) and `metrics` (the Prometheus registry); neither decides anything.
Door:  `logs.start`, `logs.fields`; the instruments of `metrics.Metrics`.
"""
