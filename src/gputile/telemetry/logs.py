"""Log lines as JSON: a constant sentence in `msg`, the rest as fields. A decision is logged once, where it is made.

A line is safe to show on a terminal: JSON escapes the C0 control characters, and `escaped` the remaining ones.
"""

import json
import logging
import sys
import time
from functools import lru_cache
from typing import Any, TextIO

import orjson

from gputile.text.terminal import escaped

_FIELDS = "_gputile_fields"


def fields(**values: Any) -> dict[str, Any]:
    """For `extra=` of a log call: the fields of the line. Never a token, a certificate or a whole object."""
    return {_FIELDS: values}


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, msg, then the fields; a traceback goes into `error`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        try:
            return escaped(orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode())
        except TypeError:  # lone surrogates, numbers beyond 64 bits: no value may suppress the line
            return json.dumps(line, default=repr)


def _utc(seconds: float) -> str:
    return f"{_format_seconds(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@lru_cache(1)
def _format_seconds(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def start(level: str, stream: TextIO | None = None) -> None:
    """Send every log line of the process to the stream (standard error), from this level up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging._srcfile = None  # documented: skips looking up the calling line
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # not printed, so not collected
