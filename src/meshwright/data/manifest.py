"""The manifest of a directory with prepared data: its contents, how to find and open it, and the check of its files.

    manifest.json                        the manifest
    tokenizer.json                       the tokenizer that made the shards
    inputs.jsonl                         the files that were read (data/input_record.py)
    shard-00000.bin, .idx                tokens, in Megatron's format (data/indexed.py)
    shard-00000.documents.jsonl          one line for each document: [source file, id], plus a score for answers that have one
    shard-00000.mask or .weights         only for chats: the weight of each token in the loss (data/token_weights.py)

A directory of `.bin`/`.idx` pairs without a manifest, written by another program, is called foreign. It can be read too, but its tokenizer
is unknown, and its documents have only numbers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from meshwright.data.indexed import IndexedFile, bin_path, idx_path
from meshwright.data.text_format import TextFormat
from meshwright.data.token_weights import KINDS, Kind, WeightFile, weight_path
from meshwright.data.tokenizer_file import MOST_TOKENS
from meshwright.durable.writes import digest, digest_file, write_durable
from meshwright.spec.errors import BadInput, Damaged, nearest
from meshwright.spec.fields import Bound, from_checked_plain
from meshwright.spec.folder_files import parse_json
from meshwright.spec.foreign_words import no_folder_hint

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
INPUTS = "inputs.jsonl"
UNFINISHED = "unfinished.json"
TRAIN = "train"
HELD_OUT = "held_out"
VERSION = 1
TOKEN_DTYPES = ("uint16", "int32")
Count = Annotated[int, Bound(at_least=0, at_most=1 << 60)]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer that made the shards; `eos` is the id that ends each document."""

    file: str
    vocab_size: Annotated[int, Bound(at_least=1, at_most=MOST_TOKENS)]
    digest: str
    eos: Annotated[int, Bound(at_least=0, less_than=MOST_TOKENS)]


@dataclass(frozen=True)
class Shard:
    """A pair of files `name`.bin and `name`.idx, with other files of the same name.

    `bytes` and `digest` (xxh3_128) have an entry for each file: "bin", "idx", "documents", and for chats "mask" or "weights".
    """

    name: str
    documents: Count
    tokens: Count
    text_bytes: Count
    bytes: dict[str, Count]
    digest: dict[str, str]

    @property
    def weights(self) -> Kind | None:
        """The kind of the shard's weight file; None if the shard is not of chats."""
        return next((kind for kind in KINDS if kind in self.digest), None)


@dataclass(frozen=True)
class PreferenceCounts:
    """Good and bad answers in a directory of preferences.

    With `kind` "pairs", good and bad answers alternate. With "labels", each answer has a label, in any order.
    """

    kind: Literal["pairs", "labels"]
    good: Count
    bad: Count


@dataclass(frozen=True)
class Manifest:
    """Record of one prepared directory."""

    tokenizer: TokenizerRecord
    dtype: str
    """Type of the tokens on disk, one of TOKEN_DTYPES."""
    shards: tuple[Shard, ...]
    skipped: Count
    """Bad documents that were skipped."""
    request: dict[str, Any]
    """The command that made the directory."""
    inputs: str
    """Digest of `inputs.jsonl`."""
    not_read: dict[str, dict[str, Count]]
    """Files and bytes that were not read, by reason."""
    text_format: TextFormat | None = None
    """How the texts were made into tokens. None only while a manifest is parsed."""
    unended_answers: Count = 0
    """In chats, answers without an end token."""
    trained_tokens: Count | None = None
    """In chats, tokens that are trained on; None for text."""
    preferences: PreferenceCounts | None = None
    """If set, each document is a prompt with one answer. The answer's tokens have weight 1 if the answer is good, -1 if it is bad."""
    removed: dict[str, dict[str, Count]] = field(default_factory=dict)
    """Documents and bytes of text that cleaning removed from the whole corpus, by reason."""

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        return sum(shard.text_bytes for shard in self.shards)

    @property
    def masked(self) -> bool:
        """Whether the shards are of chats."""
        return any(shard.weights is not None for shard in self.shards)

    def write(self, directory: Path) -> None:
        """Write `manifest.json` into `directory`. A crash leaves either the old file or the new one."""
        totals = {"tokens": self.tokens, "documents": self.documents, "text_bytes": self.text_bytes}
        assert self.text_format is not None
        values = {"version": VERSION, **totals, **asdict(self), "text_format": self.text_format.to_plain()}
        for name in ("preferences", "removed"):
            if not values[name]:
                del values[name]
        text = json.dumps(values, indent=1)
        write_durable(directory / MANIFEST, text.encode() + b"\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read `manifest.json` of `directory`. Raises Damaged if it is not a manifest of this version."""
        path = directory / MANIFEST
        try:
            return _parse(parse_json(path.read_bytes(), f"{path}: not a readable manifest", own=True), str(path))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(
                f"{path}: not a readable manifest ({type(error).__name__}: {error}); prepare again"
            ) from error


@dataclass(frozen=True)
class OpenShard:
    """A shard that passed the check at opening. `record` is None if the shard is foreign, `weights` if it is not of chats."""

    file: IndexedFile
    record: Shard | None
    weights: WeightFile | None = None


@dataclass(frozen=True)
class PreparedDirectory:
    """A directory opened for reading; `left_out` names the damaged shards that were skipped."""

    path: Path
    manifest: Manifest | None
    shards: tuple[OpenShard, ...]
    left_out: tuple[str, ...]

    @property
    def tokenizer_file(self) -> Path | None:
        return self.path / self.manifest.tokenizer.file if self.manifest else None

    @property
    def tokenizer_digest(self) -> str | None:
        """Digest of the tokenizer file; None if the directory is foreign."""
        return self.manifest.tokenizer.digest if self.manifest else None

    @property
    def text_format(self) -> TextFormat | None:
        """How texts were made into tokens; None if the directory is foreign."""
        return None if self.manifest is None else self.manifest.text_format

    def format_difference(self, other: PreparedDirectory) -> str | None:
        """A sentence about how the text formats of two directories differ. None if they are equal or if one directory is foreign.

        For chats only the tokenizers are compared, because the chat template writes the tokens that begin and end a text.
        """
        ours = self.manifest
        theirs = other.manifest
        if ours is None or theirs is None:
            return None
        if ours.tokenizer == theirs.tokenizer and ours.text_format == theirs.text_format:
            return None
        assert ours.text_format is not None and theirs.text_format is not None
        names = (str(self.path), str(other.path))
        return ours.text_format.difference(theirs.text_format, *names, tokenizer_only=ours.masked or theirs.masked)

    @property
    def content_digest(self) -> str:
        """Digest of all opened shards in order, from the digests in the manifest; for foreign shards, from their sizes only."""
        shards = [
            [shard.record.digest[key] for key in ("bin", "idx", *KINDS) if key in shard.record.digest]
            if shard.record
            else [shard.file.tokens, shard.file.documents]
            for shard in self.shards
        ]
        return digest(json.dumps(shards).encode())

    @property
    def order_digest(self) -> str:
        """Digest from which the order of samples is derived: of all shards in the manifest, or of the .idx files if there is none.

        It depends neither on the path of the directory nor on the files from which its text was read.
        """
        if self.manifest is not None:
            shards = [[shard.digest["bin"], shard.digest["idx"]] for shard in self.manifest.shards]
        else:
            shards = [[digest_file(shard.file.idx_path)] for shard in self.shards]
        return digest(json.dumps(shards).encode())


def open_directory(path: Path, damaged: Literal["refuse", "skip"] = "refuse") -> PreparedDirectory:
    """Open the prepared data at `path` (see `locate`). Sizes and header of every shard are compared with the manifest.

    If a shard does not match, Damaged is raised; with `damaged="skip"`, the shard is left out with a warning of one line. The decision
    depends on the files only, so every rank decides the same.
    """
    directory, stems = locate(path)
    manifest = Manifest.read(directory) if not stems else None
    if manifest is not None:
        _check_tokenizer(directory, manifest)
    shards = []
    left_out = []
    for stem, record in _shards_of(directory, manifest, stems):
        try:
            file = _check_shard(stem, record)
            kind = None if record is None else record.weights
            shards.append(OpenShard(file, record, None if kind is None else WeightFile(stem, file.tokens, kind)))
        except (Damaged, BadInput) as error:
            if damaged == "refuse":
                raise Damaged(f"{error}; `data.damaged: skip` leaves the shard out") from error
            left_out.append(stem.name)
            log.warning("left out damaged shard: %s", error)
    if not any(shard.file.tokens for shard in shards):
        raise Damaged(f"{directory}: no usable shard is left ({len(left_out)} damaged)")
    return PreparedDirectory(directory, manifest, tuple(shards), tuple(left_out))


def locate(path: Path) -> tuple[Path, tuple[Path, ...]]:
    """Find prepared or foreign data at `path`.

    Returns (directory, ()) for prepared data at `path` or `path/train`, and (directory, paths without suffix) for foreign `.bin`/`.idx`
    pairs. `path` may also be one foreign pair, with or without suffix. Raises BadInput if there is no data.
    """
    for directory in (path, path / TRAIN):
        if (directory / MANIFEST).is_file():
            return directory, ()
    if (path / UNFINISHED).is_file():
        raise BadInput(
            f"{path}: preparation was not finished; run the same `meshwright data prepare` again to continue it"
        )
    if path.is_dir():
        stems = tuple(sorted(file.with_suffix("") for file in path.glob("*.idx")))
        if stems:
            return path, stems
    single = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if idx_path(single).is_file():
        return single.parent, (single,)
    raise BadInput(_nothing_at(path))


def held_out_beside(path: Path) -> Path | None:
    """The held-out set that was prepared together with the data at `path`; None if there is none."""
    candidates = [path / HELD_OUT] + ([path.parent / HELD_OUT] if path.name == TRAIN else [])
    return next((folder for folder in candidates if (folder / MANIFEST).is_file()), None)


def verify(path: Path) -> list[str]:
    """Read every file of a prepared directory and of its held-out set, and compare digests. Returns one line for each fault.

    Foreign files have no digests; only their layout is checked.
    """
    faults = []
    held_out = held_out_beside(path)
    for directory, stems in [locate(path)] + ([locate(held_out)] if held_out and path.name != TRAIN else []):
        manifest = Manifest.read(directory) if not stems else None
        if manifest is not None:
            try:
                _check_tokenizer(directory, manifest)
            except Damaged as error:
                faults.append(str(error))
            record = _digest_or_none(directory / INPUTS)
            if record != manifest.inputs:
                faults.append(f"{directory / INPUTS}: expected digest {manifest.inputs}, found {record or 'no file'}")
        for stem, record in _shards_of(directory, manifest, stems):
            faults += _verify_shard(stem, record)
    return faults


def documents_path(stem: Path) -> Path:
    return stem.with_name(stem.name + ".documents.jsonl")


def shard_files(stem: Path) -> dict[str, Path]:
    """The paths of all files that a prepared shard can have, by their keys in the manifest."""
    weights = {kind: weight_path(stem, kind) for kind in KINDS}
    return {"bin": bin_path(stem), "idx": idx_path(stem), "documents": documents_path(stem), **weights}


def _shards_of(
    directory: Path, manifest: Manifest | None, stems: tuple[Path, ...]
) -> Iterator[tuple[Path, Shard | None]]:
    """(path without suffix, record) of each shard; the record of a foreign shard is None."""
    if manifest is None:
        yield from ((stem, None) for stem in stems)
    else:
        yield from ((directory / shard.name, shard) for shard in manifest.shards)


def _check_tokenizer(directory: Path, manifest: Manifest) -> None:
    """Raise Damaged if the tokenizer file in the directory is not the one that made the shards."""
    path = directory / manifest.tokenizer.file
    expected = manifest.tokenizer.digest
    actual = _digest_or_none(path)
    if actual != expected:
        raise Damaged(
            f"{path}: expected digest {expected} (by the manifest), found {actual or 'no file'}; put the tokenizer back"
        )


def _check_shard(stem: Path, record: Shard | None) -> IndexedFile:
    """Open a shard and compare sizes and counts with its record. Raises Damaged."""
    if record is not None:
        for key in [key for key in ("bin", "idx", *KINDS) if key in record.bytes]:
            path = shard_files(stem)[key]
            actual = path.stat().st_size if path.is_file() else None
            if actual != record.bytes[key]:
                actual_size = "no file" if actual is None else str(actual)
                raise Damaged(f"{path}: expected {record.bytes[key]} bytes (by the manifest), found {actual_size}")
    file = IndexedFile(stem)
    if record is None:
        file.check_layout()
    elif (file.tokens, file.documents) != (record.tokens, record.documents):
        expected = f"{record.tokens} tokens in {record.documents} documents (by the manifest)"
        raise Damaged(f"{file.idx_path}: expected {expected}, found {file.tokens} in {file.documents}")
    return file


def _verify_shard(stem: Path, record: Shard | None) -> list[str]:
    """One line for each fault of a shard, after all its files were read."""
    try:
        _check_shard(stem, record).check_layout()
    except (Damaged, BadInput) as error:
        return [str(error)]
    if record is None:
        return []
    actual = {key: _digest_or_none(path) for key, path in shard_files(stem).items() if key in record.digest}
    return [
        f"{shard_files(stem)[key]}: expected digest {expected}, found {actual[key] or 'no file'}"
        for key, expected in record.digest.items()
        if actual[key] != expected
    ]


def _digest_or_none(path: Path) -> str | None:
    return digest_file(path) if path.is_file() else None


def _parse(data: dict[str, Any], where: str) -> Manifest:
    """The manifest from parsed JSON. Raises ValueError that names the first wrong value, and Damaged for a wrong text format."""
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']}, this release reads version {VERSION}")
    totals = {key: data.get(key) for key in ("tokens", "documents", "text_bytes")}
    known = {field.name for field in fields(Manifest)} - {"text_format"}
    manifest = from_checked_plain(Manifest, {key: data[key] for key in data.keys() & known})
    if data.get("text_format") is None:
        raise ValueError("text_format: missing")
    manifest = replace(manifest, text_format=TextFormat.from_plain(data["text_format"], where))
    for name in (manifest.tokenizer.file, *(shard.name for shard in manifest.shards)):
        if Path(name).name != name or "\0" in name:
            raise ValueError(f"{name!r} leaves the directory")
    if manifest.dtype not in TOKEN_DTYPES:
        raise ValueError(f"dtype {manifest.dtype!r}, expected one of {', '.join(TOKEN_DTYPES)}")
    for shard in manifest.shards:
        names = shard.bytes.keys()
        one_kind = len(names & {*KINDS}) <= 1
        if names != shard.digest.keys() or names - {*KINDS} != {"bin", "idx", "documents"} or not one_kind:
            of_chats = " or ".join(KINDS)
            raise ValueError(
                f"{shard.name}: expected bytes and digest of bin, idx and documents, and of chats {of_chats}"
            )
    if not all({"files", "bytes"} <= figures.keys() for figures in manifest.not_read.values()):
        raise ValueError("not_read: expected files and bytes for each reason")
    if totals != {key: getattr(manifest, key) for key in totals}:
        raise ValueError("the totals are not the sums of the shards")
    return manifest


def _nothing_at(path: Path) -> str:
    siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    near = nearest(path.name, siblings)
    hint = f" (nearest: {path.parent / near})" if near else ""
    expected = f"expected {MANIFEST}, {TRAIN}/{MANIFEST} or .bin/.idx pairs"
    made = f"`meshwright data prepare INPUT --out {path}` makes it"
    if hub := no_folder_hint(str(path), dataset=True):
        made = f"`meshwright data prepare INPUT --out DIR` makes it of files{hub}"
    elif path.is_dir() and next(path.iterdir(), None) is not None:
        made = f"`meshwright data prepare {path} --out DIR` makes one of its texts, in another folder"
    return f"{path}: no prepared data here{hint}; {expected}. {made}"
