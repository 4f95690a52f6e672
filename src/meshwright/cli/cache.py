"""`meshwright cache`: runs a store in host memory in which servers share the cache blocks of prompts."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.options import print_now


def cache(
    address: Annotated[str, typer.Argument(help="`unix:PATH` for servers of this host, or HOST:PORT.")],
    gib: Annotated[float, typer.Option("--gib", help="Memory for blocks, in GiB.", min=0.001)] = 8.0,
    key: Annotated[
        str | None,
        typer.Option("--transfer-key", help="Key of the servers; HOST:PORT needs one.", show_default=False),
    ] = None,
) -> None:
    """Keep cache blocks of prompts for servers with `--block-cache ADDRESS`, which find equal beginnings of prompts there.

    Examples:

        meshwright cache unix:/tmp/blocks --gib 64
    """
    from meshwright.server.addresses import check_transfer
    from meshwright.server.block_store import run_store
    from meshwright.server.frames import UNIX
    from meshwright.spec.secrets import TRANSFER_KEY, hide_arguments, key_setting

    hide_arguments([key])
    key = key_setting("transfer_key", key, TRANSFER_KEY)
    if not address.startswith(UNIX):
        check_transfer("address", address, key)
    run_store(address, key or "", int(gib * 2**30), print_now)
