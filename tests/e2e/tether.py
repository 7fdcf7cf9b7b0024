"""`python tether.py PARENT PROGRAM ARG...`: become PROGRAM, and die with the thread that started this process.

It runs between fork and exec of every child of the tests. It is a script and not a `preexec_fn`, because Python code in
a forked child of a process with threads may dead-lock (and is a warning from Python 3.12 on).
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(f"tether: the process {parent} that started {program} is gone")
    for number in signal.valid_signals() - {signal.SIGPIPE}:  # an ignored signal stays ignored over exec
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    os.execvp(program, sys.argv[2:])


if __name__ == "__main__":
    main()
