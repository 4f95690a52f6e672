"""Errors of HTTP requests in OpenAI's form, `{"error": {message, type, param, code}}`, and in Anthropic's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""Types of errors by HTTP status."""
_MESSAGES_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Types of errors of Anthropic's API by HTTP status; the others are wrong requests."""
NO_RETRY = (b"x-should-retry", b"false")
"""Header by which OpenAI's clients do not send the request again."""


TOO_LONG = "context_length_exceeded"
"""Code of the error for a prompt that leaves no room for a new token."""
FAILURES: Mapping[str, tuple[int, str]] = {
    "grammar": (422, "{}"),
    "not_finite": (500, "the request failed: {}"),
    "request_failed": (500, "the request failed: {}"),
    "engine_failed": (503, "the engine failed: {}"),
}
"""Status and message of requests that the engine has refused or failed, by the code of their error."""


class RequestError(Exception):
    """A request that is not carried out."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        scheme: str = "Bearer",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """`param` is the key of the body that is wrong; `retry_after` are seconds after which the client may try again;
        `scheme` is how a client shows its key, for status 401; `headers` are further ones of the answer."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.scheme = scheme
        self._headers = headers

    @classmethod
    def of_failure(cls, error: str | None, code: str | None, grammar_key: str | None = None) -> RequestError:
        """The error of a request that the engine refused or failed; `grammar_key` of the body asks for its grammar.

        Clients do not send a failed one again: the same prompt may fail the next steps too, and several in turn end the engine.
        """
        if code is None:
            return cls(400, error or "")
        status, message = FAILURES[code]
        param = grammar_key if code == "grammar" else None
        headers = [NO_RETRY] if status >= 500 else []
        return cls(status, message.format(error), code=code, param=param, headers=headers)

    @property
    def content(self) -> bytes:
        """The body of the answer."""
        error = {"message": self.message, "type": _TYPES[self.status], "param": self.param, "code": self.code}
        return json.dumps({"error": error}, allow_nan=False).encode("ascii")

    @property
    def messages_content(self) -> bytes:
        """The body of the answer in the form of Anthropic's API, whose clients shorten a conversation at this message."""
        message = f"prompt is too long: {self.message}" if self.code == TOO_LONG else self.message
        error = {"type": _MESSAGES_TYPES.get(self.status, "invalid_request_error"), "message": message}
        return json.dumps({"type": "error", "error": error}, allow_nan=False).encode("ascii")

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Further headers of the answer."""
        headers = list(self._headers)
        if self.retry_after is not None:
            headers.append((b"retry-after", str(self.retry_after).encode("ascii")))
        if self.status == 401:
            headers.append((b"www-authenticate", self.scheme.encode("ascii")))
        return headers


MESSAGES_PATH = "/v1/messages"
"""Beginning of the paths of Anthropic's API."""
RESPONSES_PATH = "/v1/responses"
"""Beginning of the paths of OpenAI's Responses API."""
LAST_SEQUENCE = 2**31 - 1
"""Number of an event of a Responses stream that who writes it has not counted; numbers rise."""


def content_of(error: RequestError, path: str) -> bytes:
    """The body of an error in the form of the API that a path belongs to."""
    return error.messages_content if path.startswith(MESSAGES_PATH) else error.content


def failure_event(error: RequestError, path: str) -> bytes:
    """The event that ends a stream of a path after a failure, where nothing of the answer is known."""
    if path.startswith(MESSAGES_PATH):
        return b"event: error\ndata: %b\n\n" % error.messages_content
    if path.startswith(RESPONSES_PATH):
        shown = {"code": error.code or "server_error", "message": error.message}
        response = {"id": "", "object": "response", "status": "failed", "output": [], "error": shown}
        event = {"type": "response.failed", "response": response, "sequence_number": LAST_SEQUENCE}
        return b"event: response.failed\ndata: %b\n\n" % json.dumps(event).encode("ascii")
    return b"data: %b\n\n" % error.content


def wrong(param: str, expected: str, got: object) -> RequestError:
    """The error for a value of the body that is not as expected."""
    return RequestError(400, f"{param}: expected {expected}, got {shown(got)}", param=param)


def shown(value: object) -> str:
    """A value of the body in an error; texts are not repeated, since they may be secret."""
    if isinstance(value, str):
        return f"text of {len(value)} characters" if len(value) > 20 else json.dumps(value)
    if isinstance(value, list):
        return f"a list of {len(value)} values"
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)[:40]
