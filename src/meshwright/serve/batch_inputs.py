"""The tensors of one step, made from the policy's plan and copied to the device in one piece.

Each running request has a row in two tensors on the device: the block tables and the newest tokens. A decode reads its token and its block
table there. The host copies a block number only once, when the block is added to the request.

Words: a decode computes the token after the newest one. A chunk is a piece of a prompt. A draft is a token that the drafter proposes
after the newest one; it is computed in the same step. Example: a decode with drafts 7 and 9 after the newest token 5 has the tokens
5, 7, 9 and needs the logits of all three.
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
"""On a GPU cuDNN computes the attention of this many tokens of a prompt, or of a multiple, without reading the cache.

cuDNN is a quarter faster than the kernel that reads the cache. It takes about 50 ms to plan each new number of tokens, so the numbers are
multiples of this one.
"""
Array = np.ndarray
NO_DRAFTS: Mapping[int, Sequence[int]] = MappingProxyType({})
NO_SCORES: Mapping[int, int] = MappingProxyType({})


class StepInputs(NamedTuple):
    """The tensors of one step, all int32.

    Its sequences are in this order: decodes, chunks that read the cache, chunks that do not.
    """

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
    """Tokens of each of the last sequences, which do not read the cache: they begin at position 0, and attend to this step only."""
    sampled: Tensor | None
    """`(samples,)`: indices of the tokens whose logits are needed; None for all."""
    decode_queries: int = 1
    scored: bool = False
    """Whether the runner keeps the normed outputs of all tokens (`ModelRunner.normed`)."""


class PackedScores(NamedTuple):
    """The tokens of a step whose logits give the log probability of the prompt's next token."""

    counts: Sequence[tuple[int, int]]
    """Number of each request, and how many of the tokens belong to it, in the order of the tokens."""
    indices: Tensor
    """`(tokens,)` int32: indices of the tokens in the step."""
    targets: Tensor
    """`(tokens,)` int32: the next token of each."""


class PackedStep(NamedTuple):
    """A step on the device. A token that the host does not know yet is a placeholder; `resolve` puts the token in."""

    decode_size: int | None
    """Number of sequences, padding included, of a step that has only decodes; None for a mixed step."""
    decodes: int
    """Number of decodes, without padding. They are the first sequences."""
    sampled_rows: Tensor
    """`(samples,)`: table rows of the requests that get a token. A request with drafts has a sample for each of its tokens."""
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
    """Tokens of each sequence of a step that has only decodes: more than one if a decode has drafts."""
    sampled_tokens: Tensor | None = None
    """`(samples,)` int32: indices of the tokens whose logits are needed, in a step of decodes with drafts; None if it has no drafts."""
    following: Tensor | None = None
    """`(predictions, sequences)`: the tokens that follow each sequence of a mixed step; arbitrary where the host does not know them."""
    scores: PackedScores | None = None


class BatchInputs:
    """Makes the inputs of steps; holds the block tables and the newest token of each table row.

    - `table_rows`: rows of the tables.
    - `blocks`: most blocks of a request.
    - `groups`: groups of layers that share a block table.
    - `step_tokens`: most tokens of a step.
    - `prompt_unit`: a chunk that begins at position 0 computes the largest multiple of so many tokens without the cache; 0 if none.
      With 1,024 a first chunk of 2,500 tokens is two sequences: 2,048 tokens without the cache, and 452 that read it.
    - `drafts`: most draft tokens of a decode.
    - `predictions`: rows of `PackedStep.following` in mixed steps.
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
        self.prompt_unit = prompt_unit
        self.step_tokens = step_tokens
        self.drafts = drafts
        self.predictions = predictions
        self.padding_row = table_rows
        self.groups = groups
        self.tokens_per_block = tokens_per_block
        self.device = device
        self._on_host = device.type != "cuda"
        self._host_tables = np.zeros((groups, table_rows + 1, blocks), np.int32)
        tables = torch.from_numpy(self._host_tables)
        self.tables = tables if self._on_host else tables.to(device)
        """Block tables `(groups, table_rows + 1, blocks)`; the last row is for padding."""
        self.newest = torch.zeros(table_rows + 1, dtype=torch.int32, device=device)
        """The newest token of each table row."""
        self._known: list[tuple[int, int]] = [(-1, 0)] * table_rows
        """For each table row the computation (`RequestPart.computation`) and the number of its blocks that are in the tables."""
        self._starts = torch.arange(max(table_rows, drafts) + 1, dtype=torch.int32, device=device)
        # Tokens, positions, slots, two arrays of scores, and five of samples, of which drafts need one for each token of a step.
        capacity = (9 + groups) * step_tokens + (8 + groups + 2 * drafts + predictions) * (table_rows + 1)
        self._buffer = CopyBuffer(capacity, device)
        self._decodes: _Decodes | None = None
        """The last step if it had only decodes without drafts; else None."""

    @property
    def blocks(self) -> int:
        """Columns of the block tables."""
        return self.tables.shape[2]

    def forget_row(self, table_row: int) -> None:
        """Mark a table row as empty, before it is given to another request."""
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
        """Copy what the step needs to the device. The tensors are valid until the next call.

        - `row_of`: the table row of each request number.
        - `decode_sizes`: a step that has only decodes is padded to the next of these sizes, if there is one.
        - `drafts`: draft tokens by request number. They follow the known tokens of the request's part.
        - `uniform`: in a step that has only decodes, give each as many tokens as the most drafts take.
        - `scored`: requests whose prompts get log probabilities, each with the first position whose logits are needed.
        """
        if step.unchanged and self._decodes is not None:
            if step.grown:
                self._update_tables([(step.parts[index], int(self._decodes.numbers[0, index])) for index in step.grown])
            return self._next_decodes(self._decodes)
        parts_with_rows = [(part, row_of[part.request.number]) for part in step.parts]
        self._update_tables(parts_with_rows)
        self._decodes = None
        only_decodes = len(step.parts) == step.decodes
        if only_decodes and not step.drafts:
            self._decodes = self._pack_decodes(parts_with_rows, step.parts, decode_sizes)
            return self._decodes.packed
        if only_decodes and uniform:
            return self._pack_drafted(parts_with_rows, decode_sizes, drafts)
        return self._pack_mixed(step, parts_with_rows, drafts, scored)

    def pack_padding(self, size: int, queries: int = 1) -> PackedStep:
        """A step for the capture of a graph: `size` decodes of `queries` tokens, all padding. It writes nothing into the cache."""
        values = (self.padding_row, 0, *[-1] * self.groups) if queries == 1 else (self.padding_row, -1, 0)
        arrays = [np.full(size, value, np.int32) for value in values]
        if queries > 1:
            arrays.append(np.zeros(size * self.drafts, np.int32))
        rows, numbers, *_ = self._buffer.copy(arrays)
        return PackedStep(size, 0, rows[:0], numbers[:0], (), self.blocks, None, decode_queries=queries)

    def resolve(self, packed: PackedStep) -> StepInputs:
        """The step's inputs with all tokens, by operations on the device that a CUDA graph can repeat."""
        if packed.mixed is not None:
            tokens = packed.mixed.tokens  # -1 - table_row where the newest token of that row belongs
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
        """Four views of a step of `size` decodes with drafts; drafts that are drawn on the device are written there.

        Table rows `(size,)`, positions of the newest tokens `(size,)`, numbers of drafts `(size,)`, and drafts `(size, drafts)`. Padding
        has position -1 and no drafts.
        """
        rows, positions, lengths, drafts = self._buffer.views([size] * 3 + [size * self.drafts])[:4]
        return rows, positions, lengths, drafts.view(size, self.drafts)

    def decodes(
        self, tokens: Tensor, table_rows: Tensor, positions: Tensor, written: Tensor, blocks: int
    ) -> StepInputs:
        """Inputs of one token for each table row, made on the device. All arguments are `(sequences,)`, int32 but for `written`.

        A negative position is padding. Only tokens that are `written` go into the cache. `blocks` is the number of columns of the
        block tables that the sequences read.
        """
        tables, slots = self._device_slots(table_rows, positions[:, None], written[:, None], blocks)
        return StepInputs(
            tokens=tokens,
            positions=positions.clamp(min=0),
            slots=slots,
            block_tables=tuple(tables),
            context_lengths=positions + 1,
            query_starts=self._starts[: len(tokens) + 1],
            decodes=len(tokens),
            prompts=(),
            sampled=None,
        )

    def _resolve_drafted(self, size: int, blocks: int) -> StepInputs:
        """Inputs of `size` decodes of 1 + `drafts` tokens. A decode with fewer drafts has padding before its newest token."""
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

        A slot is block · tokens_per_block + place in the block: with 16 tokens a block, position 20 of a table [3, 8] has slot 132.
        Tokens that are not `written` have slot -1.
        """
        tables = self.tables[:, table_rows.long(), :blocks]
        columns = (positions // self.tokens_per_block).clamp(min=0).long().expand(self.groups, *positions.shape)
        slots = tables.gather(2, columns) * self.tokens_per_block + positions % self.tokens_per_block
        return tables, torch.where(written & (positions >= 0), slots, -1).flatten(1)

    def _pack_decodes(
        self, pairs: Sequence[tuple[RequestPart, int]], parts: Sequence[RequestPart], decode_sizes: Sequence[int]
    ) -> _Decodes:
        """A step that has only decodes without drafts."""
        count = len(parts)
        size = next((size for size in decode_sizes if size >= count), count)
        numbers = np.full((2 + self.groups, size), -1, np.int32)
        numbers[0] = self.padding_row
        numbers[1] = 0
        numbers[0, :count] = [row for _, row in pairs]
        numbers[1, :count] = [part.start + 1 for part in parts]
        rows, context_lengths, *_ = self._buffer.views([size] * len(numbers))
        packed = PackedStep(size, count, rows[:count], context_lengths[:count], parts, self.blocks, None)
        decodes = _Decodes(numbers, packed, padded=bool(decode_sizes))
        self._copy_decodes(decodes)
        return decodes

    def _next_decodes(self, decodes: _Decodes) -> PackedStep:
        """The step after `decodes`, for the same requests: each is one token further."""
        numbers = decodes.numbers
        count = decodes.packed.decodes
        if decodes.in_block:
            decodes.in_block -= 1
            numbers[1:, :count] += 1  # context lengths and slots
            self._buffer.copy(numbers)
        else:
            numbers[1, :count] += 1
            self._copy_decodes(decodes)
        return decodes.packed

    def _copy_decodes(self, decodes: _Decodes) -> None:
        """Compute the slots of decodes and copy all their numbers to the device."""
        numbers = decodes.numbers
        count = decodes.packed.decodes
        size = self.tokens_per_block
        positions = numbers[1, :count] - 1
        numbers[2:, :count] = self._slots(numbers[0, :count], positions)
        decodes.in_block = size - 1 - int((positions % size).max())
        if not decodes.padded:
            decodes.packed = decodes.packed._replace(blocks=int(positions.max()) // size + 1)
        self._buffer.copy(numbers)

    def _pack_drafted(
        self, parts: Sequence[tuple[RequestPart, int]], decode_sizes: Sequence[int], drafts: Mapping[int, Sequence[int]]
    ) -> PackedStep:
        """A step that has only decodes, some with drafts. Those with drafts come first; all have 1 + `self.drafts` tokens."""
        parts = sorted(parts, key=lambda pair: pair[0].count == 1)
        rows = np.array([row for _, row in parts], np.int32)
        starts = np.array([part.start for part, _ in parts], np.int32)
        counts = np.array([part.count for part, _ in parts], np.int32)
        lengths = counts - 1
        with_drafts = int((lengths > 0).sum())
        size = next((size for size in decode_sizes if size >= len(parts)), len(parts))
        padding = size - len(parts)
        tokens = np.zeros((size, self.drafts), np.int32)
        for line, (part, _), length in zip(tokens, parts, lengths.tolist(), strict=False):
            line[:length] = drafts[part.request.number][:length] if length else ()
        # Place of each token behind the newest one of its decode, (decodes, 1 + drafts); padding is below 0.
        places = np.arange(1 + self.drafts, dtype=np.int32) - (self.drafts - lengths)[:, None]
        sampled = np.flatnonzero(places >= 0)
        samples, sample_indices = sample_arrays(counts[:with_drafts], 1 + self.drafts)
        # The first four are what `drafted` finds in the buffer.
        copied = self._copy(
            {
                "rows": _padded(rows, padding, self.padding_row),
                "starts": _padded(starts, padding, -1),
                "lengths": _padded(lengths, padding, 0),
                "tokens": tokens.ravel(),
                "sampled": sampled,
                "sampled rows": np.repeat(rows, counts),
                "sampled positions": (starts[:, None] + places).ravel()[sampled] + 1,
                "samples": samples,
                "sample indices": sample_indices,
            }
        )
        return PackedStep(
            decode_size=size,
            decodes=len(parts),
            sampled_rows=copied["sampled rows"],
            sampled_positions=copied["sampled positions"],
            sampled_parts=[part for part, _ in parts],
            blocks=self.blocks if decode_sizes else int((starts + lengths).max()) // self.tokens_per_block + 1,
            mixed=None,
            drafts=PackedDrafts(
                counts=tuple(counts[:with_drafts].tolist()),
                table_rows=copied["rows"][:with_drafts],
                positions=copied["starts"][:with_drafts],
                lengths=copied["lengths"][:with_drafts],
                tokens=copied["tokens"].view(size, self.drafts)[:with_drafts],
                samples=copied["samples"].view(with_drafts, -1),
                indices=copied["sample indices"],
            ),
            decode_queries=1 + self.drafts,
            sampled_tokens=copied["sampled"],
        )

    def _pack_mixed(
        self,
        step: EngineStep,
        parts: Sequence[tuple[RequestPart, int]],
        drafts: Mapping[int, Sequence[int]],
        scored: Mapping[int, int],
    ) -> PackedStep:
        """A step with chunks of prompts, or with decodes of unequal numbers of tokens.

        Its pieces are in this order: decodes without drafts, decodes with drafts, chunks that read the cache, chunks that do not.
        """
        decodes = sorted((_Piece.of(*pair) for pair in parts[: step.decodes]), key=lambda piece: piece.count > 1)
        singles = sum(piece.count == 1 for piece in decodes)
        divided = [self._divide(*pair) for pair in parts[step.decodes :]]
        cached = [piece for piece, _ in divided if piece.count]
        alone = [piece for _, piece in divided if piece.count]
        pieces = [*decodes, *cached, *alone]
        starts = np.array([piece.start for piece in pieces], np.int32)
        counts = np.array([piece.count for piece in pieces], np.int32)
        rows = np.array([piece.table_row for piece in pieces], np.int32)
        ends = starts + counts
        query_starts = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
        positions = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(starts - query_starts[:-1], counts)
        known = (token for piece in pieces for token in _known_tokens(piece, drafts))
        token_rows = np.repeat(rows, counts)
        # Samples: all tokens of decodes with drafts, then the last token of each other piece that samples.
        with_drafts = slice(singles, step.decodes)
        first_drafted = query_starts[singles]
        at_end = np.array([piece.samples for piece in pieces])
        at_end[with_drafts] = False
        sampled = np.arange(first_drafted, query_starts[step.decodes], dtype=np.int32)
        sampled = np.concatenate((sampled, query_starts[1:][at_end] - 1))
        arrays: dict[str, Array] = {
            "tokens": np.fromiter(known, np.int32, query_starts[-1]),
            "positions": positions,
            "rows": rows,
            "context lengths": ends,
            "query starts": query_starts,
            "sampled": sampled,
            "sampled rows": token_rows[sampled],
            "sampled positions": positions[sampled] + 1,
        }
        arrays |= {f"slots {group}": slots for group, slots in enumerate(self._slots(token_rows, positions))}
        arrays |= {f"following {ahead}": _following(pieces, ahead) for ahead in range(self.predictions)}
        scores = _scores(pieces, query_starts, scored) if scored else ()
        if scores:
            arrays["score indices"] = np.concatenate([score.indices for score in scores])
            arrays["score targets"] = np.concatenate([score.targets for score in scores])
        draft_counts = tuple(counts[with_drafts].tolist())
        if draft_counts:
            arrays["samples"], arrays["sample indices"] = sample_arrays(draft_counts, max(draft_counts))
        copied = self._copy(arrays)
        slots = [copied[f"slots {group}"] for group in range(self.groups)]
        blocks = int(ends.max() - 1) // self.tokens_per_block + 1
        inputs = StepInputs(
            tokens=copied["tokens"],
            positions=copied["positions"],
            slots=torch.stack(slots) if self.groups > 1 else slots[0][None],
            block_tables=tuple(table[copied["rows"]] for table in self.tables[:, :, :blocks]),
            context_lengths=copied["context lengths"],
            query_starts=copied["query starts"],
            decodes=singles,
            prompts=tuple(piece.count for piece in alone),
            sampled=copied["sampled"],
            scored=bool(scores),
        )
        in_sample_order = [*decodes[singles:], *decodes[:singles], *cached, *alone]
        packed = PackedStep(
            decode_size=None,
            decodes=step.decodes,
            sampled_rows=copied["sampled rows"],
            sampled_positions=copied["sampled positions"],
            sampled_parts=[piece.part for piece in in_sample_order if piece.samples],
            blocks=blocks,
            mixed=inputs,
        )
        if self.predictions:
            following = torch.stack([copied[f"following {ahead}"] for ahead in range(self.predictions)])
            packed = packed._replace(following=following)
        if scores:
            score_counts = [(score.number, len(score.indices)) for score in scores]
            packed_scores = PackedScores(score_counts, copied["score indices"], copied["score targets"])
            packed = packed._replace(scores=packed_scores)
        if not draft_counts:
            return packed
        lengths = inputs.query_starts.diff()[with_drafts] - 1
        samples = copied["samples"].view(len(draft_counts), -1)
        packed_drafts = PackedDrafts(
            counts=draft_counts,
            table_rows=copied["rows"][with_drafts],
            positions=inputs.context_lengths[with_drafts] - 1 - lengths,
            lengths=lengths,
            tokens=inputs.tokens[first_drafted:][samples[:, 1:]],
            samples=samples,
            indices=copied["sample indices"],
        )
        return packed._replace(drafts=packed_drafts)

    def _copy(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """The arrays on the device, which lie in the buffer in this order."""
        return dict(zip(arrays, self._buffer.copy([*arrays.values()]), strict=True))

    def _divide(self, part: RequestPart, table_row: int) -> tuple[_Piece, _Piece]:
        """Divide a chunk into the tokens that read the cache and the tokens before them that do not; one of both may be empty."""
        alone = 0
        if self.prompt_unit and part.start == 0:
            alone = part.count - part.count % self.prompt_unit
        cached = part.count - alone
        return (
            _Piece(part, table_row, part.start + alone, cached, part.samples and cached > 0),
            _Piece(part, table_row, part.start, alone, part.samples and cached == 0),
        )

    def _slots(self, table_rows: Array, positions: Array) -> Array:
        """Slots `(groups, tokens)` of tokens of these table rows at these positions, as `_device_slots` computes them."""
        blocks = self._host_tables[:, table_rows, positions // self.tokens_per_block]
        return blocks * self.tokens_per_block + positions % self.tokens_per_block

    def _update_tables(self, parts: Sequence[tuple[RequestPart, int]]) -> None:
        """Write the blocks that requests have got since the last step into the block tables."""
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
        changes_here = torch.from_numpy(np.stack((places, self._host_tables.reshape(-1)[places]))).pin_memory()
        device_places, device_blocks = changes_here.to(self.device, non_blocking=True)
        self.tables.view(-1)[device_places] = device_blocks.to(torch.int32)


@dataclass(slots=True)
class _Decodes:
    """A step that has only decodes without drafts."""

    numbers: Array
    """`(2 + groups, sequences)`: table rows, context lengths and slots; padding at the end."""
    packed: PackedStep
    padded: bool
    """Whether the step runs as a CUDA graph, which reads all columns of the block tables."""
    in_block: int = 0
    """Number of next steps in which no decode begins a new block."""


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
    """The piece's tokens; -1 - table_row stands for the newest token if only the device has it (see `resolve`)."""
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
    """The tokens whose logits give log probabilities of prompts, in the order of requests and positions."""
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
