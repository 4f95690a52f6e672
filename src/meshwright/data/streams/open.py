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
"""Folder of the user's cache."""
FEWEST_LANES = 256
INDEXES_AT_ONCE = 8


def lanes_for(global_batch: int) -> int:
    """`data.lanes` where the run does not set it."""
    return -(-FEWEST_LANES // global_batch) * global_batch


@dataclass(frozen=True)
class StreamTokenizer:
    """The tokenizer of the sources that are read without preparation, and its file."""

    loaded: LoadedTokenizer
    file: Path

    def difference(self, prepared: PreparedDirectory) -> str | None:
        """`PreparedDirectory.format_difference`, between the text of the streams and that of a directory."""
        manifest = prepared.manifest
        theirs = prepared.text_format
        if manifest is None or theirs is None:
            return None
        names = (str(self.file), str(prepared.path))
        return self.loaded.text.difference(theirs, *names, tokenizer_only=manifest.masked)


def stream_tokenizer(spec: DataSpec, prepared: Iterable[PreparedDirectory]) -> StreamTokenizer:
    """The tokenizer of the streams of `spec`: `data.tokenizer`, or that of the first `prepared` data with one. Raises BadInput."""
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
    """The sources of `spec.streams` that `spec.mix` names. Raises BadInput, Damaged and CommunicationFailure."""
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
    """What the loader processes of a run work with."""
    cache = Path(spec.cache) if spec.cache is not None else user_cache() / FOLDER
    document_end = tokenizer.loaded.text.document_end
    end = None if document_end is None else document_end.text
    return Settings(str(tokenizer.file.absolute()), end, str(cache.absolute()), int(spec.cache_gib * GiB), PATIENCE)


def read_index(settings: Settings, stream: StreamSpec) -> SourceIndex:
    """The index of a source, which a process of its own makes or brings up to date."""
    if is_url(stream.files):
        check_url(stream.files)
        return _index(settings, stream, ())
    return _index(settings, stream, tuple(LocalFiles().list(stream.files)))


@lru_cache(maxsize=16)
def _index(settings: Settings, stream: StreamSpec, listed: tuple[StoredFile, ...]) -> SourceIndex:
    """The index; of local files it is read again when their list is another one."""
    del listed
    request = {"op": "index", "files": stream.files, "text": stream.text}
    with Loaders(settings, 1) as loaders:
        path = Path(loaders.request(request).result()["path"])
    index = SourceIndex.read(path)
    if index is None:
        raise BadInput(f"{path}: is gone or damaged; start again")
    return index


def _lazy(make: Callable[[], Loaders]) -> Callable[[], Loaders]:
    """A function that makes the loaders at its first call."""
    made: list[Loaders] = []

    def get() -> Loaders:
        if not made:
            made.append(make())
        return made[0]

    return get


def check_streams(spec: DataSpec, refusals: Mapping[str, bool]) -> None:
    """Raise BadInput where streams meet a key that needs prepared data; `refusals` tells which of these are set."""
    for what, is_set in refusals.items():
        if is_set:
            raise BadInput(
                f"data.mix: {', '.join(spec.streamed)}: {what} needs prepared data; `meshwright data prepare` makes it",
                key="data.mix",
            )
