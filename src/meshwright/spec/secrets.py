"""Keys: how they are read from settings and the environment, and what keeps them from other processes and from sight."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress

from meshwright.spec.errors import BadInput

API_KEY = "MESHWRIGHT_API_KEY"
ADMIN_KEY = "MESHWRIGHT_ADMIN_KEY"
TRANSFER_KEY = "MESHWRIGHT_TRANSFER_KEY"
"""Environment variables with the keys of servers."""
OWN_KEYS = (API_KEY, ADMIN_KEY, TRANSFER_KEY)
_SECRET_NAME = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS|CONNECTION_STRING)$", re.IGNORECASE)
_ARGUMENTS_START = 45
_ARGUMENTS_END = 46
"""Fields of /proc/self/stat behind the process's name: the addresses of its arguments (proc_pid_stat(5))."""


def key_setting(setting: str, given: str | None, variable: str) -> str | None:
    """The key in a setting, or else in an environment variable; None without one.

    White space around it, such as the end of a file's line, does not count: no client could send it. Raises BadInput,
    with the setting as its key, for what else cannot stand in a header, and for white space alone.
    """
    text, source = (given, setting) if given else (os.environ.get(variable), variable)
    if not text:
        return None
    key = text.strip()
    if not key or not key.isascii() or not key.isprintable():
        found = "white space alone" if not key else "one with other characters or with the end of a line inside of it"
        raise BadInput(f"{source}: expected a key of visible ASCII characters, got {found}", key=setting)
    return key


def is_secret_name(name: str) -> bool:
    """Whether a setting or variable of this name has a secret."""
    return _SECRET_NAME.search(name) is not None


def without_secrets(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child that needs no secret: without variables whose name ends like that of one."""
    environment = os.environ if environment is None else environment
    return {name: value for name, value in environment.items() if not is_secret_name(name)}


def without_own_keys(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child that needs no key of a server, but may need those of stores and services."""
    environment = os.environ if environment is None else environment
    return {name: value for name, value in environment.items() if name not in OWN_KEYS}


def hide_arguments(secrets: Collection[str | None]) -> None:
    """Overwrite keys among this process's arguments, which every user of the host can list; on Linux alone."""
    wanted = [secret.encode() for secret in secrets if secret]
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
        start = int(fields[_ARGUMENTS_START])
        end = int(fields[_ARGUMENTS_END])
        if not start or not wanted:
            return
        arguments = shown = ctypes.string_at(start, end - start)
        for secret in wanted:
            shown = re.sub(rb"(\0|=)" + re.escape(secret) + rb"(?=\0)", rb"\1" + b"*" * len(secret), shown)
        if shown != arguments:
            ctypes.memmove(start, shown, len(shown))
