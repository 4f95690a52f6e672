"""Patterns for names of files in a folder or an object store. `*` and `?` match within one folder, `**` also across folders."""

from __future__ import annotations

import re

from meshwright.spec.errors import BadInput

_WILD = re.compile(r"[*?\[]")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/@?]*)(/[^?]*)?")


SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")
"""Schemes of the URLs of stores whose files can be listed."""


def is_url(files: str) -> bool:
    """Return whether `files` is a URL, not a path."""
    return "://" in files


def check_url(files: str) -> str:
    """Return the scheme of a URL, in lower case.

    Raises BadInput if it is not the URL of a known store, or if it contains credentials or a query. In the latter case
    the message does not show the URL.
    """
    match = _URL.fullmatch(files)
    if match is None:
        shown = f"{files.partition('://')[0]}://…"
        raise BadInput(
            f"{shown}: expected a URL such as s3://bucket/web/*.parquet, without user, `@`, `?` and query; "
            "credentials are read from the environment"
        )
    if (scheme := match[1].lower()) not in SCHEMES:
        raise BadInput(f"{files}: expected a path, or the URL of a store that can be listed: {', '.join(SCHEMES)}")
    return scheme


def split_pattern(files: str) -> tuple[str, str]:
    """Split `files` at its first wildcard: (folder without a final slash, pattern below that folder).

    The pattern is empty if there is no wildcard: `s3://b/web/*.parquet` gives (`s3://b/web`, `*.parquet`), `a.jsonl`
    gives (`a.jsonl`, ``).
    """
    found = _WILD.search(files)
    if found is None:
        return files, ""
    folder, _, _ = files[: found.start()].rpartition("/")
    if not folder:
        return ("/", files[1:]) if files.startswith("/") else (".", files)
    return folder, files[len(folder) + 1 :]


def matcher(pattern: str) -> re.Pattern[str]:
    """Return a regular expression that matches the names that `pattern` matches. Names are relative to the folder."""
    parts = []
    at = 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            parts.append("(?:[^/]+/)*")
            at += 3
        elif pattern.startswith("**", at):
            parts.append(".*")
            at += 2
        elif pattern[at] == "[" and (end := pattern.find("]", at + 2)) > 0:
            inside = pattern[at + 1 : end].replace("\\", r"\\")
            parts.append(f"[{'^' + inside[1:] if inside[0] == '!' else inside}]")
            at = end + 1
        else:
            parts.append({"*": "[^/]*", "?": "[^/]"}.get(pattern[at]) or re.escape(pattern[at]))
            at += 1
    return re.compile("".join(parts))
