"""The API as one ASGI application: routes, check of keys, errors and the request log."""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from meshwright.server.addresses import is_loopback
from meshwright.server.admin import Admin
from meshwright.server.answer import DIRECT_SEND
from meshwright.server.endpoints import Api
from meshwright.server.errors import RequestError
from meshwright.server.replies import error_response, kept_request_id, shown_path

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("meshwright.server")

API_ROUTES: Sequence[tuple[str, str, Callable[[Api, Request], Awaitable[ASGIApp]]]] = (
    ("GET", "/", Api.page),
    ("POST", "/v1/completions", Api.completions),
    ("POST", "/v1/chat/completions", Api.chat_completions),
    ("POST", "/v1/responses", Api.responses),
    ("POST", "/v1/messages", Api.messages),
    ("POST", "/v1/messages/count_tokens", Api.count_tokens),
    ("POST", "/score", Api.score),
    ("GET", "/v1/models", Api.models),
    ("GET", "/v1/models/{name:path}", Api.model),
    ("POST", "/tokenize", Api.tokenize),
    ("POST", "/detokenize", Api.detokenize),
    ("GET", "/tokenizer_info", Api.tokenizer_info),
    ("GET", "/health", Api.health),
    ("GET", "/version", Api.version),
    ("GET", "/metrics", Api.metrics),
)
"""(Method, path, endpoint) of each route of the API. docs/reference/serve.md shows the endpoint's docstring in its line."""
ADMIN_ROUTES: Sequence[tuple[str, str, Callable[[Admin, Request], Awaitable[ASGIApp]]]] = (
    ("GET", "/state", Admin.state),
    ("POST", "/pause", Admin.pause),
    ("POST", "/resume", Admin.resume),
    ("POST", "/drain", Admin.drain),
    ("POST", "/role", Admin.role),
    ("POST", "/weights", Admin.weights),
)
"""(Method, path, endpoint) of each route of the admin port."""


def api_app(api: Api, *, loopback: bool) -> ASGIApp:
    """Return the application of the API. `loopback`: the server listens on a loopback address only."""
    shown = [route for route in API_ROUTES if api.spec.page or route[2] is not Api.page]
    routes = [(method, path, partial(endpoint, api)) for method, path, endpoint in shown]
    app: ASGIApp = KeyCheck(application(routes), api.spec.api_key, open_paths={"/health"}, basic_paths={"/"})
    if loopback and api.spec.api_key is None:
        app = HostCheck(app)
    return DirectSend(RequestLog(app, logs=api.spec.log_requests))


def admin_app(api: Api) -> ASGIApp:
    """Return the application of the admin port."""
    admin = Admin(api)
    routes = [(method, path, partial(endpoint, admin)) for method, path, endpoint in ADMIN_ROUTES]
    app: ASGIApp = KeyCheck(application(routes), api.spec.admin_key)
    return RequestLog(app, logs=api.spec.log_requests)


def application(routes: Iterable[tuple[str, str, Callable[[Request], Awaitable[ASGIApp]]]]) -> Starlette:
    """Return a Starlette application with routes (method, path, endpoint).

    Each error is answered in the format of the API to which its path belongs (OpenAI's or Anthropic's).
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    async def refused(request: Request, error: Exception) -> Any:
        assert isinstance(error, RequestError)
        return error_response(error, request.url.path)

    async def not_routed(request: Request, error: Exception) -> Any:
        """Answer a request for an unknown path (404), or with a method that the path does not have (405)."""
        assert isinstance(error, HTTPException)
        status = error.status_code if error.status_code in (404, 405) else 400
        text = {404: "there is no such path", 405: "the path has another method"}.get(status, "the request is wrong")
        allowed = sorted((error.headers or {}).get("Allow", "").split(", ")) if status == 405 else []
        headers = [(b"allow", ", ".join(allowed).encode("ascii"))] if allowed else []
        return error_response(RequestError(status, text, headers=headers), request.url.path)

    async def failed(request: Request, error: Exception) -> Any:
        return error_response(RequestError(500, f"internal error: {type(error).__name__}"), request.url.path)

    handlers: Any = {RequestError: refused, HTTPException: not_routed, Exception: failed}
    found = [Route(path, endpoint, methods=[method]) for method, path, endpoint in routes]
    return Starlette(routes=found, exception_handlers=handlers)


class KeyCheck:
    """ASGI wrapper that answers 401 to requests without the server's key. If the server has no key, it lets all pass."""

    def __init__(
        self, app: ASGIApp, key: str | None, *, open_paths: Iterable[str] = (), basic_paths: Iterable[str] = ()
    ) -> None:
        """`key`: the server's key, or None; `open_paths`: paths that need no key; `basic_paths`: paths where a browser
        may send the key as the password of HTTP Basic authentication.
        """
        self._app = app
        self._key = None if key is None else key.encode()
        self._open = frozenset(open_paths)
        self._basic = frozenset(basic_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._key is None or scope["type"] != "http" or scope["path"] in self._open or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        scheme = "Basic" if scope["path"] in self._basic else "Bearer"
        error = RequestError(401, "expected the header Authorization: Bearer KEY with the server's key", scheme=scheme)
        await error_response(error, scope["path"])(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        """Whether the headers have the key: as Bearer token, as `x-api-key`, or as password of HTTP Basic where allowed."""
        assert self._key is not None
        headers = dict(scope["headers"])
        if b"authorization" not in headers:  # clients of Anthropic's API send x-api-key instead
            return hmac.compare_digest(headers.get(b"x-api-key", b"").strip(), self._key)
        value = headers[b"authorization"]
        scheme, _, given = value.partition(b" ")
        if scheme.lower() == b"basic" and scope["path"] in self._basic:
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(given.strip(), self._key)


class HostCheck:
    """ASGI wrapper that answers 400 unless the Host header names a loopback address.

    It protects a server without a key against DNS rebinding: a web page whose name resolves to 127.0.0.1 could
    otherwise send requests to it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
            # Remove the port. An IPv6 address is in brackets, which contain colons.
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if not is_loopback(name.lower().removeprefix("[").removesuffix("]")):
                error = RequestError(400, "host: expected localhost or 127.0.0.1")
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


class DirectSend:
    """ASGI wrapper that puts the server's own `send` into the scope, for the events of a streamed answer.

    The wrappers inside this one change the head of an answer only. Events need not pass through them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT_SEND] = send
        await self._app(scope, receive, send)


class RequestLog:
    """ASGI wrapper that logs each request and puts a request id into the head of its answer, except for /health.

    A line of the log has path, status, tokens and seconds, but no text. The id is the client's `x-request-id`, or else
    a number.
    """

    def __init__(self, app: ASGIApp, *, logs: bool = True) -> None:
        self._app = app
        self._logs = logs
        self._count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http" or scope["path"] == "/health"
        ):  # a router asks for the health of its servers each second, which would fill the log
            await self._app(scope, receive, send)
            return
        self._count += 1
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        id = kept_request_id(given) or str(self._count)
        started = time.perf_counter()
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", id.encode("ascii"))]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._log(id, scope, status, time.perf_counter() - started)

    def _log(self, id: str, scope: Scope, status: int, seconds: float) -> None:
        """Log one line about a request: id, method, path, status, tokens if it generated any, and seconds."""
        if self._logs:
            work = scope.get("meshwright")
            tokens = "" if work is None else f" prompt={work['prompt_tokens']} new={work['answer'].new_tokens}"
            path = shown_path(scope["path"])
            log.info("request %s: %s %s: %d%s seconds=%.3f", id, scope["method"], path, status, tokens, seconds)
