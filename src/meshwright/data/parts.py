"""Preparation on independent hosts. `--part I/N` prepares a part of the files; `data merge` joins all parts to one corpus.

Each part has consecutive files. The parts, one after another, give the same corpus that a single host would make. The folder of a part
contains `part.json`, the tokenizer, and in `units` the results of its units of work (data/chunks.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.data.chat_template import copy_chat_files
from meshwright.data.chunk_stream import ChunkStream, UnitPlace, totals
from meshwright.data.chunks import TOKENS, ChunkRecord, has_documents, read_record
from meshwright.data.cleaning import Cleaning
from meshwright.data.corpus import read_documents
from meshwright.data.disk_space import check_space, full_disk_named, prepared_bytes
from meshwright.data.fast_encoder import EncodersDiffer
from meshwright.data.input_record import input_record
from meshwright.data.inputs import InputFile, check_text_key, list_inputs
from meshwright.data.jobs import JOB, EncodeJob
from meshwright.data.left_out import LeftOut
from meshwright.data.manifest import MANIFEST, TOKENIZER, TRAIN, UNFINISHED
from meshwright.data.prepare import (
    Encoder,
    PreparedCorpus,
    check_splits,
    fast_encoder,
    job_of,
    refuse_bad,
    run_units,
    split_writers,
    tell,
    tokenizer_of,
    write_corpus,
    write_shards,
)
from meshwright.data.progress import progress
from meshwright.data.ray_workers import check_ray
from meshwright.data.request import (
    ENCODERS_DIFFER,
    UNITS,
    Preparation,
    begin,
    begin_request,
    check_same,
    finished_manifests,
    forget,
    forget_shards,
)
from meshwright.data.shards import JOURNAL
from meshwright.data.tokenizer import LoadedTokenizer
from meshwright.durable.lock import locked
from meshwright.durable.writes import write_durable
from meshwright.spec.errors import BadInput, Damaged, MeshwrightError, nearest
from meshwright.spec.folder_files import parse_json
from meshwright.spec.host_limits import usable_cores

PART = "part.json"
VERSION = 1


@dataclass(frozen=True)
class CorpusPart:
    """Part `number` of `count` parts. Numbers begin at 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> CorpusPart:
        """The part that a text such as "2/8" names. Raises BadInput for another form or a number out of range."""
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise BadInput(f"--part {text}: expected I/N with I from 1 to N, for example 2/8")
        return cls(int(number), int(count))

    def files(self, files: Sequence[InputFile]) -> list[InputFile]:
        """The files of this part. All bytes are divided into `count` equal shares; a file belongs to the share that contains its middle."""
        total = sum(file.size for file in files) or 1
        return [file for file in files if (2 * file.before + file.size) * self.count // (2 * total) == self.number - 1]


@dataclass(frozen=True)
class PreparedPart:
    """A part that is finished."""

    out: Path
    part: CorpusPart
    documents: int
    tokens: int
    left_out: LeftOut
    reused: bool


@dataclass(frozen=True)
class _PartRecord:
    """The content of `part.json`."""

    folder: Path
    part: CorpusPart
    request: dict[str, Any]
    """The request for the whole corpus; all parts have the same."""
    units: int
    """Number of units in this part."""
    fast: bool
    """Whether the fast encoder (gigatoken) encoded this part."""
    differs: bool
    """Whether the fast encoder gave other ids than `tokenizers` here."""
    rows: list[list[Any]]
    """For each file: name, size in bytes, modification time and inode change time in nanoseconds."""
    left_out: dict[str, Any]
    """Inputs that were left out when the files were listed, for the whole corpus."""


def prepare_part(
    preparation: Preparation,
    part: CorpusPart,
    *,
    text_key: str | None = None,
    workers: int | None = None,
    ray: str | None = None,
    encoder: Encoder = "auto",
    shown: bool = False,
) -> PreparedPart:
    """Prepare one part of a corpus in the folder `preparation.out`.

    If an earlier call was killed, the same call continues it; if the part is finished, it is returned as it is. Raises BadInput as
    `prepare` does.
    """
    if preparation.chat is not None:
        raise BadInput("--part: is for text; chats and preferences are prepared on one host")
    if ray is not None:
        check_ray(chats=False)
    preparation.check()
    out = preparation.out
    listed, not_read = list_inputs(preparation.inputs, exclude=out)
    check_text_key(text_key, listed)
    request = preparation.describe(listed)
    files = part.files(listed)
    whole = {**request, "part": str(part)}
    with locked(out, wait=False):
        if (out / MANIFEST).is_file() or (out / TRAIN / MANIFEST).is_file():
            raise BadInput(f"{out}: holds a corpus; choose another --out for a part of one")
        if (out / PART).is_file() and not (out / UNFINISHED).is_file():
            record = read_part(out)
            check_same(out, {**record.request, "part": str(record.part)}, whole)
            if not (record.fast and encoder == "tokenizers"):
                return _result(record, reused=True)
            (out / PART).unlink()
            forget(out)
        begin(preparation, listed, whole)
        try:
            if preparation.on_bad == "refuse":
                refuse_bad(files, not_read, lambda file: read_documents(file, preparation.text_key))
            needed = prepared_bytes(files, preparation.vocab_size)
            if not (out / UNITS).exists():
                check_space(out, needed)
            with full_disk_named(out, needed):
                tokenizer = tokenizer_of(preparation, listed, shown)
                job = _run_part(preparation, listed, files, tokenizer, workers or usable_cores(), ray, encoder, shown)
        except MeshwrightError:
            if not any((out / UNITS).glob("unit-*.json")):
                forget(out)
            raise
        listing = LeftOut()
        for item in not_read:
            listing.add(item)
        plain = {
            "version": VERSION,
            "part": asdict(part),
            "request": request,
            "units": len(job.units),
            "fast": job.fast,
            "differs": (out / ENCODERS_DIFFER).exists(),
            "rows": [[file.name, file.size, file.modified_ns, file.changed_ns] for file in files],
            "left_out": asdict(listing),
        }
        write_durable(out / PART, json.dumps(plain).encode() + b"\n")
        (out / UNFINISHED).unlink()
        return _result(read_part(out), reused=False)


def _run_part(
    preparation: Preparation,
    listed: list[InputFile],
    files: Sequence[InputFile],
    tokenizer: LoadedTokenizer,
    workers: int,
    ray: str | None,
    encoder: Encoder,
    shown: bool,
) -> EncodeJob:
    """Do the units of a part that have no result yet. If the two encoders differ, start again with `tokenizers`."""
    out = preparation.out
    fast = fast_encoder(preparation, listed, tokenizer, workers, encoder, shown) is not None
    job = job_of(preparation, files, tokenizer, fast)
    records = [read_record(job.folder, unit) for unit in range(len(job.units))]
    undone = [unit for unit, record in enumerate(records) if record is None]
    try:
        with progress("preparing the part", sum(file.size for file in files), shown) as report:
            for unit in run_units(job.folder, undone, workers, ray):
                records[unit] = read_record(job.folder, unit)
                report(*totals(record for record in records if record is not None))
    except EncodersDiffer as difference:
        tell(difference, shown)
        forget_shards(out)
        (out / ENCODERS_DIFFER).touch()
        return _run_part(preparation, listed, files, tokenizer, workers, ray, encoder, shown)
    return job


def read_part(folder: Path) -> _PartRecord:
    """The record of the part in `folder`. Raises BadInput if the part is missing or unfinished, Damaged if its record is unreadable."""
    path = folder / PART
    if not path.is_file() or (folder / UNFINISHED).is_file():
        raise BadInput(_no_part(folder))
    try:
        plain = parse_json(path.read_bytes(), path, own=True)
        if plain["version"] != VERSION:
            raise Damaged(f"{path}: version {plain['version']}, this release reads version {VERSION}")
        return _PartRecord(
            folder,
            CorpusPart(**plain["part"]),
            plain["request"],
            plain["units"],
            plain["fast"],
            plain["differs"],
            plain["rows"],
            plain["left_out"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path}: no record of a part ({error!r}); prepare this part again") from None


def merge(folders: Sequence[Path], out: Path, *, shown: bool = False) -> PreparedCorpus:
    """Join the parts in `folders` to one corpus in `out`, equal to the corpus that one host would have made. The parts are not deleted.

    Raises BadInput, naming the part, if a part is missing, unfinished, given twice, or was prepared by another command. Raises Damaged if
    files of a part are missing.
    """
    parts = sorted((read_part(folder) for folder in folders), key=lambda record: record.part.number)
    _check_parts(parts)
    units = {record.folder: _unit_records(record) for record in parts}
    for record in parts:
        for unit, of_unit in enumerate(units[record.folder]):
            if not has_documents(record.folder / UNITS, unit, of_unit):
                files = f"{record.folder / UNITS}: files of unit {unit} are missing or have other sizes"
                raise Damaged(f"{files}; remove {record.folder} and prepare this part again")
    request = parts[0].request
    preparation = _preparation(request, out)
    with locked(out, wait=False):
        if done := finished_manifests(preparation):
            check_same(out, done[TRAIN].request, request)
            return PreparedCorpus(out, done, LeftOut(), reused=True)
        begin_request(out, {**request, "merged": [record.units for record in parts]}, request)
        try:
            needed = sum(of_unit.bytes[TOKENS] for records in units.values() for of_unit in records)
            if not (out / JOURNAL).exists():
                check_space(out, needed)
            with full_disk_named(out, needed):
                return _merge(parts, preparation, shown)
        except MeshwrightError:
            if not (out / JOURNAL).exists():
                forget(out)
            raise


def _merge(parts: Sequence[_PartRecord], preparation: Preparation, shown: bool) -> PreparedCorpus:
    """Write the corpus from parts that have passed all checks."""
    jobs = [EncodeJob.read(record.folder / UNITS) for record in parts]
    total_bytes = sum(size for record in parts for _, size, _, _ in record.rows)
    tokenizer = jobs[0].tokenizer
    source = next(iter(_directories(preparation, parts[0].folder)))
    for directory in preparation.directories().values():
        directory.mkdir(exist_ok=True)
        copy_chat_files(source, directory)
        write_durable(directory / TOKENIZER, tokenizer.content)
    stream = ChunkStream(
        [UnitPlace(job.folder, unit) for job in jobs for unit in range(len(job.units))],
        jobs[0].dtype,
        tokenizer.tokenizer,
        preparation.out / UNITS,
        duplicates=preparation.cleaning.duplicates is not None,
        similarity=preparation.cleaning.similarity,
        total_bytes=total_bytes,
        shown=shown,
    )
    stream.left_out.merge(LeftOut.from_plain(parts[0].left_out))
    for job in jobs:
        stream.digests.update(job.digests)
    writers = split_writers(preparation, tokenizer)
    write_shards(stream.documents(preparation.split_of, writers), writers, total_bytes, shown)
    check_splits(preparation, writers, stream.left_out, stream.removed)
    rows = [
        InputFile(Path(name), name, name, size, modified_ns=modified, changed_ns=changed)
        for record in parts
        for name, size, modified, changed in record.rows
    ]
    manifests = write_corpus(
        preparation,
        writers,
        tokenizer,
        tokenizer.text,
        parts[0].request,
        input_record(rows, stream.digests),
        stream.left_out,
        stream.removed,
    )
    return PreparedCorpus(preparation.out, manifests, stream.left_out, reused=False, removed=stream.removed)


def _check_parts(parts: Sequence[_PartRecord]) -> None:
    """Raise BadInput unless `parts` are all the parts of one corpus, each part once."""
    first = parts[0]
    for record in parts[1:]:
        if record.part.count != first.part.count:
            raise BadInput(
                f"{record.folder}: is part {record.part}, and {first.folder} is part {first.part}; a corpus has parts of one division"
            )
        differing = [key for key in first.request if first.request[key] != record.request.get(key)]
        if differing:
            changes = "; ".join(
                f"{key}: {first.request[key]} in {first.folder}, {record.request.get(key)} in {record.folder}"
                for key in differing
            )
            raise BadInput(f"{record.folder}: was prepared by another command ({changes}); prepare that part again")
    folders: dict[int, Path] = {}
    for record in parts:
        if record.part.number in folders:
            raise BadInput(
                f"{record.folder}: is part {record.part}, as is {folders[record.part.number]}; name each once"
            )
        folders[record.part.number] = record.folder
    missing = [number for number in range(1, first.part.count + 1) if number not in folders]
    if missing:
        names = ", ".join(str(CorpusPart(number, first.part.count)) for number in missing)
        raise BadInput(f"part {names}: missing; name the folders of all {first.part.count} parts")
    if any(record.differs for record in parts) and any(record.fast for record in parts):
        again = ", ".join(str(record.part) for record in parts if record.fast)
        found = next(record for record in parts if record.differs)
        raise BadInput(
            f"{found.folder}: gigatoken gave other ids than tokenizers here; prepare the parts that it encoded again with "
            f"--encoder tokenizers: {again}"
        )


def _preparation(request: dict[str, Any], out: Path) -> Preparation:
    """The preparation of the whole corpus in `out`, from the request in the records of the parts."""
    names = {key: [name for name, _ in request[key] or ()] for key in ("filters", "evaluations")}
    return Preparation(
        tuple(request["inputs"]),
        request["tokenizer"],
        out,
        request["held_out"],
        request["text_key"],
        shard_tokens=request["shard_tokens"],
        cleaning=Cleaning(tuple(names["filters"]), tuple(names["evaluations"]), request["duplicates"]),
    )


def _directories(preparation: Preparation, folder: Path) -> list[Path]:
    """The folders of the splits inside the folder of a part."""
    return [folder / directory.relative_to(preparation.out) for directory in preparation.directories().values()]


def _result(record: _PartRecord, reused: bool) -> PreparedPart:
    left_out = LeftOut.from_plain(record.left_out)
    records = _unit_records(record)
    for of_unit in records:
        left_out.merge(of_unit.left_out)
    _, documents, tokens = totals(records)
    return PreparedPart(record.folder, record.part, documents, tokens, left_out, reused)


def _unit_records(record: _PartRecord) -> list[ChunkRecord]:
    """The records of the units of a part. Raises Damaged if one is missing."""
    records = []
    for unit in range(record.units):
        of_unit = read_record(record.folder / UNITS, unit)
        if of_unit is None:
            missing = f"{record.folder / UNITS}: the result of unit {unit} is missing"
            raise Damaged(f"{missing}; remove {record.folder} and prepare this part again")
        records.append(of_unit)
    return records


def _no_part(folder: Path) -> str:
    if (folder / UNFINISHED).is_file() or (folder / UNITS / JOB).is_file():
        return f"{folder}: this part is not finished; run its `meshwright data prepare --part` again to continue it"
    siblings = [each.parent.name for each in folder.parent.glob(f"*/{PART}")] if folder.parent.is_dir() else []
    near = nearest(folder.name, siblings)
    hint = f" (nearest: {folder.parent / near})" if near else ""
    return f"{folder}: no prepared part here{hint}; `meshwright data prepare --part I/N --out DIR` makes one"
