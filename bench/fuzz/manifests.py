"""Fuzzes `gputile read` and `gputile doctor -f` with YAML and JSON: bombs, wrong types, random bytes.

A command exits with 0, 1 or 2, prints an error without a traceback, and prints no control characters to the terminal.
"""

import io
import random
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType

from click.testing import CliRunner

from bench.fuzz.mutator import Mutator
from gputile.cli.group import cli
from gputile.model.errors import GputileError

EXAMPLES = Path(__file__).parents[2] / "examples"
LONGEST = 10.0  # seconds; then the command is stopped
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
POD = """\
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: b, annotations: {gputile.io/model: "A100", note: "x"}}
spec:
  containers:
    - name: main
      resources: {limits: {gputile.io/gpu: 1, gputile.io/memory: 1000, cpu: 500m}}
"""
SEEDS = [
    POD,
    "a: &a [x, x]\nb: &b [*a, *a, *a, *a]\nc: &c [*b, *b, *b, *b]\nkind: Pod\nspec: *c\n",
    "x: &x {a: 1}\nkind: Pod\nmetadata: {<<: *x, <<: [*x, *x], name: b}\n",
    "&a [*a]\n",
    "kind: List\nitems: &i [{kind: Pod, metadata: {name: a}, spec: {containers: *i}}]\n",
    "kind: Pod\nmetadata: {name: !!binary AAA=, labels: {2020-01-01: 1, .inf: 2, ~: 3, 0x10: 4, 1_0: 5}}\n",
    "? {a: b}\n: c\n---\n...\n%YAML 9.9\n--- !!python/object:os.system {}\n",
    'kind: Pod\nmetadata: {name: "\\e[2J\\x07\\u202e"}\nspec: {containers: [{name: "\\r\\0"}]}\n',
    '{"kind":"List","items":[{"kind":"Node","metadata":{"name":"n"}},{"kind":"Pod","metadata":{"name":"p"}}]}',
    "[" * 3000,
]


class Hangs(Exception):
    """The command took too long."""


class ManifestTarget:
    """The commands, in this process."""

    def __init__(self) -> None:
        texts = [path.read_text() for path in sorted(EXAMPLES.glob("*/*.yaml"))]
        self._seeds = [text.encode() for text in (*SEEDS, *SEEDS, *texts)]

    def sample(self, rng: random.Random) -> tuple[str, bytes]:
        mutator = Mutator(rng, self._seeds)
        body = rng.choice(self._seeds)
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            body = mutator.mutate(body)[: 2**18]
        return rng.choice(("read -f -", "read -f - -o json", "read -f - --check", "doctor -f -")), body

    async def problem(self, path: str, body: bytes) -> str:
        with within(LONGEST):
            done = CliRunner().invoke(cli, path.split(), input=io.BytesIO(body))
        crash = done.exception
        if crash is not None and not isinstance(crash, SystemExit | GputileError):
            return f"{type(crash).__name__}: {crash}"
        if done.exit_code not in (0, 1, 2):
            return f"exit code {done.exit_code}"
        output = done.output + (str(crash) if isinstance(crash, GputileError) else "")
        control = CONTROL.search(output)
        return (
            f"prints {control[0]!r}: {output[max(0, control.start() - 40) : control.start() + 40]!r}" if control else ""
        )

    async def audit(self) -> str:
        done = CliRunner().invoke(cli, ["read", "-f", "-"], input=POD)
        return "" if "1 card" in done.output or "GPU" in done.output else f"a valid pod is read as {done.output!r}"


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Stop a hanging command, in the main thread of Python."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hangs(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    rest, _ = signal.setitimer(signal.ITIMER_REAL, seconds)  # of another timer, such as a test's
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, rest)


@asynccontextmanager
async def target() -> AsyncIterator[ManifestTarget]:
    before = sys.getrecursionlimit()
    try:
        yield ManifestTarget()
    finally:
        sys.setrecursionlimit(before)
