"""The handlers of the admin port: they load newer weights, pause, drain and change the role. The port has its own key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from meshwright.server.endpoints import Api
from meshwright.server.errors import RequestError, wrong
from meshwright.server.fields import parse_object
from meshwright.server.replies import json_response, read_body
from meshwright.spec.deployment import Role
from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp


MOST_BODY_BYTES = 64 << 10
"""Maximum number of bytes in the body of a request to the admin port."""


class Admin:
    """The handlers of the admin port. Each answers with JSON; see `ADMIN_ROUTES` in app.py for their paths."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def state(self, request: Request) -> ASGIApp:
        """Whether the server accepts requests, and its load."""
        client = self._api.client
        load = {"role": self._api.role, "unfinished": client.unfinished}
        transfers = {} if client.transfers is None else client.transfers._asdict()
        return json_response({"state": self._api.state, **load, **client.figures._asdict(), **transfers})

    async def pause(self, request: Request) -> ASGIApp:
        """Stop the engine after the current step. Requests wait."""
        self._api.client.pause(True)
        return await self.state(request)

    async def resume(self, request: Request) -> ASGIApp:
        """End a pause or a drain."""
        self._api.draining = False
        self._api.client.pause(False)
        return await self.state(request)

    async def drain(self, request: Request) -> ASGIApp:
        """Refuse new requests with 503. Running requests continue."""
        self._api.draining = True
        return await self.state(request)

    async def role(self, request: Request) -> ASGIApp:
        """Accept new work by `role`: prefill, decode or both. Running requests continue."""
        fields = parse_object(await read_body(request, MOST_BODY_BYTES))
        role = fields.text("role", None, get_args(Role))
        fields.finish()
        if role is None:
            raise wrong("role", f"one of {', '.join(get_args(Role))}", None)
        try:
            spec = replace(self._api.spec, role=cast("Role", role))
        except BadInput as error:
            raise RequestError(422, str(error), param="role") from None
        if spec.exchanges:
            self._api.client.use_role(spec.role)
            self._api.role = spec.role
        return await self.state(request)

    async def weights(self, request: Request) -> ASGIApp:
        """Use the weights in `folder` from the next step on."""
        fields = parse_object(await read_body(request, MOST_BODY_BYTES))
        folder = fields.text("folder", None)
        fields.finish()
        if not folder:
            raise RequestError(
                400, "folder: expected the folder of a run, a checkpoint or a Hugging Face folder", param="folder"
            )
        try:
            await self._api.load(Path(folder))
        except BadInput as error:
            raise RequestError(422, str(error), param="folder") from None
        return json_response({"folder": folder})
