"""`python profiler.py FILE PROGRAM ARG...`: run a Python program and record where its CPU time goes.

A kernel timer counts CPU time, and at each tick the stack of the main thread is sampled: C functions count
for the Python function that called them. It costs a few percent, where cProfile doubles the run time. SIGUSR1
discards the samples so far, so that the start of the program is not included.
Run it as a script around `gputile scheduler`; `table(file)` renders the result.
"""

import atexit
import json
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

TICK = 0.002  # seconds of CPU time; a kernel may tick more slowly, so only shares are printed
TOP = 30


class Samples:
    """Counts of samples: each function at the top of the stack, and anywhere on the stack."""

    def __init__(self) -> None:
        self.own: Counter[CodeType] = Counter()
        self.total: Counter[CodeType] = Counter()

    def tick(self, number: int, frame: FrameType | None) -> None:
        if frame is None:
            return
        self.own[frame.f_code] += 1
        stack = set()
        while frame is not None:
            stack.add(frame.f_code)
            frame = frame.f_back
        self.total.update(stack)

    def reset(self, number: int, frame: FrameType | None) -> None:
        self.own.clear()
        self.total.clear()

    def write(self, file: Path) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        file.write_text(json.dumps({"own": _named(self.own), "total": _named(self.total)}))


def _named(counts: Counter[CodeType]) -> Counter[str]:
    named: Counter[str] = Counter()
    for code, count in counts.items():
        named[f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno} {code.co_qualname}"] += count
    return named


def main() -> None:
    file, program = Path(sys.argv[1]), sys.argv[2]
    samples = Samples()
    atexit.register(samples.write, file)
    signal.signal(signal.SIGPROF, samples.tick)
    signal.signal(signal.SIGUSR1, samples.reset)
    signal.setitimer(signal.ITIMER_PROF, TICK, TICK)
    sys.argv = sys.argv[2:]
    runpy.run_path(program, run_name="__main__")


def table(file: Path) -> str:
    """The most expensive functions, by themselves and with their callees."""
    counts = json.loads(file.read_text())
    ticks = max(1, sum(counts["own"].values()))
    lines = [f"{ticks} samples"]
    for title, kind in (("by itself", "own"), ("with its callees", "total")):
        below = [(name, count) for name, count in counts[kind].items() if kind == "own" or count < 0.97 * ticks]
        top = sorted(below, key=lambda item: -item[1])[:TOP]
        lines.append(f"\n{'share':>7}  {title}")
        lines += [f"{100 * count / ticks:>6.1f}%  {name}" for name, count in top]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
