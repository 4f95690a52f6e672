"""The part of a preparation that depends on one unit only: read, filter, sign and encode the documents of a unit.

Any process on any host can do it. The folder of a job has the job itself in `job.json`, the tokenizer, and the results
of the units (data/chunks.py). All hosts must see the folder and the input files under the same paths.
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
"""Name of the file that describes the job."""
FAILURES = (MeshwrightError, EncodersDiffer, OSError)
"""Errors that a unit may raise. A worker sends one as `failure` describes it, and the main process raises it again (`error_of`)."""


@dataclass(frozen=True)
class EncodeJob:
    """Everything that a worker needs to know except the number of the unit."""

    folder: Path
    """Folder of the job and of its results."""
    tokenizer: LoadedTokenizer
    text_key: str
    """Key or column of the text in records."""
    cleaning: Cleaning
    """What is removed."""
    fast: bool
    """Whether texts are encoded by gigatoken."""
    units: tuple[CorpusUnit, ...]
    """All units of the job. A unit is known by its number in this list."""
    digests: dict[str, str]
    """Digests of the files that are divided into several units, by name."""

    def write(self) -> None:
        """Write the job and its tokenizer into the folder."""
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
        """Read the job of a folder. Raises OSError if there is none."""
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
        """Name of the NumPy type in which the tokens are stored."""
        return token_dtype(self.tokenizer.record.vocab_size)

    @cached_property
    def encoder(self) -> FastEncoder | None:
        """The fast encoder; None if it is not used. Raises EncodersDiffer if it disagrees with the tokenizer."""
        return FastEncoder(self.tokenizer.content, self.tokenizer.tokenizer, 1) if self.fast else None

    @cached_property
    def cleaner(self) -> Cleaner:
        """The filters and evaluations, loaded."""
        return Cleaner(self.cleaning)

    def run(self, number: int) -> None:
        """Do unit `number` and write its result. Raises BadInput, EncodersDiffer, and OSError, for example of a full disk."""
        unit = self.units[number]
        for file in unit.files:
            _check_unchanged(file)
        reading = DocumentReading(unit.files, (), lambda file: read_documents(file, self.text_key), self.cleaner)
        encoded = encode_documents(reading.documents(), self.tokenizer, self.dtype, 1, self.encoder)
        signed = self.cleaning.duplicates is not None
        write_chunk(self.folder, number, unit.size, encoded, reading, signed, self.cleaning.similarity is not None)


def failure(error: Exception) -> dict[str, Any]:
    """Describe one of `FAILURES` as JSON values, so that a worker can send it to the main process."""
    if isinstance(error, OSError):
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return {"error": "OSError", "errno": error.errno, "message": message}
    return {"error": type(error).__name__, "message": str(error)}


def error_of(answer: dict[str, Any]) -> Exception:
    """Return the error that `failure` described as `answer`, as an exception that can be raised."""
    kind = answer["error"]
    message = answer["message"]
    if kind == "OSError":
        return OSError(answer["errno"], message)
    if kind == EncodersDiffer.__name__:
        return EncodersDiffer(message)
    found = getattr(errors, kind, None)
    return found(message) if isinstance(found, type) and issubclass(found, MeshwrightError) else RuntimeError(message)


def _check_unchanged(file: InputFile) -> None:
    """Raise BadInput if a file has another size than when it was listed, or if this host does not see it."""
    try:
        size = file.path.stat().st_size
    except FileNotFoundError:
        raise BadInput(f"{file.name}: is not there any more, or {socket.gethostname()} does not see it") from None
    except OSError:
        return  # The reader will report why the file cannot be read.
    if size != file.size:
        raise BadInput(
            f"{file.name}: has {size:,} bytes, and had {file.size:,} when the inputs were listed; prepare again when it is written"
        )
