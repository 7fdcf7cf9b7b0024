"""Log lines as JSON: a constant sentence in `msg`, the rest as fields. A decision logs once, where it is made.

Nothing in a line is obeyed by a terminal that shows it: JSON escapes control characters, and we do the rest of them.
"""

import json
import logging
import sys
import time
from functools import lru_cache
from typing import Any, TextIO

import orjson

from gputile.text.terminal import escaped

_OURS = "_gputile_fields"


def fields(**found: Any) -> dict[str, Any]:
    """For `extra=` of a log call: what the line is about. Never a token, a certificate or a whole object."""
    return {_OURS: found}


class JsonLines(logging.Formatter):
    """One object per line: time, level, logger, msg, then the fields; a traceback goes into `error`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            **getattr(record, _OURS, {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        try:
            return escaped(orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode())
        except TypeError:  # half characters, numbers beyond 64 bits: no value may cost the line
            return json.dumps(line, default=repr)


def _utc(seconds: float) -> str:
    return f"{_whole(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@lru_cache(1)
def _whole(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def start(level: str, stream: TextIO | None = None) -> None:
    """Send every log line of the process to the stream (standard error), from this level up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging._srcfile = None  # documented: nobody looks up the line that logs
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # we print none of it
