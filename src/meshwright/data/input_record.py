"""The record of the inputs of a preparation, `inputs.jsonl` in its directory, and whether the inputs are still the same.

    ["text/a.jsonl", 1048576, 1764000000000000000, 1764000000000000000, "9f…"]

A line for each file: name, bytes, times in ns of its contents and of its inode, digest of its bytes (null if it could not be read).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.data.inputs import InputFile
from meshwright.data.manifest import INPUTS, TOKENIZER, Manifest
from meshwright.durable.writes import digest, digest_file, write_durable

TIME_STEP_NS = 2 * 10**9
"""Coarsest step of a file system's times: two changes of a file within it may show the same time."""


def input_record(files: Sequence[InputFile], digests: Mapping[str, str]) -> bytes:
    """The content of `inputs.jsonl` for `files`; `digests` has the digest of each file that was read, by name."""
    rows = ([file.name, file.size, file.modified_ns, file.changed_ns, digests.get(file.name)] for file in files)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_input_record(directory: Path, content: bytes) -> str:
    """Write the record of the inputs and return its digest."""
    write_durable(directory / INPUTS, content)
    return digest(content)


def changed_inputs(directory: Path, manifest: Manifest, files: Sequence[InputFile]) -> str:
    """The first of `files` that changed since the preparation in `directory`, in words, and how many; empty if none did.

    Names and sizes are known to be the same. A file is read again if its times differ from the record, or if it may have changed after it
    was read without a change of its times.
    """
    content = (directory / INPUTS).read_bytes() if (directory / INPUTS).is_file() else b""
    if digest(content) != manifest.inputs:
        return f"{directory / INPUTS}, the record of the inputs, is missing or damaged"
    started_ns = (directory / TOKENIZER).stat().st_mtime_ns  # written before the inputs are read
    changed = []
    for line, file in zip(content.splitlines(), files, strict=True):
        _, _, modified_ns, changed_ns, recorded = json.loads(line)
        recent = max(file.modified_ns, file.changed_ns) > started_ns - TIME_STEP_NS
        same_times = (file.modified_ns, file.changed_ns) == (modified_ns, changed_ns)
        if recorded is None:  # it could not be read, or is of a format that is not
            changed += [] if same_times or file.format.refused else [file.name]
        elif (recent or not same_times) and _digest(file) != recorded:
            changed.append(file.name)
    if not changed:
        return ""
    more = f", as of {len(changed) - 1:,} more files" if len(changed) > 1 else ""
    return f"the contents of {changed[0]} changed{more}"


def _digest(file: InputFile) -> str | None:
    try:
        return digest_file(file.path)
    except OSError:
        return None
