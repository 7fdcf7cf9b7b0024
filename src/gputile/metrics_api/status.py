"""Error responses as Kubernetes Status objects: code, reason and message."""

from typing import Any

import orjson

from gputile.http.messages import Response

Json = dict[str, Any]


class StatusError(Exception):
    """An error response. `body` is its Status object."""

    def __init__(self, code: int, reason: str, message: str, **details: str | int) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason
        self.details = {key: value for key, value in details.items() if value}

    def body(self) -> Json:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            **({"details": self.details} if self.details else {}),
            "code": self.code,
        }

    def response(self) -> Response:
        return Response(orjson.dumps(self.body()), self.code)


def expired() -> StatusError:
    """410 Expired: reflectors and kubectl then list again."""
    message = "resourceVersion: too old, or of another replica; list again"
    return StatusError(410, "Expired", message)
