"""Keys: how they are read from settings and the environment, and how they are hidden from other processes and from
people.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress

from meshwright.spec.errors import BadInput

API_KEY = "MESHWRIGHT_API_KEY"
"""Environment variable with the key of a server's API."""
ADMIN_KEY = "MESHWRIGHT_ADMIN_KEY"
"""Environment variable with the key of a server's admin port."""
TRANSFER_KEY = "MESHWRIGHT_TRANSFER_KEY"
"""Environment variable with the key that engines show each other."""
OWN_KEYS = (API_KEY, ADMIN_KEY, TRANSFER_KEY)
"""All environment variables with keys of servers."""
_SECRET_NAME = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS|CONNECTION_STRING)$", re.IGNORECASE)
_ARGUMENTS_START = 45
"""Index of the field of /proc/self/stat with the first address of this process's arguments, counted after the process's
name.

See proc_pid_stat(5).
"""
_ARGUMENTS_END = 46
"""Index of the field with the address after the last argument."""


def key_setting(setting: str, given: str | None, variable: str) -> str | None:
    """Return the key in a setting, or else in an environment variable; None if there is none.

    White space around it, such as the end of a file's line, is removed, because no client could send it. Raises
    BadInput, with the setting as its key, for white space alone and for any other character that a header cannot have.
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
    """Return whether a setting or variable with this name has a secret."""
    return _SECRET_NAME.search(name) is not None


def without_secrets(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a child process that needs no secret: without the variables whose names end like names
    of secrets.

    """
    environment = os.environ if environment is None else environment
    return {name: value for name, value in environment.items() if not is_secret_name(name)}


def without_own_keys(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a child process that needs no key of a server, but may need keys of stores and
    services.
    """
    environment = os.environ if environment is None else environment
    return {name: value for name, value in environment.items() if name not in OWN_KEYS}


def hide_arguments(secrets: Collection[str | None]) -> None:
    """Overwrite keys among this process's arguments, which every user of the host can list. Only on Linux."""
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
