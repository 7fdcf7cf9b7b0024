"""The command line. Each command is a module that is imported when it runs, so that `gputile --help` is quick.

This package alone reads the environment, the clock and the terminal; it composes everything else. It must not decide
anything about scheduling: that is the engine's.
"""

import os

# Before NumPy is imported: our arrays are small, and its threads would only busy-wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
