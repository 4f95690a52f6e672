"""Folders outside a run that outlive it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def user_cache(env: Mapping[str, str] = os.environ) -> Path:
    """Where what can be made again is kept for this user: `$XDG_CACHE_HOME/meshwright`, or `~/.cache/meshwright`."""
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def compiler_cache(env: Mapping[str, str] = os.environ) -> Path | None:
    """The folder, made if need be, in which torch's compiler keeps what it made, so that the next start compiles nothing.

    torch's own default is in /tmp, which ends with the host or the container and whose names any user can take first. None where the user's
    cache cannot be written to.
    """
    folder = user_cache(env) / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or one that is read-only
        return None
    return folder if os.access(folder, os.W_OK) else None
