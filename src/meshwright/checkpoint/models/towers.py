"""Keeps the tensors of a Hugging Face folder that do not belong to its text model, so that exports can include them.

Such tensors are, for example, a vision tower and its projector. They are stored in the folder `towers` next to a run's
tokenizer: the tensors with unchanged bytes, the whole config.json, and the settings of images.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.checkpoint.format.files import disk_space_error, read_range
from meshwright.checkpoint.format.header import ITEM_BYTES, TensorEntry, TensorHeader, read_entries
from meshwright.checkpoint.local_tensors import dtype_name
from meshwright.checkpoint.write.live_state import write_tensors
from meshwright.durable.writes import new_folder, sync_file, write_durable
from meshwright.families.folder import folder_nesting, read_json
from meshwright.families.text_part import TOWERS, Nesting
from meshwright.spec.errors import BadInput, Damaged, OutOfResources
from meshwright.spec.folder_files import JSON_BYTES, read_folder_file
from meshwright.spec.folders import homes_of

RECORD = "config.json"
TENSORS = "towers.safetensors"
SETTINGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files with settings of images and sound, in the folder of such a model."""
PIECE_BYTES = 64 << 20
"""Number of bytes of a tensor that are in memory at a time."""
QUANTISED = ("F8_E4M3", "F8_E8M0", "I8", "U8", "I32")
"""dtypes of quantised tensors. They mean nothing without their scales, or without what config.json says about them."""
_NESTING = "meshwright_text_part"
"""Key of the kept config.json with the fields of `Nesting`."""


@dataclass(frozen=True)
class Towers:
    """The tensors and settings of a folder that do not belong to its text model."""

    folder: Path
    config: Mapping[str, Any]
    """The whole config.json, of text model and towers."""
    nesting: Nesting
    """Where the text model's tensors are in the folder."""
    files: Mapping[str, Path]
    """The file of each tensor by name."""
    entries: Mapping[str, TensorEntry]
    """Position, dtype and shape of each tensor in its file."""

    def tensors(self) -> Iterator[tuple[str, Iterator[memoryview]]]:
        """Yield each tensor's name, and an iterator over its bytes, at most `PIECE_BYTES` at a time."""
        return ((name, _pieces(self.files[name], entry)) for name, entry in self.entries.items())

    def copy_settings(self, folder: Path) -> None:
        """Copy the files with settings of images and sound into a Hugging Face folder."""
        _copy_settings(self.folder, folder)


def _pieces(path: Path, entry: TensorEntry) -> Iterator[memoryview]:
    with open(path, "rb") as file:
        for start in range(entry.start, entry.end, PIECE_BYTES):
            piece = bytearray(min(PIECE_BYTES, entry.end - start))
            read_range(file.fileno(), piece, start, path)
            yield memoryview(piece)


def keep_towers(source: Path, names: Collection[str], read: Callable[[str], Tensor], folder: Path) -> None:
    """Write `folder`/towers from the Hugging Face folder `source`.

    `names` are the tensors that do not belong to the text model, and `read(name)` returns one. Raises OutOfResources if the
    disk is too full. An interrupted call leaves no folder of this name.
    """
    headers = [TensorHeader(name, dtype_name((tensor := read(name)).dtype), tuple(tensor.shape)) for name in names]
    headers.sort(key=lambda header: -ITEM_BYTES[header.dtype])  # every tensor is aligned then
    if error := disk_space_error(folder, sum(header.bytes for header in headers)):
        raise OutOfResources(error)
    config = read_json(source / "config.json")
    nesting = folder_nesting(source)
    assert nesting is not None
    with new_folder(folder / TOWERS) as towers:
        write_tensors(towers / TENSORS, headers, (read(header.key) for header in headers))
        _copy_settings(source, towers)
        record = {**config, _NESTING: [*astuple(nesting)]}
        write_durable(towers / RECORD, json.dumps(record, indent=2) + "\n")


def copy_towers(source: Path, folder: Path) -> None:
    """Copy the towers of another run, if it has any. Files are hard links where the disk supports that."""
    if (kept := _kept(source)) is None or (folder / TOWERS).exists():
        return
    with new_folder(folder / TOWERS) as towers:
        shutil.copytree(kept, towers, copy_function=_link_or_copy, dirs_exist_ok=True)


def read_towers(folder: Path) -> Towers | None:
    """Return the towers of a run or of one of its checkpoints, or None. Raises Damaged if files are missing or cut off."""
    if (kept := _kept(folder)) is None:
        return None
    config = dict(read_json(kept / RECORD))
    place = config.pop(_NESTING, None)
    if not isinstance(place, list) or [*map(type, place)] != [str] * 3:
        raise Damaged(f"{kept / RECORD}: {_NESTING}: expected the place of the text model's tensors")
    if not (kept / TENSORS).is_file():
        raise Damaged(f"{kept / TENSORS}: no such file; it has the tensors beside the text model, which exports need")
    entries = read_entries(kept / TENSORS)
    return Towers(kept, config, Nesting(*place), dict.fromkeys(entries, kept / TENSORS), entries)


def towers_beside(folder: Path, files: Mapping[str, str], nesting: Nesting) -> Towers:
    """Return the towers in a Hugging Face folder. `files` has the file of each tensor that is not of the text model."""
    paths = {name: Path(os.path.realpath(folder / file)) for name, file in files.items()}
    entries: dict[str, TensorEntry] = {}
    for path in dict.fromkeys(paths.values()):
        entries |= {name: entry for name, entry in read_entries(path).items() if paths.get(name) == path}
    return Towers(folder, read_json(folder / "config.json"), nesting, paths, entries)


def towers_sentence(names: Collection[str]) -> str:
    """Return the sentence for the user on the tensors that do not belong to the text model."""
    if not names:
        return "no tensors beside the text model: an export needs --text-only"
    # Count tensors by the first part of their names, such as `visual`, without a leading `model.`.
    groups = Counter(name.partition(".")[0] if not name.startswith("model.") else name.split(".")[1] for name in names)
    listed = ", ".join(f"{count} of {group}" for group, count in groups.items())
    return f"only the text model is used; {len(names)} other tensors ({listed}) are kept for exports"


def _kept(folder: Path) -> Path | None:
    """Return the folder `towers` of a run, given the run's folder or one of its checkpoints; None if there is none."""
    return next((home / TOWERS for home in homes_of(folder) if (home / TOWERS).is_dir()), None)


def _copy_settings(source: Path, folder: Path) -> None:
    for name in SETTINGS:
        if (source / name).is_file():
            write_durable(folder / name, read_folder_file(source / name, JSON_BYTES, source))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        sync_file(Path(target))


def check_tensors(towers: Towers) -> None:
    """Raise BadInput if an export of the whole model is impossible: the towers have no tensors, or quantised ones.

    Without tensors the export would lack what the class of the whole model needs.
    """
    if not towers.entries:
        raise BadInput(
            f"{towers.folder}: the initial folder had no tensors beside its text model, so the whole model cannot be "
            "written; add --text-only for a folder of the text model"
        )
    quantised = [name for name, entry in towers.entries.items() if entry.dtype in QUANTISED]
    if quantised:
        raise BadInput(
            f"{towers.folder}: {quantised[0]} beside the text model is quantised, and an export is not; add --text-only for a "
            "folder of the text model"
        )
