"""The admin port: pause and drain. It has a key of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.server.endpoints import Api
from meshwright.server.replies import json_response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp


class Admin:
    """What the admin port does to a server."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def state(self, request: Request) -> ASGIApp:
        """Whether requests are taken, and the load."""
        client = self._api.client
        return json_response({"state": self._api.state, "unfinished": client.unfinished, **client.figures._asdict()})

    async def pause(self, request: Request) -> ASGIApp:
        """Stop after the current step; requests wait."""
        self._api.client.pause(True)
        return await self.state(request)

    async def resume(self, request: Request) -> ASGIApp:
        """End a pause or a drain."""
        self._api.draining = False
        self._api.client.pause(False)
        return await self.state(request)

    async def drain(self, request: Request) -> ASGIApp:
        """Refuse new requests with 503; those that run go on."""
        self._api.draining = True
        return await self.state(request)
