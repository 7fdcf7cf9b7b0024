"""`python sampling.py FILE PROGRAM ARG...`: run a Python program and write down where its CPU time goes.

Room:  a timer of the kernel counts CPU time, and at each beat the stack of the main thread is noted: C functions count
       for the Python function that called them. Costs a few percent, where cProfile doubles what it looks at.
Door:  as a script around `gputile scheduler`; `table(file)` prints what it wrote.
"""

import atexit
import json
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

BEAT = 0.002  # seconds of CPU time
TOP = 30


def main() -> None:
    file, program = Path(sys.argv[1]), sys.argv[2]
    alone: Counter[str] = Counter()
    within: Counter[str] = Counter()

    def beat(number: int, frame: FrameType | None) -> None:
        if frame is None:
            return
        alone[_name(frame)] += 1
        stack = set()
        while frame is not None:
            stack.add(_name(frame))
            frame = frame.f_back
        within.update(stack)

    def write() -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        file.write_text(json.dumps({"alone": alone, "within": within}))

    atexit.register(write)
    signal.signal(signal.SIGPROF, beat)
    signal.setitimer(signal.ITIMER_PROF, BEAT, BEAT)
    sys.argv = sys.argv[2:]
    runpy.run_path(program, run_name="__main__")


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno} {code.co_qualname}"


def table(file: Path) -> str:
    """The functions that cost most, by themselves and with what they call."""
    found = json.loads(file.read_text())
    beats = max(1, sum(found["alone"].values()))
    lines = [f"{beats} samples, one per {BEAT * 1000:g} ms of CPU time"]
    for title, kind in (("by itself", "alone"), ("with all that it calls", "within")):
        lines.append(f"\n{'share':>7}  {title}")
        top = sorted(found[kind].items(), key=lambda item: -item[1])[:TOP]
        lines += [f"{100 * count / beats:>6.1f}%  {name}" for name, count in top]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
