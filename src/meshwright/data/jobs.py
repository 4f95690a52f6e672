"""The pure step of a preparation: read, filter, sign and encode a unit of its files, in any process on any host.

A folder has the job as `job.json`, beside it the tokenizer, and gets the result of each unit (data/chunks.py). All hosts must see the
folder and the input files under the same names.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.data.chunks import write_chunk
from meshwright.data.cleaning import Cleaner, Cleaning
from meshwright.data.corpus import read_documents
from meshwright.data.encode import encode_documents, token_dtype
from meshwright.data.fast_encoder import EncodersDiffer, FastEncoder
from meshwright.data.inputs import InputFile
from meshwright.data.manifest import TokenizerRecord
from meshwright.data.reading import DocumentReading
from meshwright.data.text_format import TextFormat
from meshwright.data.tokenizer import LoadedTokenizer
from meshwright.data.tokenizer_file import tokenizer_in
from meshwright.data.units import CorpusUnit
from meshwright.durable.writes import write_durable
from meshwright.spec import errors
from meshwright.spec.errors import BadInput, MeshwrightError

JOB = "job.json"
FAILURES = (MeshwrightError, EncodersDiffer, OSError)
"""What a unit raises; `raised` makes it again in the main process."""


@dataclass(frozen=True)
class EncodeJob:
    """All that a worker has to know, besides the number of a unit. With `fast` texts are encoded by gigatoken."""

    folder: Path
    tokenizer: LoadedTokenizer
    text_key: str
    cleaning: Cleaning
    fast: bool
    units: tuple[CorpusUnit, ...]
    digests: dict[str, str]
    """Digests of the files that are divided."""

    def write(self) -> None:
        """Write the job into its folder."""
        plain = {
            "record": asdict(self.tokenizer.record),
            "text_format": self.tokenizer.text.to_plain(),
            "text_key": self.text_key,
            "cleaning": asdict(self.cleaning),
            "fast": self.fast,
            "units": [unit.to_plain() for unit in self.units],
            "digests": self.digests,
        }
        write_durable(self.folder / self.tokenizer.record.file, self.tokenizer.content)
        write_durable(self.folder / JOB, json.dumps(plain).encode() + b"\n")

    @classmethod
    def read(cls, folder: Path) -> EncodeJob:
        """The job of a folder. Raises OSError if there is none."""
        plain: dict[str, Any] = json.loads((folder / JOB).read_bytes())
        record = TokenizerRecord(**plain["record"])
        content = (folder / record.file).read_bytes()
        tokenizer = tokenizer_in(content, str(folder / record.file))
        tokenizer.encode_special_tokens = True
        text = TextFormat.from_plain(plain["text_format"], str(folder / JOB))
        cleaning = plain["cleaning"]
        return cls(
            folder,
            LoadedTokenizer(tokenizer, content, record, text),
            plain["text_key"],
            Cleaning(tuple(cleaning["filters"]), tuple(cleaning["evaluations"]), cleaning["duplicates"]),
            plain["fast"],
            tuple(CorpusUnit.from_plain(unit) for unit in plain["units"]),
            plain["digests"],
        )

    @property
    def dtype(self) -> str:
        """The type of the tokens."""
        return token_dtype(self.tokenizer.record.vocab_size)

    @cached_property
    def encoder(self) -> FastEncoder | None:
        """The fast encoder. Raises EncodersDiffer."""
        return FastEncoder(self.tokenizer.content, self.tokenizer.tokenizer, 1) if self.fast else None

    @cached_property
    def cleaner(self) -> Cleaner:
        """The filters, loaded."""
        return Cleaner(self.cleaning)

    def run(self, number: int) -> None:
        """Do a unit and write its result. Raises BadInput, EncodersDiffer, and OSError of a full disk."""
        unit = self.units[number]
        for file in unit.files:
            _check_unchanged(file)
        reading = DocumentReading(unit.files, (), lambda file: read_documents(file, self.text_key), self.cleaner)
        encoded = encode_documents(reading.documents(), self.tokenizer, self.dtype, 1, self.encoder)
        signed = self.cleaning.duplicates is not None
        write_chunk(self.folder, number, unit.size, encoded, reading, signed, self.cleaning.similarity is not None)


def failure(error: Exception) -> dict[str, Any]:
    """One of `FAILURES` as values of JSON, which a worker sends to the main process."""
    if isinstance(error, OSError):
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return {"error": "OSError", "errno": error.errno, "message": message}
    return {"error": type(error).__name__, "message": str(error)}


def raised(answer: dict[str, Any]) -> Exception:
    """The error that `failure` described."""
    kind = answer["error"]
    message = answer["message"]
    if kind == "OSError":
        return OSError(answer["errno"], message)
    if kind == EncodersDiffer.__name__:
        return EncodersDiffer(message)
    found = getattr(errors, kind, None)
    return found(message) if isinstance(found, type) and issubclass(found, MeshwrightError) else RuntimeError(message)


def _check_unchanged(file: InputFile) -> None:
    """Raise BadInput if a file is not as it was listed: this host does not see it, or it changed."""
    try:
        size = file.path.stat().st_size
    except FileNotFoundError:
        raise BadInput(f"{file.name}: is not there any more, or {socket.gethostname()} does not see it") from None
    except OSError:
        return  # its reader says why it cannot be read
    if size != file.size:
        raise BadInput(
            f"{file.name}: has {size:,} bytes, and had {file.size:,} when the inputs were listed; prepare again when it is written"
        )
