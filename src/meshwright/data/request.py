"""The request of a preparation; and whether an output directory has its result, a part of the result, or other data."""

from __future__ import annotations

import json
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import xxhash

from meshwright.data.chat import ChatFiles, read_chat_files
from meshwright.data.chat_template import TEXT_FILES, TOOL_TEMPLATE
from meshwright.data.cleaning import NO_CLEANING, Cleaning
from meshwright.data.inputs import InputFile
from meshwright.data.manifest import HELD_OUT, INPUTS, MANIFEST, TOKENIZER, TRAIN, UNFINISHED, Manifest
from meshwright.data.message_ranges import ASSISTANT
from meshwright.data.removed import REPORT
from meshwright.data.shards import JOURNAL
from meshwright.data.tokenizer import LoadedTokenizer, load_tokenizer, parse_train_request, tokenizer_folder
from meshwright.durable.writes import digest, remove_partials, write_durable
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.folder_files import parse_json

SHARD_TOKENS = 1 << 27
UNITS = "units"
"""Folder in the output directory with the results of units of work (data/chunks.py), until their documents are in shards."""
ENCODERS_DIFFER = ".encoders_differ"
"""Empty file in the output directory. It means that the fast encoder gave other ids for some batch, so `tokenizers` encodes all text."""


@dataclass(frozen=True)
class ChatRequest:
    """Records are chats: the roles to train on, and optionally a template to use instead of the tokenizer folder's.

    With `preferences`, a record has good or bad answers to a prompt (`data.preference_forms`).
    """

    roles: tuple[str, ...] = (ASSISTANT,)
    template: Path | None = None
    preferences: bool = False


@dataclass(frozen=True)
class Preparation:
    """The arguments that determine the bytes of the output. See `prepare.prepare`."""

    inputs: tuple[str, ...]
    tokenizer: str
    out: Path
    held_out: float = 0.0
    text_key: str = "text"
    on_bad: Literal["skip", "refuse"] = "skip"
    eos: str | None = None
    shard_tokens: int = SHARD_TOKENS
    chat: ChatRequest | None = None
    unended_answers: Literal["refuse", "accept"] = "refuse"
    cleaning: Cleaning = NO_CLEANING

    @cached_property
    def loaded(self) -> LoadedTokenizer | None:
        """The tokenizer of the request; None if it must be trained first. Raises BadInput if it cannot be used."""
        if parse_train_request(self.tokenizer) is not None:
            return None
        chat = self.chat_files()
        return load_tokenizer(Path(self.tokenizer), self.eos, template=None if chat is None else chat.source)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.loaded.record.vocab_size if self.loaded is not None else parse_train_request(self.tokenizer) or 0

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder with the tokenizer's file; None if the tokenizer must be trained first."""
        return None if self.loaded is None else tokenizer_folder(Path(self.tokenizer))

    def directories(self) -> dict[str, Path]:
        """The output directory of each split."""
        return {TRAIN: self.out / TRAIN, HELD_OUT: self.out / HELD_OUT} if self.held_out else {TRAIN: self.out}

    def split_of(self, key: str) -> str:
        """The split of a document. It depends only on the document's key, so other files can be added or removed without changing it."""
        share = xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogateescape")) / 2**64
        return HELD_OUT if share < self.held_out else TRAIN

    def check(self) -> None:
        """Raise BadInput if arguments cannot be used. Called before anything is written."""
        if not 0 <= self.held_out < 1:
            raise BadInput(f"held-out fraction {self.held_out}: expected at least 0 and below 1, for example 0.01")
        if self.shard_tokens < 1:
            raise BadInput(f"shard size {self.shard_tokens}: expected a positive number of tokens")
        if self.chat is not None:
            self._check_chat(self.chat)
        self.cleaning.check()
        _ = self.loaded
        with suppress(FileNotFoundError):
            # Call stat once instead of exists() and is_dir(): between two calls, another process could remove its empty directory.
            if not stat.S_ISDIR(self.out.stat().st_mode):
                raise BadInput(f"{self.out}: is a file, expected a directory to write into")

    def _check_chat(self, chat: ChatRequest) -> None:
        if parse_train_request(self.tokenizer) is not None:
            raise BadInput(f"--tokenizer {self.tokenizer}: chats need the folder of a model, with its template")
        if not chat.roles or not all(chat.roles):
            raise BadInput("--train-roles: expected roles with commas between them, for example assistant,tool")
        if self.cleaning.wanted:
            raise BadInput("--filter, --evaluation and --deduplicate: are for text, not for chats and preferences")

    def chat_files(self) -> ChatFiles | None:
        """The template of chats; None for texts. Raises BadInput if there is none."""
        return None if self.chat is None else read_chat_files(Path(self.tokenizer), self.chat.template)

    def describe(self, files: list[InputFile]) -> dict[str, Any]:
        """The request as it is stored in the manifest."""
        listing = "\n".join(f"{file.name}\t{file.size}" for file in files)
        text = None if self.loaded is None else self.loaded.text
        end = None if text is None else text.document_end
        chat = self.chat_files()
        roles = () if self.chat is None else self.chat.roles
        preferences = {"preferences": True} if self.chat is not None and self.chat.preferences else {}
        return {
            "inputs": list(self.inputs),
            "input_files": len(files),
            "input_bytes": sum(file.size for file in files),
            "input_digest": digest(listing.encode("utf-8", "surrogateescape")),
            "tokenizer": self.tokenizer,
            "tokenizer_digest": None if text is None else text.tokenizer,
            "eos": self.eos,
            "document_end": None if end is None else end.text,
            "begin": [] if text is None else [token.text for token in text.begin],
            "held_out": self.held_out,
            "text_key": self.text_key,
            "shard_tokens": self.shard_tokens,
            "chat": None
            if chat is None
            else {"template_digest": chat.digest, "train_roles": list(roles)} | preferences,
            **self.cleaning.describe(),
        }


def finished_manifests(preparation: Preparation) -> dict[str, Manifest]:
    """The manifests in `preparation.out`, if every split is complete; else empty."""
    directories = preparation.directories()
    complete = all((directory / MANIFEST).is_file() for directory in directories.values())
    if not complete or (preparation.out / UNFINISHED).exists():
        return {}
    return {split: Manifest.read(directory) for split, directory in directories.items()}


def begin(preparation: Preparation, files: list[InputFile], request: dict[str, Any]) -> None:
    """Store the request in `out`, or continue an earlier attempt at the same request.

    If there was an attempt at another request, BadInput is raised if it has finished a shard; otherwise its files are removed.
    """
    times = json.dumps([[file.modified_ns, file.changed_ns] for file in files])
    full = {**request, "newest_input_ns": newest_input_ns(files), "input_times": digest(times.encode())}
    begin_request(preparation.out, full, request)


def begin_request(out: Path, full: dict[str, Any], request: dict[str, Any]) -> None:
    """Like `begin`. `full` is the request together with everything else on which an attempt depends."""
    path = out / UNFINISHED
    if path.is_file():
        before = parse_json(path.read_bytes(), path, own=True, hint=f"; remove {out} and prepare again")
        if not isinstance(before, dict):
            raise Damaged(f"{path}: expected the request of a preparation; remove {out} and prepare again")
        if (out / JOURNAL).exists():
            check_same(out, before, full)
        if before == full:
            for directory in (out, out / TRAIN, out / HELD_OUT):  # not `units`: other processes may write there
                remove_partials(directory)
            return
        forget(out)
    else:
        _check_unused(out, request)
    write_durable(path, json.dumps(full, indent=1).encode() + b"\n")


def newest_input_ns(files: list[InputFile]) -> int:
    """The time in ns at which the newest of the files was changed."""
    return max(file.modified_ns for file in files)


def check_same(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise BadInput that names the differences between the request in `out` and this one, if there are any."""
    differing = [key for key in now if before.get(key) != now[key]]
    if differing:
        changes = "; ".join(f"{key}: {before.get(key)} before, {now[key]} now" for key in differing)
        raise BadInput(f"{out}: holds the work of a different command ({changes}); choose another --out or remove it")


def _check_unused(out: Path, request: dict[str, Any]) -> None:
    for directory in (out, out / TRAIN):
        if (directory / MANIFEST).is_file():
            check_same(out, Manifest.read(directory).request, request)
            raise BadInput(f"{out}: a part of what was prepared here is missing; choose another --out or remove it")
    other_entries = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith((".", UNFINISHED)))
    if other_entries:
        raise BadInput(f"{out}: is not empty (it holds {other_entries[0]}); choose an empty or new directory for --out")


def forget(out: Path) -> None:
    """Remove the files of an attempt that has finished no shard."""
    (out / UNFINISHED).unlink(missing_ok=True)
    for split in (TRAIN, HELD_OUT):
        if (out / split).is_dir():
            shutil.rmtree(out / split)
    shutil.rmtree((out / TOOL_TEMPLATE).parent, ignore_errors=True)
    for name in (TOKENIZER, *TEXT_FILES, INPUTS, ENCODERS_DIFFER, REPORT):
        (out / name).unlink(missing_ok=True)
    forget_shards(out)


def forget_shards(out: Path) -> None:
    """Remove the shards and units of an unfinished attempt."""
    shutil.rmtree(out / UNITS, ignore_errors=True)
    (out / JOURNAL).unlink(missing_ok=True)
    for directory in (out, out / TRAIN, out / HELD_OUT):
        for file in directory.glob("shard-*"):
            file.unlink(missing_ok=True)
