"""`meshwright route`: presents several servers of one model under one address."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.options import print_now
from meshwright.cli.setting_options import add_options
from meshwright.spec.route import RouteSpec


def route(
    servers: Annotated[
        list[str] | None,
        typer.Argument(metavar="[URL]...", help="Servers, e.g. http://127.0.0.1:8001.", show_default=False),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="ROUTE.yaml", help="File with the same keys as the options below, and `instances`."
        ),
    ] = None,
    **options: Any,
) -> None:
    """Pass requests on to several servers of one model: to the one with the same prefix, or the fewest requests.

    Examples:

        meshwright route http://127.0.0.1:8001 http://127.0.0.1:8002 --port 8000
    """
    from meshwright.config.serve_file import load_settings
    from meshwright.server.route_run import run_router

    given = {key: value for key, value in options.items() if value is not None}
    if servers:
        given["instances"] = servers
    settings = load_settings(RouteSpec, config, given)
    with settings.at_keys():
        run_router(settings.value, print_now)


add_options(route, RouteSpec, basics=("host", "port", "api_key", "share_port"), given=("instances",))
