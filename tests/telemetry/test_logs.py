"""Log lines: one JSON object each, for any field values."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from gputile.telemetry import logs

LOG = logging.getLogger("gputile.test")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    output = io.StringIO()
    logs.start("info", output)
    yield output
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_is_a_sentence_and_its_fields(stream: io.StringIO) -> None:
    LOG.info("bound", extra=logs.fields(pod="ns/web-0", node="n1", took=0.5, cards={"GPU-1": "3MiB"}))
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "gputile.test",
        "msg": "bound",
        "pod": "ns/web-0",
        "node": "n1",
        "took": 0.5,
        "cards": {"GPU-1": "3MiB"},
    }


def test_each_line_is_one_line(stream: io.StringIO) -> None:
    LOG.warning("two\nlines", extra=logs.fields(why="a\nb"))
    LOG.info("next")
    assert [json.loads(line)["msg"] for line in stream.getvalue().splitlines()] == ["two\nlines", "next"]


@pytest.mark.parametrize("sign", ["\x1b[2J", "\x9b5m", "\x7f", "\u202e", "\u2028", "\U000e0041"])
def test_no_line_has_terminal_control_characters(stream: io.StringIO, sign: str) -> None:
    LOG.info("seen", extra=logs.fields(pod=f"ns/{sign}"))
    line = stream.getvalue().rstrip("\n")
    assert line.isprintable()
    assert json.loads(line)["pod"] == f"ns/{sign}"


def test_the_level_counts(stream: io.StringIO) -> None:
    LOG.debug("unheard")
    assert stream.getvalue() == ""


def test_a_traceback_is_a_field(stream: io.StringIO) -> None:
    try:
        raise ValueError("what went wrong")
    except ValueError:
        LOG.exception("failed")
    line = json.loads(stream.getvalue())
    assert "ValueError: what went wrong" in line["error"]
    assert line["level"] == "error"


def test_values_that_are_not_json_are_written_as_text(stream: io.StringIO) -> None:
    LOG.info("odd", extra=logs.fields(error=OSError("no"), keys={1: 2}, found={"a"}))
    line = json.loads(stream.getvalue())
    assert (line["error"], line["keys"], line["found"]) == ("no", {"1": 2}, "{'a'}")


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        (0.0, "1970-01-01T00:00:00.000Z"),
        (1.9999, "1970-01-01T00:00:01.999Z"),
        (1_700_000_000.25, "2023-11-14T22:13:20.250Z"),
    ],
)
def test_time_is_utc_with_milliseconds(seconds: float, want: str) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "m", None, None)
    record.created = seconds
    assert json.loads(logs.JsonLines().format(record))["time"] == want


@pytest.mark.parametrize("value", ["\ud800", 2**70], ids=["half-a-character", "a-number-beyond-64-bits"])
def test_no_value_suppresses_a_line(value: object) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "m", None, None)
    record.__dict__.update(logs.fields(value=value))
    assert json.loads(logs.JsonLines().format(record))["msg"] == "m"
