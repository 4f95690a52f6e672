"""Settings of the router: the keys of a `route.yaml` and the options of `meshwright route`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshwright.spec.fields import Bound, Positive
from meshwright.spec.serve import Port


@dataclass(frozen=True, kw_only=True)
class RouteSpec:
    """Addresses and limits of the router."""

    instances: tuple[str, ...] = ()
    """URLs of servers; each address of a host name is one, looked up again every `health_seconds`."""
    host: str = "127.0.0.1"
    """Address to listen at; one that is not loopback needs `api_key`."""
    port: Port = 8080
    """Port of the API; 0 takes a free one."""
    share_port: bool = False
    """Whether other routers of this user may listen at the same port: when one ends, the others take all connections."""
    api_key: str | None = None
    """Key that all paths but /health need, passed on to the servers; MESHWRIGHT_API_KEY sets it too."""
    requests: Positive = 1024
    """Unfinished requests at a server at most; if all have so many, the answer is 429."""
    max_body_bytes: Positive = 8 << 20
    """Longest body of a request."""
    health_seconds: Annotated[float, Bound(more_than=0)] = 1.0
    """Time between two looks at the health of a server."""
    silent_seconds: Annotated[float, Bound(more_than=0)] = 2.0
    """Longest time that a server may take to tell its health; then it gets no new requests.

    If it misses a second check, and has sent nothing for that long, its requests without a first byte go elsewhere, others end."""
    first_seconds: Annotated[float, Bound(more_than=0)] = 600.0
    """Longest time from a request to the first byte of its answer; then the answer is 503."""
    drain_seconds: Annotated[float, Bound(at_least=0)] = 30.0
    """Longest time that SIGTERM waits for running requests."""
