"""What a person types. One command per file, imported when it is called, so that `gputile --help` is quick.

Room:  the only one that reads environment, clock and terminal; composes everything else.
Door:  `main.main`.
"""

import os

# Before NumPy is there: our arrays are small, and its threads would only wait for each other, awake.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
