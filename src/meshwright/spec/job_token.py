"""The token of a job on several hosts.

Every connection between its agents, coordinator and snapshot servers must show it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from meshwright.spec.errors import BadInput

TOKEN_VARIABLE = "MESHWRIGHT_TOKEN_FILE"
"""Environment variable with the path of the file that has the token."""
SHORTEST_TOKEN = 16
"""Minimum number of characters of a token."""


def job_token(env: Mapping[str, str] | None = None) -> str:
    """Return the token in the file that the environment names.

    Raises BadInput if it is missing or too short, or if every user of the host can open the file.
    """
    path = (os.environ if env is None else env).get(TOKEN_VARIABLE)
    advice = f"(umask 077; head -c 32 /dev/urandom | base64 > token) and export {TOKEN_VARIABLE}=token on every host"
    if path is None:
        raise BadInput(f"{TOKEN_VARIABLE} is not set; expected the file with the job's token: {advice}")
    try:
        text = Path(path).read_text(encoding="ascii").strip()
        mode = Path(path).stat().st_mode
    except (OSError, ValueError) as error:
        raise BadInput(f"{TOKEN_VARIABLE}: {path} cannot be read: {error}; {advice}") from None
    if len(text) < SHORTEST_TOKEN or not text.isprintable() or " " in text:
        raise BadInput(f"{TOKEN_VARIABLE}: {path} needs a token of at least {SHORTEST_TOKEN} characters; {advice}")
    if mode & 0o007:
        raise BadInput(f"{TOKEN_VARIABLE}: every user of this host can open {path}; chmod 600 {path}")
    return text
