"""Folders that remain after a run: the user's caches, and the folder of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from meshwright.spec.errors import BadInput

CACHE_HINT = "set XDG_CACHE_HOME to a folder that this user can write"
"""What a user without a home folder can do."""


def homes_of(folder: Path) -> tuple[Path, ...]:
    """Return the folders in which the files of a model are looked up: `folder`, then the run's folder if that is another one.

    `folder` is a run's folder, its `checkpoints` folder, one of its checkpoints, or a Hugging Face folder:

    >>> [str(home) for home in homes_of(Path("runs/a/checkpoints/step-00000010"))]
    ['runs/a/checkpoints/step-00000010', 'runs/a']
    >>> [str(home) for home in homes_of(Path("models/a"))]
    ['models/a']
    """
    if folder.name == "checkpoints":
        return folder, folder.parent
    return (folder, folder.parent.parent) if folder.parent.name == "checkpoints" else (folder,)


def user_cache(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for data that can be made again: `$XDG_CACHE_HOME/meshwright`, or `~/.cache/meshwright`.

    Raises BadInput for a user without a home folder, such as the numbered users of containers.
    """
    try:
        return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"
    except RuntimeError:
        raise BadInput(f"user {os.getuid()} of this host has no home folder; {CACHE_HINT}") from None


def compiler_cache(env: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder in which torch's compiler caches its results, after creating it; None if it cannot be written.

    With it, a later start compiles nothing. Torch's own default is in /tmp, which is lost with the host or the
    container, and in which any user can create files first.
    """
    try:
        folder = user_cache(env) / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, BadInput):  # there is no home folder, or it is read-only
        return None
    return folder if os.access(folder, os.W_OK) else None
