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
    """URLs of servers.

    If a host name has several addresses, each is a server; names are looked up again every `health_seconds`.
    """
    host: str = "127.0.0.1"
    """Address at which it listens; an address that is not loopback needs `api_key`."""
    port: Port = 8080
    """Port of the API; 0 chooses a free one."""
    share_port: bool = False
    """Whether other routers of this user may listen at the same port.

    When one of them ends, the others get all connections.
    """
    api_key: str | None = None
    """Key that all paths except /health need, and that is passed on to the servers; MESHWRIGHT_API_KEY sets it too."""
    requests: Positive = 1024
    """Maximum number of unfinished requests at a server. If all servers have that many, the answer is 429."""
    max_body_bytes: Positive = 8 << 20
    """Maximum number of bytes of the body of a request."""
    health_seconds: Annotated[float, Bound(more_than=0)] = 1.0
    """Time between two checks of a server's health."""
    silent_seconds: Annotated[float, Bound(more_than=0)] = 2.0
    """Longest time that a server may take to answer a check of its health; after that it gets no new requests.

    If it misses a second check, and has sent nothing for that time, its requests without a first byte are sent to other
    servers, and its other requests end.
    """
    first_seconds: Annotated[float, Bound(more_than=0)] = 600.0
    """Longest time from a request to the first byte of its answer; after that the answer is 503."""
    drain_seconds: Annotated[float, Bound(at_least=0)] = 30.0
    """Longest time for which running requests may continue after SIGTERM."""
