"""The data of a run: maps a global sample index to token arrays, and to the documents from which they came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from meshwright.data.chat_template import TEMPLATE
from meshwright.data.conversations import ConversationWindows
from meshwright.data.documents import DocumentSamples
from meshwright.data.inputs import STDLIB
from meshwright.data.manifest import (
    HELD_OUT,
    TRAIN,
    Manifest,
    PreparedDirectory,
    TokenizerRecord,
    held_out_beside,
    locate,
    open_directory,
)
from meshwright.data.packing import PackedWindow, pack
from meshwright.data.preference_windows import PreferenceWindows, padded
from meshwright.data.prepared_source import CorpusSource
from meshwright.data.single_conversations import SingleConversations, TokenizedConversation
from meshwright.data.slots import TokenReader
from meshwright.data.streams.open import StreamTokenizer, check_streams, open_streams, stream_tokenizer
from meshwright.data.streams.source import FIRST_AHEAD, StreamSource
from meshwright.data.text_format import TextFormat
from meshwright.data.token_bytes import TokenBytes
from meshwright.data.tokenizer_file import open_tokenizer
from meshwright.data.verification import ShardVerifier
from meshwright.policies.sample_order import InTurn, Mixture
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.job import DataSpec, StreamSpec
from meshwright.spec.preference import PreferenceSpec

Split = Literal["train", "validation"]
MISMATCHED = ("tokens", "targets", "positions", "documents")
"""Columns of a window in which prompts have the answers of other prompts."""


@dataclass(frozen=True)
class SampleBatch:
    """Samples as int64 arrays `(samples, seq)`. A target of -1 is not trained on.

    - `real` `(samples, seq)`, bool: False for padding. None if no source can have padding.
    - `weights` `(samples, seq)`, float32: weights of the targets in the loss. None if all weights are 0 or 1.
    - `columns`: further arrays that an objective reads, for preferences those of `DataSource.preference_columns`.
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    real: np.ndarray | None = None
    weights: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)


def open_data(
    spec: DataSpec,
    *,
    seq_len: int,
    seed: int,
    vocab_size: int | None = None,
    split: Split = "train",
    stdlib: Path | None = None,
    verifier: ShardVerifier | None = None,
    conversations: bool = False,
    preference: PreferenceSpec | None = None,
) -> DataSource:
    """Open the data that `spec` names.

    With `split="train"` this is the mixture to train on. With `split="validation"` it is the text kept for validation: one source after
    another, and within a source the documents in the order of `ContentOrder`. With `data.packing: none`, samples are documents; otherwise
    they are windows of `seq_len` tokens.

    `vocab_size` is the model's. A tokenizer with more tokens is refused here; a token id that is too large is refused when it is read.
    `stdlib` is the folder for the source `stdlib`, by default the user's cache. `verifier` gets each shard when its first sample is read.
    With `conversations`, the samples are single conversations of chats (`DataSource.conversation`). `preference` is given for a run whose
    data have good and bad answers.

    Raises BadInput, and Damaged as `data.damaged` says.
    """
    paths = _train_paths(spec, stdlib) if split == "train" else _validation_paths(spec, stdlib, seq_len)
    streamed = split == "train" and bool(spec.streamed)
    if streamed:
        check_streams(
            spec,
            {"data.packing none": spec.packing == "none", "rl": conversations, "preference": preference is not None},
        )
    if not paths and not streamed:
        hint = "prepare with --held-out FRACTION, or set data.validation"
        beside = ", ".join(map(str, _train_paths(spec, stdlib).values()))
        missing = f"no {HELD_OUT} of more than {_fewest_tokens(spec, seq_len)} tokens beside {beside}"
        raise BadInput(f"no validation data: {missing}; {hint}")
    packing = spec.packing if split == "train" or spec.packing == "none" else "stream"
    by_content = split == "validation" and preference is None
    sources = [
        CorpusSource(
            name,
            open_directory(path, spec.damaged),
            seq_len,
            packing,
            by_content=by_content,
            conversations=conversations,
            preference=preference,
        )
        for name, path in paths.items()
    ]
    if split == "train" and preference is not None:
        _check_labels(sources, preference)
        _check_scores(sources)
    tokenizer = stream_tokenizer(spec, (source.directory for source in sources)) if streamed else None
    streams = {} if tokenizer is None else open_streams(spec, tokenizer, seq_len=seq_len, seed=seed)
    _check_tokenizers(sources, tokenizer, vocab_size)
    if split == "train":
        _check_different(sources)
    chats = any(source.stream.masked for source in sources)
    document_mask = chats or packing == "none" if spec.document_mask is None else spec.document_mask
    if preference is not None and not document_mask:
        raise BadInput(
            "data.document_mask: expected true, as answers of one sequence do not see each other",
            key="data.document_mask",
        )
    weights = {name: spec.mix.get(name, 1.0) for name in [*paths, *streams]}
    windows = {source.name: source.windows for source in [*sources, *streams.values()]}
    order: Mixture | InTurn = InTurn(windows)
    if split == "train":
        digests = {source.name: source.directory.order_digest for source in sources}
        digests |= {name: stream.index.digest for name, stream in streams.items()}
        order = Mixture(weights, windows, seed, identities=digests)
    return DataSource(
        sources,
        weights,
        order,
        seq_len,
        document_mask,
        vocab_size,
        verifier,
        streams=streams,
        stream_tokenizer=tokenizer,
    )


def has_validation(spec: DataSpec, seq_len: int, stdlib: Path | None = None) -> bool:
    """Whether `open_data(..., split="validation")` would find data.

    Without `data.validation`, the text must be long enough for a sample.
    """
    return bool(_validation_paths(spec, stdlib, seq_len))


def preference_of(path: Path) -> PreferenceSpec | None:
    """Settings with which to read the good and bad answers prepared at `path`; None if there are none. Raises BadInput and Damaged."""
    directory, foreign = locate(path)
    found = None if foreign else Manifest.read(directory).preferences
    if found is None:
        return None
    return PreferenceSpec(loss="dpo" if found.kind == "pairs" else "kto", too_long="leave_out")


class DataSource:
    """All samples of a run, by global sample index.

    The order of samples, `order`, depends on the contents of the sources, not on their paths. `weights` has the weight of each source in
    `data.mix`.
    """

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        weights: Mapping[str, float],
        order: Mixture | InTurn,
        seq_len: int,
        document_mask: bool,
        vocab_size: int | None,
        verifier: ShardVerifier | None = None,
        *,
        streams: Mapping[str, StreamSource] | None = None,
        stream_tokenizer: StreamTokenizer | None = None,
    ) -> None:
        self.sources = {source.name: source for source in sources}
        """The prepared sources."""
        self.streams = dict(streams or {})
        """The sources that are read without preparation. They are encoded by `stream_tokenizer`."""
        self.stream_tokenizer = stream_tokenizer
        self._step_samples = 1
        self.weights = weights
        self.seq_len = seq_len
        self.document_mask = document_mask
        self._limit = vocab_size
        self._fills = any(source.packing is not None for source in sources)
        """Whether windows of any source may end with padding."""
        self._answers = max(
            (source.layout.most_answers for source in sources if isinstance(source.layout, PreferenceWindows)),
            default=0,
        )
        """The number of answers in the window that has the most; 0 without preferences."""
        self._weighted = not self._answers and any(source.stream.weighted for source in sources)
        self.mismatched = False
        """Whether samples of preferences get columns with mismatched answers."""
        self._verifier = verifier
        self._used: set[int] = set()
        """Numbers of the shards that the verifier has got. Shards are numbered over all sources."""
        self._set_order(order)

    def _set_order(self, order: Mixture | InTurn) -> None:
        """Set the order of samples, and what depends on it."""
        self.order = order
        self._ordered = [self.sources[name] for name in order.names if name in self.sources]
        self._numbers = [number for number, name in enumerate(order.names) if name in self.sources]
        """Numbers of the prepared sources in `order.names`."""
        for number, name in enumerate(order.names):
            if name in self.streams and isinstance(order, Mixture):
                self.streams[name].drawn = partial(order.drawn_by_lane, number, self.streams[name].lanes)
        self._epochs = [-1] * len(self._ordered)
        self._first_numbers = list(accumulate((len(source.stream.files) for source in self._ordered), initial=0))

    def cursors(self, sample: int) -> dict[str, np.ndarray]:
        """The position of each lane of each stream before global sample `sample`, as far as this rank knows it."""
        return {name: stream.cursors(sample) for name, stream in self.streams.items()}

    def restore_cursors(self, cursors: Mapping[str, Any], record: Mapping[str, Any], *, accept: bool = False) -> None:
        """Continue from the `cursors` in a checkpoint. `record` is what the checkpoint says about the streams.

        Raises BadInput if a stream has changed since the checkpoint. With `accept`, a changed stream begins again from its start.
        """
        for name, stream in self.streams.items():
            if name not in cursors:
                continue
            known = np.array(cursors[name], dtype=np.int64)
            if record.get(name) != stream.record():
                if not accept or len(known) != stream.lanes:
                    raise BadInput(
                        f"data.mix: {name}: changed since the checkpoint that the run goes on from; put the earlier files back, or set "
                        "data.changed=accept to go on with these from their beginning",
                        key="data.mix",
                    )
                known[:, 1:] = 0
            stream.restore(known)

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size of the data's tokenizer; None if no source has one."""
        return max((record.vocab_size for record in self._tokenizers), default=None)

    @property
    def _tokenizers(self) -> list[TokenizerRecord]:
        """The tokenizers of the sources that have a known one."""
        known = [source.directory.manifest.tokenizer for source in self._ordered if source.directory.manifest]
        return known + ([] if self.stream_tokenizer is None else [self.stream_tokenizer.loaded.record])

    @property
    def eos(self) -> int | None:
        """Id of the token that ends each document; None if no source has one."""
        return next((record.eos for record in self._tokenizers), None)

    @property
    def tokenizer_file(self) -> Path | None:
        """The `tokenizer.json` of the data; None if no source has one. If there are chats, it is one with a chat template in its folder."""
        source = self._describing()
        if source is None:
            return None if self.stream_tokenizer is None else self.stream_tokenizer.file
        return source.directory.tokenizer_file

    @property
    def has_chats(self) -> bool:
        """Whether any source has chats."""
        return any(source.stream.masked for source in self._ordered)

    @property
    def text_format(self) -> TextFormat | None:
        """The format of the texts, with the end tokens of answers from all sources of chats. None if no source has a tokenizer."""
        source = self._describing()
        if source is None:
            return None if self.stream_tokenizer is None else self.stream_tokenizer.loaded.text
        text = source.directory.text_format
        if text is None:
            return None
        texts = [each.directory.text_format for each in self._ordered if each.stream.masked]
        return text.with_answer_ends(dict.fromkeys(end for each in texts if each for end in each.answer_ends))

    def _describing(self) -> CorpusSource | None:
        """The source whose tokenizer files stand for all data: if possible one of chats, then one with a chat template."""
        known = [source for source in self._ordered if source.directory.manifest]
        with_template = [source for source in known if (source.directory.path / TEMPLATE).is_file()]
        return next(iter([source for source in known if source.stream.masked] or with_template or known), None)

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes that each token id adds to a text, `(vocabulary,)` int64; 0 for special tokens and for the end of a document.

        None if a source has no tokenizer, or if the bytes of a token depend on the tokens around it.
        """
        file = self.tokenizer_file
        if file is None or any(source.directory.manifest is None for source in self._ordered):
            return None
        tokens = TokenBytes(open_tokenizer(file))
        if tokens.form is None:
            return None
        size = 1 + max(tokens.tokenizer.get_vocab(with_added_tokens=True).values())
        counts = np.array([len(tokens.plain[token]) for token in range(max(size, self._limit or 0))], dtype=np.int64)
        counts[self.eos] = 0
        return counts

    def record(self) -> dict[str, dict[str, str | None]]:
        """What a checkpoint records about each source: digests of its content, of its tokenizer, and of the order of its samples."""
        return {
            source.name: {"content": source.directory.content_digest, "tokenizer": source.directory.tokenizer_digest}
            | _identity(source.directory)
            | {"order": source.directory.order_digest}
            | ({} if source.packing is None else {"packing": source.packed})
            for source in self._ordered
        } | {name: stream.record() for name, stream in self.streams.items()}

    def epochs(self, samples: int) -> dict[str, float]:
        """How often the first `samples` samples pass through each source; 1.0 is one complete pass."""
        drawn = self.order.drawn(samples).tolist()
        pairs = zip(self.order.names, drawn, self.order.windows, strict=True)
        return {name: count / windows for name, count, windows in pairs}

    @property
    def windows(self) -> int:
        """Number of different windows, over all sources."""
        return sum(self.order.windows)

    def begin_step(self, indices: Sequence[int] | np.ndarray) -> None:
        """Check the data of a step before it is read. `indices` are the samples of all ranks, so all ranks check the same.

        When a source begins an epoch, the sizes of its files are compared with their sizes at opening. When a step first uses a shard, the
        verifier gets it. Raises Damaged, also for faults that the verifier has found.
        """
        self._step_samples = len(indices)
        draws = self.order.draws(np.asarray(indices, dtype=np.int64))
        for place, (number, source) in enumerate(zip(self._numbers, self._ordered, strict=True)):
            of_source = draws.source == number
            epoch = int(draws.epoch[of_source].max(initial=-1))
            if epoch not in (-1, self._epochs[place]):
                self._epochs[place] = epoch
                source.check_sizes()
            if self._verifier is not None:
                self._verify(place, source.layout.files_of(draws.window[of_source]))
        if self._verifier is not None:
            self._verifier.check()

    def _verify(self, source: int, shards: set[int]) -> None:
        """Give the shards of a source that are new to the verifier."""
        assert self._verifier is not None
        first = self._first_numbers[source]
        new = sorted({first + shard for shard in shards} - self._used)
        self._used.update(new)
        self._verifier.add((number, self._ordered[source].directory.shards[number - first]) for number in new)

    def samples(self, indices: Sequence[int] | np.ndarray) -> SampleBatch:
        """The samples with these global indices, in the order given.

        Raises Damaged when a token id does not fit the model's vocabulary, naming file and offset.
        """
        if not self.streams:
            return self.batch(self._locate_samples(indices))
        names = self.order.names
        step = self._step_samples
        located = zip(self._draws(indices), np.asarray(indices).tolist(), strict=True)
        packed = []
        for (number, window), index in located:
            stream = self.streams.get(names[number])
            if stream is None:
                packed.append(self._sample(self.sources[names[number]], window))
                continue
            read = stream.read(index)
            packed.append(pack(read.tokens, read.begins, self.document_mask, read.weights, read.real))
            stream.prepare(range(index + step, index + (FIRST_AHEAD + 1) * step, step))
        return self._stacked(packed)

    def batch(self, places: Sequence[tuple[CorpusSource, int]]) -> SampleBatch:
        """The given windows, each with its source, in the order given. Raises Damaged as `samples` does."""
        columns = self.preference_columns(places) if self._answers else {}
        return self._stacked([self._sample(source, window) for source, window in places], columns)

    def _stacked(self, packed: Sequence[PackedWindow], columns: Mapping[str, np.ndarray] | None = None) -> SampleBatch:
        return SampleBatch(
            tokens=np.stack([sample.tokens for sample in packed]),
            targets=np.stack([sample.targets for sample in packed]),
            positions=np.stack([sample.positions for sample in packed]),
            documents=np.stack([sample.documents for sample in packed]),
            real=self._real(packed) if self._fills else None,
            weights=self._weights(packed) if self._weighted else None,
            columns=columns or {},
        )

    def preference_columns(self, places: Sequence[tuple[CorpusSource, int]]) -> dict[str, np.ndarray]:
        """Further columns for windows of preferences. Document k of a window is its answer k; A is the most answers of any window.

        | column | shape | content |
        |---|---|---|
        | `answers` | (samples, A) int64 | numbers of the answers in their source; -1 for none |
        | `signs` | (samples, A) float32 | 1 for a good answer, -1 for a bad one, 0 for none |
        | `sources` | (samples,) int64 | number of the source |
        | `scores` | (samples, A) float64 | only if a reward model reads scores from the data |
        | `reference` | (samples, A) float64 | only with reference log-probabilities |
        | `mismatched_tokens`, `_targets`, `_positions`, `_documents` | (samples, seq) int64 | only with `mismatched` |
        | `mismatched_reference` | (samples, A) float64 | only with both |
        """
        count = self._answers
        rows = []
        for source, window in places:
            assert isinstance(source.layout, PreferenceWindows)
            found = source.layout.answers(window)
            row: dict[str, np.ndarray] = {
                "answers": padded(found.numbers, count, -1),
                "signs": padded(found.signs, count, 0),
                "sources": np.array(self._ordered.index(source)),
            }
            if source.reference is not None:
                row["reference"] = self._known(source, source.reference, found.numbers)
            if source.scores is not None:
                row["scores"] = padded(source.scores[found.numbers], count, 0.0)
            if self.mismatched:
                moved = source.layout.mismatched(window)
                other = pack(moved.tokens, moved.begins, True, moved.weights)
                row |= {f"mismatched_{name}": getattr(other, name) for name in MISMATCHED}
                if source.mismatched_reference is not None:
                    row["mismatched_reference"] = self._known(source, source.mismatched_reference, found.numbers)
            rows.append(row)
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _known(self, source: CorpusSource, reference: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Reference log-probabilities of the answers with these `numbers`, padded. Raises BadInput if one is not known."""
        found = reference[numbers]
        if np.isnan(found).any():
            raise BadInput(
                f"{source.name}: an answer has no reference log-probability, as the run left out samples before; start the same command "
                "again, which computes it"
            )
        return padded(found, self._answers, 0.0)

    def _weights(self, packed: Sequence[PackedWindow]) -> np.ndarray:
        """The weights of the targets in the loss, `(samples, seq)` float32."""
        whole = np.ones(self.seq_len, dtype=np.float32)
        return np.stack([whole if sample.weights is None else sample.weights for sample in packed]).astype(np.float32)

    def _real(self, packed: Sequence[PackedWindow]) -> np.ndarray:
        """For each input, whether it is not padding, `(samples, seq)` bool."""
        real = [self.seq_len if sample.real is None else sample.real for sample in packed]
        return np.arange(self.seq_len) < np.array(real)[:, None]

    def conversation(self, index: int) -> TokenizedConversation:
        """The conversation with this global index. The source must have been opened with `conversations`."""
        source, number = self._locate_samples([index])[0]
        assert isinstance(source.layout, SingleConversations), "opened without conversations"
        conversation = source.layout.read(number)
        self._check_ids(source, number, conversation.tokens)
        return conversation

    def lengths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Number of inputs of each sample with these global indices, int64. No tokens are read."""
        draws = self.order.draws(np.asarray(indices, dtype=np.int64))
        lengths = np.full(len(draws.source), self.seq_len, dtype=np.int64)
        for number, source in zip(self._numbers, self._ordered, strict=True):
            if isinstance(source.layout, DocumentSamples):
                of_source = draws.source == number
                lengths[of_source] = source.layout.lengths(draws.window[of_source])
        return lengths

    def token_reader(self, indices: Sequence[int] | np.ndarray) -> TokenReader:
        """A function (sample, start, stop) that reads a range of tokens of one of these samples, which must be documents.

        It raises Damaged as `samples` does.
        """
        places = self._locate_samples(indices)

        def read(sample: int, start: int, stop: int) -> np.ndarray:
            source, window = places[sample]
            assert isinstance(source.layout, DocumentSamples), "windows of a stream are read whole"
            tokens = source.layout.read_range(window, start, stop)
            self._check_ids(source, window, tokens, start)
            return tokens

        return read

    def describe(self, index: int) -> dict[str, Any]:
        """The origin of a global sample: `{global_index, source, documents: [{file, id, start, end}], tokens}`.

        For chats, `trained` has the ranges [start, stop) of tokens that are trained on. If weights other than 1 are possible, `weights` has
        the weight of each range. For chats, `tokens` does not count padding.
        """
        ((number, _),) = self._draws([index])
        if (stream := self.streams.get(self.order.names[number])) is not None:
            places = stream.describe(index)
            documents = [
                {"file": each.file, "id": each.place, "start": each.start, "end": each.stop} for each in places
            ]
            return {"global_index": index, "source": stream.name, "documents": documents, "tokens": self.seq_len}
        source, window = self._locate_samples([index])[0]
        documents, (length,) = source.describe(window), self.lengths([index]).tolist()
        described = {"global_index": index, "source": source.name, "documents": documents, "tokens": length}
        if not isinstance(source.layout, ConversationWindows):
            return described
        weights = source.layout.weights(window)
        described |= {"tokens": len(weights), "trained": (trained := _ranges(weights))}
        return described | (
            {"weights": [float(weights[start]) for start, _ in trained]} if source.stream.weighted else {}
        )

    def target_counts(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """How often each token id is a target of the samples with these global indices, int64."""
        counts = np.zeros(0, dtype=np.int64)
        for index in np.asarray(indices).tolist():
            targets = self.samples([index]).targets[0]
            more = np.bincount(targets[targets >= 0], minlength=len(counts))
            more[: len(counts)] += counts
            counts = more
        return counts

    def _locate_samples(self, indices: Sequence[int] | np.ndarray) -> list[tuple[CorpusSource, int]]:
        return [(self.sources[self.order.names[source]], window) for source, window in self._draws(indices)]

    def _draws(self, indices: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
        """(number of the source, window) of each sample. For a stream, the window has no meaning."""
        draws = self.order.draws(np.asarray(indices, dtype=np.int64))
        return list(zip(draws.source.tolist(), draws.window.tolist(), strict=True))

    def _sample(self, source: CorpusSource, window: int) -> PackedWindow:
        layout = source.layout
        assert not isinstance(layout, SingleConversations), "single conversations are read by `conversation`"
        read = layout.read(window, self.document_mask)
        self._check_ids(source, window, read.tokens)
        return pack(read.tokens, read.begins, self.document_mask, read.weights, read.real)

    def _check_ids(self, source: CorpusSource, window: int, tokens: np.ndarray, start: int = 0) -> None:
        """Raise Damaged unless all `tokens` fit the model's vocabulary. The first of them is token `start` of the window."""
        if tokens.min() < 0 or (self._limit is not None and tokens.max() >= self._limit):
            self._refuse(source, window, tokens, start)

    def _refuse(self, source: CorpusSource, window: int, tokens: np.ndarray, start: int) -> NoReturn:
        limit = np.iinfo(np.int64).max if self._limit is None else self._limit
        at = int(np.flatnonzero((tokens < 0) | (tokens >= limit))[0])
        file, token = source.layout.locate(window, start + at)
        expected = "an id that is not negative" if self._limit is None else f"an id below model.vocab_size {limit}"
        offset = file.token_offset(token)
        raise Damaged(f"{file.bin_path}: offset {offset}: expected {expected}, found token {tokens[at]}")


def _check_scores(sources: Sequence[CorpusSource]) -> None:
    """Raise BadInput if scores of answers are needed and no source has any.

    A pair's scores always differ, so zeros mean that it has none.
    """
    if all(source.scores is not None and not source.scores.any() for source in sources):
        raise BadInput(
            f"{sources[0].directory.path}: no pair has scores, whose difference preference.score_margin reads; prepare records with "
            "score_chosen and score_rejected, or leave the key out",
            key="preference.score_margin",
        )


def _check_labels(sources: Sequence[CorpusSource], preference: PreferenceSpec) -> None:
    """Raise BadInput if `kto` has only good or only bad answers, or if every window has only one answer."""
    if preference.paired:
        return
    counts = [source.directory.manifest.preferences for source in sources if source.directory.manifest]
    good, bad = (sum(getattr(count, name) for count in counts if count) for name in ("good", "bad"))
    if not good or not bad:
        label = "good" if good else "bad"
        raise BadInput(
            f"data.mix: all {good + bad:,} answers are {label}; kto needs answers of both labels, as it compares each with the others",
            key="data.mix",
        )
    if all(isinstance(source.layout, PreferenceWindows) and source.layout.most_answers < 2 for source in sources):
        raise BadInput(
            "train.seq_len: no two answers fit in a sequence, and kto compares with answers to other prompts in it; raise it",
            key="train.seq_len",
        )


def _identity(directory: PreparedDirectory) -> dict[str, str | None]:
    """The digest of the tokenizer that does not depend on the file's layout, if the manifest has it."""
    text = directory.text_format
    return {} if text is None else {"tokenizer_identity": text.tokenizer}


def _ranges(weights: np.ndarray) -> list[list[int]]:
    """The ranges [start, stop) of consecutive equal weights other than 0."""
    bounds = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(weights)]
    return [[start, stop] for start, stop in pairwise(bounds) if start < stop and weights[start]]


def _path_of(name: str, stdlib: Path | None) -> Path:
    if name != STDLIB or Path(name).exists():
        return Path(name)
    from meshwright.data.stdlib import ensure_stdlib, stdlib_folder

    return ensure_stdlib(stdlib or stdlib_folder())


def _train_paths(spec: DataSpec, stdlib: Path | None) -> dict[str, Path]:
    return {name: _path_of(name, stdlib) for name in sorted(spec.mix) if name not in spec.streams}


def _validation_paths(spec: DataSpec, stdlib: Path | None, seq_len: int) -> dict[str, Path]:
    """Directories of validation data. If `data.validation` names a source that is not in the mixture, training data are not prepared."""
    if spec.validation in spec.streams:
        return {spec.validation: _validation_of_files(spec, spec.streams[spec.validation], stdlib)}
    if spec.validation is not None:
        path = _path_of(spec.validation, stdlib)
        held_out = held_out_beside(path) if path.name != TRAIN else None
        return {spec.validation: held_out or path}
    train = _train_paths(spec, stdlib)
    beside = {name: held_out for name, path in train.items() if (held_out := held_out_beside(path))}
    manifests = {name: Manifest.read(folder) for name, folder in beside.items()}
    fewest = _fewest_tokens(spec, seq_len)
    return {name: beside[name] for name, held_out in manifests.items() if held_out.masked or held_out.tokens > fewest}


def _validation_of_files(spec: DataSpec, stream: StreamSpec, stdlib: Path | None) -> Path:
    """The prepared directory with validation text from files that are read without preparation."""
    from meshwright.data.streams.held_out import validation_directory  # prepares data, which most runs do without

    if spec.validation in spec.mix:
        raise BadInput(
            f"data.validation: {spec.validation} is trained on, as a source of data.mix", key="data.validation"
        )
    directories = (open_directory(path, spec.damaged) for path in _train_paths(spec, stdlib).values())
    return validation_directory(spec, stream, stream_tokenizer(spec, directories))


def _fewest_tokens(spec: DataSpec, seq_len: int) -> int:
    """A source must have more tokens than this to have a sample."""
    return 1 if spec.packing == "none" else seq_len


def same_text(first: PreparedDirectory, second: PreparedDirectory) -> bool:
    """Whether two directories have the same text: the same directory, or a copy. Copies of foreign shards are not recognised."""
    if first.path.resolve() == second.path.resolve():
        return all(a.file.stem.name == b.file.stem.name for a, b in zip(first.shards, second.shards, strict=False))
    known = first.manifest is not None and second.manifest is not None
    return known and first.content_digest == second.content_digest


def _check_different(sources: Sequence[CorpusSource]) -> None:
    """Raise BadInput if two sources have the same text."""
    for first, second in combinations(sources, 2):
        if same_text(first.directory, second.directory):
            raise BadInput(
                f"data.mix: {first.name} and {second.name} are the same text; name it once, with the weight that both together should have"
            )


def _check_tokenizers(
    sources: Sequence[CorpusSource], of_streams: StreamTokenizer | None, vocab_size: int | None
) -> None:
    if of_streams is not None:
        tokens = of_streams.loaded.record.vocab_size
        has = f"{of_streams.file}: the tokenizer has {tokens} tokens"
        if vocab_size is not None and tokens > vocab_size:
            raise BadInput(f"{has}, expected at most model.vocab_size {vocab_size}", key="data.tokenizer")
        for source in sources:
            if difference := of_streams.difference(source.directory):
                raise BadInput(f"data.tokenizer: {difference}; leave data.tokenizer out", key="data.tokenizer")
    tokenizers = [(source, source.directory.manifest.tokenizer) for source in sources if source.directory.manifest]
    for source, tokenizer in tokenizers:
        if difference := tokenizers[0][0].directory.format_difference(source.directory):
            raise BadInput(f"data.mix: {difference}; prepare both with the same tokenizer and --eos")
        if vocab_size is not None and tokenizer.vocab_size > vocab_size:
            has = f"its tokenizer has {tokenizer.vocab_size} tokens"
            raise BadInput(f"{source.directory.path}: {has}, expected at most model.vocab_size {vocab_size}")
