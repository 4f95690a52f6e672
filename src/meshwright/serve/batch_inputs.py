"""The tensors of one step, made from the policy's plan and copied to the device in one piece.

Each running request has a row in the block tables and in the vector of newest tokens, both on the device. A decode reads its token and its
block table there; the host copies only blocks that were added to the request since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.policies.batch_request import EngineStep, RequestPart
from meshwright.serve.copy_buffer import CopyBuffer
from meshwright.serve.packed_drafts import PackedDrafts, sample_arrays

PROMPT_UNIT = 1024
"""On a GPU cuDNN computes this many tokens of a prompt, or a multiple, without the cache.

It is a quarter faster than the kernel of the cache, but prepares a plan for each number of tokens, about 50 ms.
"""
Array = np.ndarray
NO_DRAFTS: Mapping[int, Sequence[int]] = MappingProxyType({})
NO_SCORES: Mapping[int, int] = MappingProxyType({})


class StepInputs(NamedTuple):
    """The tensors of one step, int32. Its sequences are decodes, then chunks that read the cache, then other chunks."""

    tokens: Tensor
    """`(tokens,)`."""
    positions: Tensor
    """`(tokens,)`, from 0 in each request."""
    slots: Tensor
    """`(groups, tokens)`: places of the tokens in the cache of each group; -1 for padding."""
    block_tables: tuple[Tensor, ...]
    """Block tables of each group, `(sequences, blocks)`."""
    context_lengths: Tensor
    """`(sequences,)`: tokens of each request up to the end of this step; 0 for padding."""
    query_starts: Tensor
    """`(sequences + 1,)`: the first token of each sequence, then the number of tokens."""
    decodes: int
    """Sequences at the front that have `decode_queries` tokens each."""
    prompts: tuple[int, ...]
    """Tokens of each sequence at the end that begins at position 0 and attends to the keys and values of this step alone."""
    sampled: Tensor | None
    """`(samples,)`: indices of the tokens whose logits are needed; None for all."""
    decode_queries: int = 1
    scored: bool = False
    """Whether the runner keeps the normed outputs of all tokens (`ModelRunner.normed`)."""


class PackedScores(NamedTuple):
    """The tokens of a step whose logits give log probabilities of the prompt's next tokens."""

    counts: Sequence[tuple[int, int]]
    """Number of each request, and how many of the tokens are its own, in their order."""
    indices: Tensor
    """`(tokens,)` int32: indices of the tokens in the step."""
    targets: Tensor
    """`(tokens,)` int32: the next token of each."""


class PackedStep(NamedTuple):
    """A step on the device. Tokens that the host does not know yet are placeholders, which `resolve` fills in."""

    decode_size: int | None
    """Sequences of a step of decodes only, with padding; None for a mixed step."""
    decodes: int
    """Sequences at the front that are decodes, without padding."""
    sampled_rows: Tensor
    """`(samples,)`: table rows of the requests that get a token; one with drafts has a sample for each of its tokens."""
    sampled_positions: Tensor
    """`(samples,)`: positions of their new tokens."""
    sampled_parts: Sequence[RequestPart]
    """The parts that get a token, in the order of `sampled_rows`, each once."""
    blocks: int
    """Columns of the block tables that the step reads."""
    mixed: StepInputs | None
    """The inputs of a mixed step."""
    drafts: PackedDrafts | None = None
    decode_queries: int = 1
    """Tokens of each sequence of a step of decodes only: more than one if a decode has drafts."""
    sampled_tokens: Tensor | None = None
    """`(samples,)` int32: tokens of a step of decodes with drafts whose logits are needed; None for a token of each decode."""
    following: Tensor | None = None
    """`(predictions, sequences)`: the tokens after each sequence of a mixed step, arbitrary where the host does not know them."""
    scores: PackedScores | None = None


class BatchInputs:
    """Makes the inputs of steps; holds the block tables and the newest token of each table row.

    `table_rows` is the number of rows of the tables, `blocks` the most blocks of a request, `step_tokens` the most tokens of a step.
    `groups` is the number of groups of layers that share a block table. Of a chunk that begins at position 0, the largest multiple
    of `prompt_unit` tokens attends to itself without the cache; 0 means none. `drafts` is the most draft tokens of a decode. Mixed steps
    have `PackedStep.following` for so many `predictions`.
    """

    def __init__(
        self,
        *,
        table_rows: int,
        blocks: int,
        groups: int,
        tokens_per_block: int,
        step_tokens: int,
        device: torch.device,
        prompt_unit: int = 0,
        drafts: int = 0,
        predictions: int = 0,
    ) -> None:
        self.prompt_unit, self.step_tokens, self.drafts, self.predictions = (
            prompt_unit,
            step_tokens,
            drafts,
            predictions,
        )
        self.padding_row, self.groups, self.tokens_per_block, self.device = table_rows, groups, tokens_per_block, device
        self._on_host = device.type != "cuda"
        self._host_tables = np.zeros((groups, table_rows + 1, blocks), np.int32)
        tables = torch.from_numpy(self._host_tables)
        self.tables = tables if self._on_host else tables.to(device)
        """Block tables `(groups, table_rows + 1, blocks)`; the last row is for padding."""
        self.newest = torch.zeros(table_rows + 1, dtype=torch.int32, device=device)
        """The newest token of each table row."""
        self._known: list[tuple[int, int]] = [(-1, 0)] * table_rows
        self._starts = torch.arange(max(table_rows, drafts) + 1, dtype=torch.int32, device=device)
        # Tokens, positions, slots, two arrays of scores, and five of samples, of which drafts need one for each token of a step.
        capacity = (9 + groups) * step_tokens + (8 + groups + 2 * drafts + predictions) * (table_rows + 1)
        self._buffer = CopyBuffer(capacity, device)
        self._decodes: _Decodes | None = None
        """Packed decodes of the last step; None if it also had other parts."""

    @property
    def blocks(self) -> int:
        """Columns of the block tables."""
        return self.tables.shape[2]

    def forget_row(self, table_row: int) -> None:
        """Mark the table of a row as not copied, before the row gets another request."""
        self._known[table_row] = (-1, 0)

    def pack(
        self,
        step: EngineStep,
        row_of: Mapping[int, int],
        decode_sizes: Sequence[int] = (),
        drafts: Mapping[int, Sequence[int]] = NO_DRAFTS,
        *,
        uniform: bool = True,
        scored: Mapping[int, int] = NO_SCORES,
    ) -> PackedStep:
        """Copy what the step needs to the device; `row_of` has the table row of each request number.

        A step of decodes only is padded to the next of `decode_sizes`, if there is one. `drafts` has draft tokens by request
        number; they follow the known tokens of the part. Decodes with them have as many tokens as most drafts take, if all decodes
        are `uniform` and the step has no other parts. `scored` has the requests whose prompts get log probabilities, each with the first
        position whose logits are needed. The tensors are valid until the next call.
        """
        if step.unchanged and self._decodes is not None:
            if step.grown:
                self._update_tables([(step.parts[index], int(self._decodes.numbers[0, index])) for index in step.grown])
            return self._next_decodes(self._decodes)
        changed = [(part, row_of[part.request.number]) for part in step.parts]
        self._update_tables(changed)
        self._decodes = None
        if len(step.parts) == step.decodes and not step.drafts:
            self._decodes = self._pack_decodes(changed, step.parts, decode_sizes)
            return self._decodes.packed
        if len(step.parts) == step.decodes and uniform:
            return self._pack_drafted(changed, decode_sizes, drafts)
        return self._pack_mixed(step, changed, drafts, scored)

    def pack_padding(self, size: int, queries: int = 1) -> PackedStep:
        """A step of `size` decodes of `queries` tokens that are all padding, to capture it: it writes nothing into the cache."""
        values = (self.padding_row, 0, *[-1] * self.groups) if queries == 1 else (self.padding_row, -1, 0)
        arrays = [np.full(size, value, np.int32) for value in values]
        if queries > 1:
            arrays.append(np.zeros(size * self.drafts, np.int32))
        rows, numbers, *_ = self._buffer.copy(arrays)
        return PackedStep(size, 0, rows[:0], numbers[:0], (), self.blocks, None, decode_queries=queries)

    def resolve(self, packed: PackedStep) -> StepInputs:
        """The step's inputs with all tokens, by operations on the device that a CUDA graph can repeat."""
        if packed.mixed is not None:
            tokens = packed.mixed.tokens
            newest = self.newest[(-1 - tokens).clamp_(min=0)]
            return packed.mixed._replace(tokens=torch.where(tokens < 0, newest, tokens))
        assert packed.decode_size is not None
        size = packed.decode_size
        if packed.decode_queries > 1:
            return self._resolve_drafted(size, packed.blocks)
        rows, context_lengths, *slots = self._buffer.views([size] * (2 + self.groups))
        return StepInputs(
            tokens=self.newest[rows],
            positions=(context_lengths - 1).clamp_(min=0),
            slots=torch.stack(slots) if self.groups > 1 else slots[0][None],
            block_tables=tuple(table[rows] for table in self.tables[:, :, : packed.blocks]),
            context_lengths=context_lengths,
            query_starts=self._starts[: size + 1],
            decodes=size,
            prompts=(),
            sampled=None,
        )

    def drafted(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Table rows, positions of newest tokens, numbers of drafts, and drafts `(size, drafts)` of a step of decodes with drafts.

        `size` is its number of requests. Padding has position -1 and no drafts. Drafts that are drawn on the device are written there.
        """
        rows, positions, lengths, drafts = self._buffer.views([size] * 3 + [size * self.drafts])[:4]
        return rows, positions, lengths, drafts.view(size, self.drafts)

    def decodes(
        self, tokens: Tensor, table_rows: Tensor, positions: Tensor, written: Tensor, blocks: int
    ) -> StepInputs:
        """Inputs, made on the device, of one token for each of some table rows, all `(sequences,)` int32.

        A negative position is padding. Only `written` tokens `(sequences,)` are written into the cache. `blocks` is the number of
        columns of the block tables that they read.
        """
        tables, slots = self._device_slots(table_rows, positions[:, None], written[:, None], blocks)
        starts, count = self._starts[: len(tokens) + 1], len(tokens)
        return StepInputs(tokens, positions.clamp(min=0), slots, tuple(tables), positions + 1, starts, count, (), None)

    def _resolve_drafted(self, size: int, blocks: int) -> StepInputs:
        """Inputs of a step of decodes with drafts. One with fewer drafts than most has padding before its newest token."""
        rows, starts, lengths, drafts = self.drafted(size)
        queries = 1 + self.drafts
        places = self._starts[:queries] - (self.drafts - lengths)[:, None]
        tokens = torch.cat((self.newest[rows][:, None], drafts), 1).gather(1, places.clamp(min=0).long())
        positions = starts[:, None] + places
        tables, slots = self._device_slots(rows, positions, places >= 0, blocks)
        return StepInputs(
            tokens=tokens.flatten(),
            positions=positions.flatten().clamp_(min=0),
            slots=slots,
            block_tables=tuple(tables),
            context_lengths=starts + lengths + 1,
            query_starts=self._starts[: size + 1] * queries,
            decodes=size,
            prompts=(),
            sampled=None,
            decode_queries=queries,
        )

    def _device_slots(
        self, table_rows: Tensor, positions: Tensor, written: Tensor, blocks: int
    ) -> tuple[Tensor, Tensor]:
        """Block tables `(groups, sequences, blocks)`, and slots `(groups, tokens)` of tokens at `positions` `(sequences, count)`.

        Tokens that are not `written` have slot -1.
        """
        tables, size = self.tables[:, table_rows.long(), :blocks], self.tokens_per_block
        columns = (positions // size).clamp(min=0).long().expand(self.groups, *positions.shape)
        slots = tables.gather(2, columns) * size + positions % size
        return tables, torch.where(written & (positions >= 0), slots, -1).flatten(1)

    def _pack_decodes(
        self, pairs: Sequence[tuple[RequestPart, int]], parts: Sequence[RequestPart], decode_sizes: Sequence[int]
    ) -> _Decodes:
        count = len(parts)
        size = next((size for size in decode_sizes if size >= count), count)
        numbers = np.full((2 + self.groups, size), -1, np.int32)
        numbers[0], numbers[1] = self.padding_row, 0
        numbers[0, :count] = [row for _, row in pairs]
        numbers[1, :count] = [part.start + 1 for part in parts]
        rows, context_lengths, *_ = self._buffer.views([size] * len(numbers))
        packed = PackedStep(size, count, rows[:count], context_lengths[:count], parts, self.blocks, None)
        decodes = _Decodes(numbers, packed, padded=bool(decode_sizes))
        self._copy_decodes(decodes)
        return decodes

    def _next_decodes(self, decodes: _Decodes) -> PackedStep:
        """The step in which all decodes are one token further."""
        numbers, count = decodes.numbers, decodes.packed.decodes
        if decodes.in_block:
            decodes.in_block -= 1
            numbers[1:, :count] += 1
            self._buffer.copy(numbers)
        else:
            numbers[1, :count] += 1
            self._copy_decodes(decodes)
        return decodes.packed

    def _copy_decodes(self, decodes: _Decodes) -> None:
        """Find the slots of decodes and copy all their numbers to the device."""
        numbers, count, size = decodes.numbers, decodes.packed.decodes, self.tokens_per_block
        positions = numbers[1, :count] - 1
        numbers[2:, :count] = self._slots(numbers[0, :count], positions)
        decodes.in_block = size - 1 - int((positions % size).max())
        if not decodes.padded:
            decodes.packed = decodes.packed._replace(blocks=int(positions.max()) // size + 1)
        self._buffer.copy(numbers)

    def _pack_drafted(
        self, parts: Sequence[tuple[RequestPart, int]], decode_sizes: Sequence[int], drafts: Mapping[int, Sequence[int]]
    ) -> PackedStep:
        """A step of decodes of which some have drafts: these are the first, and all have the same number of tokens."""
        parts = sorted(parts, key=lambda pair: pair[0].count == 1)
        columns = zip(*((row, part.start, part.count) for part, row in parts), strict=True)
        rows, starts, counts = (np.array(column, np.int32) for column in columns)
        count, lengths = len(parts), counts - 1
        size = next((size for size in decode_sizes if size >= count), count)
        tokens = np.zeros((size, self.drafts), np.int32)
        for line, (part, _), length in zip(tokens, parts, lengths.tolist(), strict=False):
            line[:length] = drafts[part.request.number][:length] if length else ()
        places = np.arange(1 + self.drafts, dtype=np.int32) - (self.drafts - lengths)[:, None]
        sampled, padding, drafted = np.flatnonzero(places >= 0), size - count, int((lengths > 0).sum())
        arrays = [_padded(rows, padding, self.padding_row), _padded(starts, padding, -1), _padded(lengths, padding, 0)]
        arrays += [tokens.ravel(), sampled, np.repeat(rows, counts), (starts[:, None] + places).ravel()[sampled] + 1]
        tensors = self._buffer.copy([*arrays, *sample_arrays(counts[:drafted], 1 + self.drafts)])
        return PackedStep(
            decode_size=size,
            decodes=count,
            sampled_rows=tensors[5],
            sampled_positions=tensors[6],
            sampled_parts=[part for part, _ in parts],
            blocks=self.blocks if decode_sizes else int((starts + lengths).max()) // self.tokens_per_block + 1,
            mixed=None,
            drafts=PackedDrafts(
                counts=tuple(counts[:drafted].tolist()),
                table_rows=tensors[0][:drafted],
                positions=tensors[1][:drafted],
                lengths=tensors[2][:drafted],
                tokens=tensors[3].view(size, self.drafts)[:drafted],
                samples=tensors[7].view(drafted, -1),
                indices=tensors[8],
            ),
            decode_queries=1 + self.drafts,
            sampled_tokens=tensors[4],
        )

    def _pack_mixed(
        self,
        step: EngineStep,
        parts: Sequence[tuple[RequestPart, int]],
        drafts: Mapping[int, Sequence[int]],
        scored: Mapping[int, int],
    ) -> PackedStep:
        decodes = sorted((_Piece.of(*pair) for pair in parts[: step.decodes]), key=lambda piece: piece.count > 1)
        singles = sum(piece.count == 1 for piece in decodes)
        chunks = [self._divide(*pair) for pair in parts[step.decodes :]]
        cached, alone = ([piece for pair in chunks if (piece := pair[index]).count] for index in (0, 1))
        pieces = [*decodes, *cached, *alone]
        columns = zip(*((piece.start, piece.count, piece.table_row) for piece in pieces), strict=True)
        starts, counts, rows = (np.array(column, np.int32) for column in columns)
        query_starts = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
        positions = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(starts - query_starts[:-1], counts)
        known = (token for piece in pieces for token in _known_tokens(piece, drafts))
        tokens = np.fromiter(known, np.int32, query_starts[-1])
        token_rows = np.repeat(rows, counts)
        drafted, first = slice(singles, step.decodes), query_starts[singles]
        samples = np.array([piece.samples for piece in pieces])
        samples[drafted] = False
        sampled = np.arange(first, query_starts[step.decodes], dtype=np.int32)
        sampled = np.concatenate((sampled, query_starts[1:][samples] - 1))
        arrays = [tokens, positions, rows, starts + counts, query_starts]
        arrays += [sampled, token_rows[sampled], positions[sampled] + 1, *self._slots(token_rows, positions)]
        arrays += [_following(pieces, ahead) for ahead in range(self.predictions)]
        scores = _scores(pieces, query_starts, scored) if scored else ()
        if scores:
            arrays += [
                np.concatenate([score.indices for score in scores]),
                np.concatenate([score.targets for score in scores]),
            ]
        if drafted_counts := tuple(counts[drafted].tolist()):
            arrays += sample_arrays(drafted_counts, max(drafted_counts))
        tensors = self._buffer.copy(arrays)
        blocks = int((starts + counts).max() - 1) // self.tokens_per_block + 1
        inputs = StepInputs(
            tokens=tensors[0],
            positions=tensors[1],
            slots=torch.stack(tensors[8 : 8 + self.groups]) if self.groups > 1 else tensors[8][None],
            block_tables=tuple(table[tensors[2]] for table in self.tables[:, :, :blocks]),
            context_lengths=tensors[3],
            query_starts=tensors[4],
            decodes=singles,
            prompts=tuple(piece.count for piece in alone),
            sampled=tensors[5],
            scored=bool(scores),
        )
        in_order = [*decodes[singles:], *decodes[:singles], *cached, *alone]
        sampled_parts = [piece.part for piece in in_order if piece.samples]
        packed = PackedStep(None, step.decodes, tensors[6], tensors[7], sampled_parts, blocks, inputs)
        if self.predictions:
            packed = packed._replace(following=torch.stack(tensors[8 + self.groups :][: self.predictions]))
        if scores:
            counts = [(score.number, len(score.indices)) for score in scores]
            indices, targets = tensors[8 + self.groups + self.predictions :][:2]
            packed = packed._replace(scores=PackedScores(counts, indices, targets))
        if not drafted_counts:
            return packed
        lengths = tensors[4].diff()[drafted] - 1
        samples, indices = tensors[-2].view(len(drafted_counts), -1), tensors[-1]
        packed_drafts = PackedDrafts(
            counts=drafted_counts,
            table_rows=tensors[2][drafted],
            positions=tensors[3][drafted] - 1 - lengths,
            lengths=lengths,
            tokens=tensors[0][first:][samples[:, 1:]],
            samples=samples,
            indices=indices,
        )
        return packed._replace(drafts=packed_drafts)

    def _divide(self, part: RequestPart, table_row: int) -> tuple[_Piece, _Piece]:
        """The tokens of a chunk that attend to the cache, and those before them that need none; one of both may be empty."""
        count = part.count - part.count % self.prompt_unit if self.prompt_unit and part.start == 0 else 0
        rest = part.count - count
        return (
            _Piece(part, table_row, part.start + count, rest, part.samples and rest > 0),
            _Piece(part, table_row, part.start, count, part.samples and rest == 0),
        )

    def _slots(self, table_rows: Array, positions: Array) -> Array:
        """`(groups, tokens)`: the places in the cache of tokens of these table rows at these positions."""
        blocks = self._host_tables[:, table_rows, positions // self.tokens_per_block]
        return blocks * self.tokens_per_block + positions % self.tokens_per_block

    def _update_tables(self, parts: Sequence[tuple[RequestPart, int]]) -> None:
        """Copy blocks that requests have got to the block tables."""
        changes = []
        for part, row in parts:
            computation, known = self._known[row]
            length = len(part.tables[0])
            if computation != part.computation:
                known = 0
            if known == length and known:
                continue
            for group, table in enumerate(part.tables):
                self._host_tables[group, row, known:length] = table[known:]
            self._known[row] = (part.computation, length)
            changes.append((row, known, length))
        if changes and not self._on_host:
            self._copy_tables(changes)

    def _copy_tables(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """Copy columns [first, last) of table rows to the device."""
        _, rows, columns = self._host_tables.shape
        places = np.concatenate(
            [np.arange(row * columns + first, row * columns + last) for row, first, last in changes]
        )
        places = np.concatenate([places + group * rows * columns for group in range(self.groups)])
        pairs = torch.from_numpy(np.stack((places, self._host_tables.reshape(-1)[places]))).pin_memory()
        places_here, blocks_here = pairs.to(self.device, non_blocking=True)
        self.tables.view(-1)[places_here] = blocks_here.to(torch.int32)


@dataclass(slots=True)
class _Decodes:
    """A step of decodes only."""

    numbers: Array
    """`(2 + groups, sequences)`: table rows, context lengths and slots; padding at the end."""
    packed: PackedStep
    padded: bool
    """Whether its batch size is one of those with graphs, which read all columns of the block tables."""
    in_block: int = 0
    """Steps from here on in which no decode begins a block."""


def _padded(array: Array, count: int, value: int) -> Array:
    return np.concatenate((array, np.full(count, value, np.int32))) if count else array


class _Piece(NamedTuple):
    """Consecutive tokens of a part, which are one sequence of the step."""

    part: RequestPart
    table_row: int
    """Table row of the request."""
    start: int
    count: int
    samples: bool
    """Whether the logits of its last token give a new token."""

    @classmethod
    def of(cls, part: RequestPart, table_row: int) -> _Piece:
        """The whole part."""
        return cls(part, table_row, part.start, part.count, part.samples)


def _known_tokens(piece: _Piece, drafts: Mapping[int, Sequence[int]]) -> Sequence[int]:
    """Return the piece's tokens; -1 - table_row stands for the newest one if it is on the device only (`resolve`)."""
    known = piece.part.tokens[piece.start : piece.start + piece.count]
    missing = piece.count - len(known)
    if not missing:
        return known
    following = drafts.get(piece.part.request.number)
    return [*known, -1 - piece.table_row] if following is None else [*known, *following[:missing]]


class _Score(NamedTuple):
    """Consecutive tokens of a piece whose logits are needed."""

    number: int
    """Number of the request."""
    start: int
    """Position of the first."""
    indices: Array
    targets: Array


def _scores(pieces: Sequence[_Piece], query_starts: Array, scored: Mapping[int, int]) -> list[_Score]:
    """The tokens of these pieces whose logits give log probabilities of a prompt, in the order of requests and positions."""
    found = []
    for piece, first in zip(pieces, query_starts.tolist(), strict=False):
        request = piece.part.request
        start = max(piece.start, scored.get(request.number, piece.start + piece.count))
        end = min(piece.start + piece.count, len(request.prompt) - 1)
        if start < end:
            indices = np.arange(start, end, dtype=np.int32) + (first - piece.start)
            found.append(
                _Score(request.number, start, indices, np.array(request.prompt[start + 1 : end + 1], np.int32))
            )
    return sorted(found, key=lambda score: score[:2])


def _following(pieces: Sequence[_Piece], ahead: int) -> Array:
    """`(pieces,)`: the token `ahead + 1` after the last one of each piece, 0 if it is not known."""
    ends = ((piece.part.tokens, piece.start + piece.count + ahead) for piece in pieces)
    return np.array([tokens[end] if end < len(tokens) else 0 for tokens, end in ends], np.int32)
