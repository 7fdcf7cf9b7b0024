"""A smaller run of `make fuzz`: malformed input crashes nothing and changes nothing."""

import pytest
from bench.fuzz import verbs as fuzz
from bench.fuzz.__main__ import fuzzed
from bench.fuzz.finding import quiet

from tests.effort import EFFORT

BODIES = 2_000


async def test_malformed_bodies_crash_nothing_and_change_nothing() -> None:
    with quiet():
        findings = await fuzz.run(BODIES * EFFORT, seed=1)
    assert not findings, "\n".join(finding.text() for finding in findings)


@pytest.mark.parametrize(
    ("target", "inputs"), [("metrics-api", 1000), ("agent-port", 300), ("kubelet", 2000), ("yaml", 100)]
)
async def test_other_malformed_inputs_crash_nothing(target: str, inputs: int) -> None:
    with quiet():
        findings = await fuzzed(target, inputs * EFFORT, seed=1)
    assert not findings, "\n".join(finding.text() for finding in findings)


def test_a_generated_body_is_reproducible() -> None:
    good = fuzz.good_bodies()
    assert [fuzz.BodyGenerator(7, n, good).body() for n in range(50)] == [
        fuzz.BodyGenerator(7, n, good).body() for n in range(50)
    ]
    assert fuzz.BodyGenerator(7, 1, good).body() != fuzz.BodyGenerator(8, 1, good).body()


@pytest.mark.parametrize(
    ("verb", "answer"),
    [
        ("filter", b'{"Error":""}'),
        ("filter", b"[]"),
        ("filter-dryrun", b"{"),
        ("bind", b'{"Error":null}'),
        ("prioritize", b'[{"Host":"a","Score":11}]'),
        ("preempt", b"{}"),
        ("preempt", b'{"NodeNameToMetaVictims":{"a":{}}}'),
    ],
)
def test_an_answer_of_another_shape_is_a_finding(verb: str, answer: bytes) -> None:
    assert fuzz.malformed(verb, answer)
