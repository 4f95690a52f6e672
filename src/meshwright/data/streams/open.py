"""Opens the sources of a run that are read without preparation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from meshwright.data.manifest import PreparedDirectory
from meshwright.data.streams.group_file import Cache
from meshwright.data.streams.index import SourceIndex
from meshwright.data.streams.loaders import Loaders
from meshwright.data.streams.patterns import check_url, is_url
from meshwright.data.streams.process import Settings
from meshwright.data.streams.source import StreamSource
from meshwright.data.streams.stores import PATIENCE, LocalFiles, StoredFile
from meshwright.data.tokenizer import LoadedTokenizer, load_tokenizer
from meshwright.spec.chips import GiB
from meshwright.spec.errors import BadInput, attach_key
from meshwright.spec.folders import user_cache
from meshwright.spec.job import DataSpec, StreamSpec

FOLDER = "streams"
"""Name of the folder in the user's cache."""
FEWEST_LANES = 256
"""The default number of lanes is at least this."""
INDEXES_AT_ONCE = 8
"""Indexes that are read at the same time."""


def lanes_for(global_batch: int) -> int:
    """Return the default of `data.lanes`: the least multiple of `global_batch` that is at least FEWEST_LANES."""
    return -(-FEWEST_LANES // global_batch) * global_batch


@dataclass(frozen=True)
class StreamTokenizer:
    """The tokenizer of the sources that are read without preparation, and the path of its `tokenizer.json`."""

    loaded: LoadedTokenizer
    """The tokenizer."""
    file: Path
    """Path of its `tokenizer.json`."""

    def difference(self, prepared: PreparedDirectory) -> str | None:
        """Return the first difference between the text formats of the streams and of a prepared directory, in words.

        It compares like `PreparedDirectory.format_difference`. None if there is no difference, or if the directory
        records no text format.
        """
        manifest = prepared.manifest
        theirs = prepared.text_format
        if manifest is None or theirs is None:
            return None
        names = (str(self.file), str(prepared.path))
        return self.loaded.text.difference(theirs, *names, tokenizer_only=manifest.masked)


def stream_tokenizer(spec: DataSpec, prepared: Iterable[PreparedDirectory]) -> StreamTokenizer:
    """Load the tokenizer of the streams of `spec`.

    It is `data.tokenizer` if set, otherwise the tokenizer of the first directory in `prepared` that was written by this
    program. Raises BadInput if there is no tokenizer.
    """
    directory = next((each for each in prepared if each.manifest), None)
    end = None
    if spec.tokenizer is not None:
        file = Path(spec.tokenizer)
    elif directory is not None and directory.tokenizer_file is not None:
        file = directory.tokenizer_file
        text = directory.text_format
        end = text.document_end.text if text is not None and text.document_end is not None else None
    else:
        raise BadInput(
            "data.tokenizer: not set, and no prepared data in data.mix has one; name a tokenizer.json or a model's folder",
            key="data.tokenizer",
        )
    with attach_key("data.tokenizer"):
        loaded = load_tokenizer(file, end)
    return StreamTokenizer(loaded, file / "tokenizer.json" if file.is_dir() else file)


def open_streams(spec: DataSpec, tokenizer: StreamTokenizer, *, seq_len: int, seed: int) -> dict[str, StreamSource]:
    """Open each source of `spec.streams` that `spec.mix` names, and return the sources by name.

    They share their loader processes, which start at the first request. Raises BadInput, Damaged and
    CommunicationFailure.
    """
    settings = settings_of(spec, tokenizer)
    loaders = _lazy(lambda: Loaders(settings, spec.loaders))

    def open_one(name: str, stream: StreamSpec) -> StreamSource:
        with attach_key(f"data.mix.{name}"):
            return StreamSource(
                name,
                stream,
                read_index(settings, stream),
                seq_len=seq_len,
                lanes=spec.lanes or FEWEST_LANES,
                seed=seed,
                tokenizer=tokenizer.loaded,
                cache=Cache(Path(settings.cache), settings.cache_bytes),
                loaders=loaders,
            )

    named = spec.streamed
    with ThreadPoolExecutor(INDEXES_AT_ONCE, "index") as pool:
        return dict(zip(named, pool.map(open_one, named.keys(), named.values()), strict=True))


def settings_of(spec: DataSpec, tokenizer: StreamTokenizer) -> Settings:
    """Return the settings of the loader processes of a run."""
    cache = Path(spec.cache) if spec.cache is not None else user_cache() / FOLDER
    document_end = tokenizer.loaded.text.document_end
    end = None if document_end is None else document_end.text
    return Settings(str(tokenizer.file.absolute()), end, str(cache.absolute()), int(spec.cache_gib * GiB), PATIENCE)


def read_index(settings: Settings, stream: StreamSpec) -> SourceIndex:
    """Return the index of a source. A loader process of its own makes it, or updates the one in the cache."""
    if is_url(stream.files):
        check_url(stream.files)
        return _index(settings, stream, ())
    return _index(settings, stream, tuple(LocalFiles().list(stream.files)))


@lru_cache(maxsize=16)
def _index(settings: Settings, stream: StreamSpec, listed: tuple[StoredFile, ...]) -> SourceIndex:
    """Read the index.

    `listed` is only a key of the cache of this function: when the list of local files changes, the index is read again.
    """
    del listed
    request = {"op": "index", "files": stream.files, "text": stream.text}
    with Loaders(settings, 1) as loaders:
        path = Path(loaders.request(request).result()["path"])
    index = SourceIndex.read(path)
    if index is None:
        raise BadInput(f"{path}: is gone or damaged; start again")
    return index


def _lazy(make: Callable[[], Loaders]) -> Callable[[], Loaders]:
    """Return a function that starts the loaders at its first call and returns the same loaders afterwards."""
    made: list[Loaders] = []

    def get() -> Loaders:
        if not made:
            made.append(make())
        return made[0]

    return get


def check_streams(spec: DataSpec, refusals: Mapping[str, bool]) -> None:
    """Raise BadInput if the run uses streams together with a feature that needs prepared data.

    `refusals` maps the name of each such feature to whether the run uses it.
    """
    for what, is_set in refusals.items():
        if is_set:
            raise BadInput(
                f"data.mix: {', '.join(spec.streamed)}: {what} needs prepared data; `meshwright data prepare` makes it",
                key="data.mix",
            )
