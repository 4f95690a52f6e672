"""Records the inputs of a preparation in `inputs.jsonl`, and later checks whether they are still the same.

    ["text/a.jsonl", 1048576, 1764000000000000000, 1764000000000000000, "9f…"]

There is one line for each file: name, size in bytes, modification time and inode change time in ns, digest of its
bytes. The digest is null if the file could not be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.data.inputs import InputFile
from meshwright.data.manifest import INPUTS, TOKENIZER, Manifest
from meshwright.durable.writes import digest, digest_file, write_durable

TIME_STEP_NS = 2 * 10**9
"""Coarsest resolution of modification times in known file systems, in ns. Two changes within this time may leave the same time."""


def input_record(files: Sequence[InputFile], digests: Mapping[str, str]) -> bytes:
    """Return the content of `inputs.jsonl`. `digests` maps the name of each file that was read to its digest."""
    rows = ([file.name, file.size, file.modified_ns, file.changed_ns, digests.get(file.name)] for file in files)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_input_record(directory: Path, content: bytes) -> str:
    """Write `inputs.jsonl` into `directory` and return the digest of its content."""
    write_durable(directory / INPUTS, content)
    return digest(content)


def changed_inputs(directory: Path, manifest: Manifest, files: Sequence[InputFile]) -> str:
    """Describe which of `files` have changed since the preparation in `directory`: the first one, and how many more.

    Empty if none has changed. The caller has already checked that names and sizes are the same. A file is read again in
    two cases: its times differ from the record, or it was written so shortly before the preparation that a later change
    may have left the same times.
    """
    content = (directory / INPUTS).read_bytes() if (directory / INPUTS).is_file() else b""
    if digest(content) != manifest.inputs:
        return f"{directory / INPUTS}, the record of the inputs, is missing or damaged"
    started_ns = (directory / TOKENIZER).stat().st_mtime_ns  # The tokenizer is written before the inputs are read.
    changed = []
    for line, file in zip(content.splitlines(), files, strict=True):
        _, _, modified_ns, changed_ns, recorded = json.loads(line)
        recent = max(file.modified_ns, file.changed_ns) > started_ns - TIME_STEP_NS
        same_times = (file.modified_ns, file.changed_ns) == (modified_ns, changed_ns)
        if recorded is None:  # The file could not be read, or its format is not read.
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
