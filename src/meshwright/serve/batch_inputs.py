"""The input tensors of one step: `BatchInputs` makes them from the policy's plan and copies them to the device in one copy.

Each running request has a row in two tensors on the device: the block tables and the newest tokens. A decode reads its newest token and
its block table from this row. The host copies a block number only once, when the policy adds the block to the request.

Terms of this module:

- A decode computes the newest token of a request, and its logits give the next token.
- A chunk is a range of consecutive prompt tokens that one step computes.
- A draft is a token that the drafter proposes as a continuation of the newest token. The decode computes it in the same step. Example:
  a decode with the newest token 5 and the drafts 7 and 9 computes the tokens 5, 7, 9, and needs the logits of all three.
- A sample is a token whose logits are needed.
- A mixed step has chunks of prompts, or decodes that are not padded to the same number of tokens.
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
"""Prompt attention by cuDNN, on a GPU, always covers a multiple of this number of tokens.

cuDNN does not read the cache, and is a quarter faster than the kernel that does. But cuDNN takes about 50 ms to plan each number of tokens
that it has not seen before. Multiples of 1,024 keep the count of different numbers small.
"""
Array = np.ndarray
NO_DRAFTS: Mapping[int, Sequence[int]] = MappingProxyType({})
NO_SCORES: Mapping[int, int] = MappingProxyType({})


class StepInputs(NamedTuple):
    """The input tensors of one step, all int32.

    The sequences of the step are in this order: decodes, chunks that read the cache, chunks that do not read the cache.
    """

    tokens: Tensor
    """`(tokens,)`."""
    positions: Tensor
    """`(tokens,)`: position of each token in its request, from 0."""
    slots: Tensor
    """`(groups, tokens)`: slot of each token in the cache of each group of layers; -1 for padding. See `BatchInputs._device_slots`."""
    block_tables: tuple[Tensor, ...]
    """For each group of layers, the block tables of the sequences, `(sequences, blocks)`."""
    context_lengths: Tensor
    """`(sequences,)`: number of tokens of the request up to the sequence's last token in this step; 0 for padding."""
    query_starts: Tensor
    """`(sequences + 1,)`: index of each sequence's first token in the step; the last value is the number of tokens of the step.

    Example: sequences of 1, 1 and 5 tokens have the query starts 0, 1, 2, 7.
    """
    decodes: int
    """The first `decodes` sequences have `decode_queries` tokens each."""
    prompts: tuple[int, ...]
    """Numbers of tokens of the last sequences: the chunks that begin at position 0 and do not read the cache."""
    sampled: Tensor | None
    """`(samples,)`: indices of the tokens whose logits are needed. None if the logits of all tokens are needed."""
    decode_queries: int = 1
    """Number of tokens of each of the first `decodes` sequences."""
    scored: bool = False
    """Whether the runner keeps the normed outputs of all tokens (`ModelRunner.normed`)."""


class PackedScores(NamedTuple):
    """The prompt tokens of a step whose logits are needed for log probabilities of the prompt: each gives that of the next prompt token."""

    counts: Sequence[tuple[int, int]]
    """`(request number, number of its tokens)` pairs, in the order of `indices`."""
    indices: Tensor
    """`(tokens,)` int32: index of each of these tokens in the step."""
    targets: Tensor
    """`(tokens,)` int32: the prompt token that follows each of these tokens."""


class PackedStep(NamedTuple):
    """A step on the device. Tokens that the host does not know yet are placeholders, which `BatchInputs.resolve` replaces."""

    decode_size: int | None
    """Number of sequences of a step that has only decodes, padding included. None for a mixed step."""
    decodes: int
    """Number of decodes, padding not included. The decodes are the first sequences of the step."""
    sampled_rows: Tensor
    """`(samples,)`: for each sample, the table row of the request that gets the new token.

    A chunk, or a decode without drafts, has at most one sample. A decode with drafts has a sample for each of its tokens.
    """
    sampled_positions: Tensor
    """`(samples,)`: position in its request of the new token that each sample gives."""
    sampled_parts: Sequence[RequestPart]
    """The parts that get a token, each once, in the order of `sampled_rows`."""
    blocks: int
    """Number of columns of the block tables that the step reads."""
    mixed: StepInputs | None
    """The inputs of a mixed step, with placeholders. None for other steps."""
    drafts: PackedDrafts | None = None
    """The decodes that have drafts. None if the step has no drafts."""
    decode_queries: int = 1
    """In a step that has only decodes: number of tokens of each sequence. It is above 1 if a decode has drafts."""
    sampled_tokens: Tensor | None = None
    """`(samples,)` int32: indices of the samples in a step that has only decodes, some with drafts. None for other steps."""
    following: Tensor | None = None
    """`(predictions, sequences)`: in a mixed step, the tokens that come after the last token of each sequence.

    Row 0 has the next token, row 1 the token after it, and so on. Values that the host does not know are arbitrary.
    """
    scores: PackedScores | None = None
    """The tokens that give log probabilities of prompts. None if the step has none."""


class BatchInputs:
    """Makes the input tensors of steps. It holds the block table and the newest token of each table row.

    - `table_rows`: number of table rows for requests. The tables have one more row, for padding.
    - `blocks`: largest number of blocks of a request.
    - `groups`: number of groups of layers. All layers of a group share a block table.
    - `step_tokens`: largest number of tokens of a step.
    - `prompt_unit`: divides a chunk that begins at position 0 into two sequences. The first has the largest multiple of `prompt_unit`
      tokens and does not read the cache; the second has the rest and reads the cache. With 1,024, a chunk of 2,500 tokens becomes 2,048
      tokens that do not read the cache and 452 tokens that do. With 0, all tokens read the cache.
    - `drafts`: largest number of draft tokens of a decode.
    - `predictions`: number of rows of `PackedStep.following` in mixed steps.
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
        """Block tables on the device, `(groups, table_rows + 1, blocks)`. The last row is for padding."""
        self.newest = torch.zeros(table_rows + 1, dtype=torch.int32, device=device)
        """`(table_rows + 1,)`: the newest token of each table row's request."""
        self._known: list[tuple[int, int]] = [(-1, 0)] * table_rows
        """For each table row: `RequestPart.computation` of its request, and how many of the request's blocks are in the tables.

        The policy raises `computation` when it takes the request's blocks away; then the tables have none of the new blocks.
        """
        self._starts = torch.arange(max(table_rows, drafts) + 1, dtype=torch.int32, device=device)
        """0, 1, 2, …: its first values are the query starts of a step of decodes."""
        # An upper bound for the arrays of any step. The first term counts arrays with a value for each token: tokens, positions, slots of
        # each group, two arrays for scores, and the arrays for samples. The second term counts arrays with a value for each sequence.
        capacity = (9 + groups) * step_tokens + (8 + groups + 2 * drafts + predictions) * (table_rows + 1)
        self._buffer = CopyBuffer(capacity, device)
        self._decodes: _Decodes | None = None
        """The last step, if it had only decodes and no drafts; else None."""

    @property
    def blocks(self) -> int:
        """Number of columns of the block tables: the largest number of blocks of a request."""
        return self.tables.shape[2]

    def forget_row(self, table_row: int) -> None:
        """Note that a table row holds no blocks. The engine calls this before it gives the row to another request."""
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
        """Copy the inputs of a planned step to the device. The returned tensors are valid until the next call.

        - `row_of`: table row of each request, by request number.
        - `decode_sizes`: batch sizes, ascending. A step that has only decodes is padded to the first size that is at least its number of
          decodes. A step that is larger than all sizes is not padded.
        - `drafts`: draft tokens by request number. They come after the known tokens of the request's part.
        - `uniform`: whether all decodes of a step that has only decodes, some with drafts, are padded to 1 + `self.drafts` tokens. If not,
          the step becomes a mixed step.
        - `scored`: for each request whose prompt gets log probabilities, the first position whose logits are still needed.
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
        """Make a step to capture a graph with: `size` decodes of `queries` tokens, all padding. It writes nothing into the cache."""
        values = (self.padding_row, 0, *[-1] * self.groups) if queries == 1 else (self.padding_row, -1, 0)
        arrays = [np.full(size, value, np.int32) for value in values]
        if queries > 1:
            arrays.append(np.zeros(size * self.drafts, np.int32))
        rows, numbers, *_ = self._buffer.copy(arrays)
        return PackedStep(size, 0, rows[:0], numbers[:0], (), self.blocks, None, decode_queries=queries)

    def resolve(self, packed: PackedStep) -> StepInputs:
        """Return the inputs of a packed step, with each placeholder replaced by the newest token of its table row.

        It uses only operations on the device, so a CUDA graph can capture them.
        """
        if packed.mixed is not None:
            # A placeholder is -1 - table_row: -1 for table row 0, -2 for table row 1, …
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
        """Return four views into the buffer, for a step of `size` decodes with drafts.

        - table rows, `(size,)`;
        - positions of the newest tokens, `(size,)`; -1 for padding;
        - numbers of drafts, `(size,)`; 0 for padding;
        - draft tokens, `(size, drafts)`. A drafter that draws drafts on the device writes them into this view.
        """
        rows, positions, lengths, drafts = self._buffer.views([size] * 3 + [size * self.drafts])[:4]
        return rows, positions, lengths, drafts.view(size, self.drafts)

    def decodes(
        self, tokens: Tensor, table_rows: Tensor, positions: Tensor, written: Tensor, blocks: int
    ) -> StepInputs:
        """Make the inputs of a step with one token for each table row, on the device. A draft model uses them to draw its drafts.

        - `tokens`, `table_rows`, `positions`: `(sequences,)` int32. A negative position is padding.
        - `written`: `(sequences,)` bool: whether the keys and values of the token are written into the cache.
        - `blocks`: number of columns of the block tables that the sequences read.
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
        """Return the inputs of `size` decodes of 1 + `self.drafts` tokens. A decode with fewer drafts has padding before its newest token.

        Example: with `self.drafts` = 3, the newest token 5 and one draft 7, the four tokens are padding, padding, 5, 7.
        """
        rows, starts, lengths, drafts = self.drafted(size)
        queries = 1 + self.drafts
        # 0 for the newest token, 1 for the first draft, …, below 0 for padding; -2, -1, 0, 1 in the example.  (size, queries)
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
        """Return the block tables `(groups, sequences, blocks)` of table rows, and the slots of tokens, `(groups, sequences · count)`.

        `positions` and `written` are `(sequences, count)`. A slot is block · tokens_per_block + index of the token in the block. Example:
        with 16 tokens a block, position 20 is token 4 of the second block; in the block table [3, 8] this is block 8, so the slot is
        8 · 16 + 4 = 132. The slot is -1 for padding, and for tokens that are not `written` into the cache.
        """
        tables = self.tables[:, table_rows.long(), :blocks]
        columns = (positions // self.tokens_per_block).clamp(min=0).long().expand(self.groups, *positions.shape)
        slots = tables.gather(2, columns) * self.tokens_per_block + positions % self.tokens_per_block
        return tables, torch.where(written & (positions >= 0), slots, -1).flatten(1)

    def _pack_decodes(
        self, pairs: Sequence[tuple[RequestPart, int]], parts: Sequence[RequestPart], decode_sizes: Sequence[int]
    ) -> _Decodes:
        """Pack a step that has only decodes, without drafts. `pairs` has the `parts`, each with its table row."""
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
        """Pack the next step for the same requests: the position of each decode grows by 1."""
        numbers = decodes.numbers
        count = decodes.packed.decodes
        if decodes.in_block:
            decodes.in_block -= 1
            numbers[1:, :count] += 1  # No decode begins a new block, so its slot grows by 1 like its context length.
            self._buffer.copy(numbers)
        else:
            numbers[1, :count] += 1
            self._copy_decodes(decodes)
        return decodes.packed

    def _copy_decodes(self, decodes: _Decodes) -> None:
        """Compute the slots of decodes, and copy their table rows, context lengths and slots to the device."""
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
        """Pack a step that has only decodes, some with drafts. Decodes with drafts come first. Each decode has 1 + `self.drafts` tokens."""
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
        # 0 for the newest token of a decode, 1 for its first draft, …, below 0 for padding; see `_resolve_drafted`.  (decodes, 1 + drafts)
        places = np.arange(1 + self.drafts, dtype=np.int32) - (self.drafts - lengths)[:, None]
        sampled = np.flatnonzero(places >= 0)
        samples, sample_indices = sample_arrays(counts[:with_drafts], 1 + self.drafts)
        # `drafted` returns views of the first four arrays, so these four come first in the buffer.
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
        """Pack a step that has chunks of prompts, or decodes with different numbers of tokens.

        The sequences are in this order: decodes without drafts, decodes with drafts, chunks that read the cache, chunks that do not.
        `_divide` makes two sequences of some chunks. The samples are in another order: decodes with drafts come first.
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
        # Samples: all tokens of decodes with drafts, then the last token of each other sequence that gives a new token.
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
        """Copy arrays to the device, one after the other into the buffer, in this order. Returns them by name."""
        return dict(zip(arrays, self._buffer.copy([*arrays.values()]), strict=True))

    def _divide(self, part: RequestPart, table_row: int) -> tuple[_Piece, _Piece]:
        """Divide a chunk into two sequences: its last tokens, which read the cache, and its first tokens, which do not. One may be empty.

        Only a chunk that begins at position 0 has tokens that do not read the cache; see `prompt_unit` in the class's docstring.
        """
        alone = 0
        if self.prompt_unit and part.start == 0:
            alone = part.count - part.count % self.prompt_unit
        cached = part.count - alone
        return (
            _Piece(part, table_row, part.start + alone, cached, part.samples and cached > 0),
            _Piece(part, table_row, part.start, alone, part.samples and cached == 0),
        )

    def _slots(self, table_rows: Array, positions: Array) -> Array:
        """Compute the slots `(groups, tokens)` of tokens on the host, from their table rows and positions `(tokens,)`."""
        blocks = self._host_tables[:, table_rows, positions // self.tokens_per_block]
        return blocks * self.tokens_per_block + positions % self.tokens_per_block

    def _update_tables(self, parts: Sequence[tuple[RequestPart, int]]) -> None:
        """Write the blocks that the policy has added to requests since the last step into the block tables."""
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
        """Copy parts of the block tables to the device. A change is `(table row, first column, last column + 1)`."""
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
    """A step that has only decodes, without drafts. `pack` makes the next step of the same requests from it."""

    numbers: Array
    """`(2 + groups, sequences)`: row 0 has table rows, row 1 context lengths, each further row slots of a group; padding at the end."""
    packed: PackedStep
    padded: bool
    """Whether the step runs as a CUDA graph, which reads all columns of the block tables."""
    in_block: int = 0
    """Number of steps from now on in which no decode begins a new cache block."""


def _padded(array: Array, count: int, value: int) -> Array:
    return np.concatenate((array, np.full(count, value, np.int32))) if count else array


class _Piece(NamedTuple):
    """One sequence of the step: consecutive tokens of a request's part."""

    part: RequestPart
    table_row: int
    """Table row of the request."""
    start: int
    """Position of the sequence's first token in the request."""
    count: int
    """Number of tokens."""
    samples: bool
    """Whether the logits of the last token give a new token."""

    @classmethod
    def of(cls, part: RequestPart, table_row: int) -> _Piece:
        """The sequence that has all tokens of a part."""
        return cls(part, table_row, part.start, part.count, part.samples)


def _known_tokens(piece: _Piece, drafts: Mapping[int, Sequence[int]]) -> Sequence[int]:
    """Return the tokens of a sequence. If only the device knows the newest token, it is -1 - table_row (see `BatchInputs.resolve`).

    `drafts` are added after the known tokens, up to `piece.count` tokens.
    """
    known = piece.part.tokens[piece.start : piece.start + piece.count]
    missing = piece.count - len(known)
    if not missing:
        return known
    following = drafts.get(piece.part.request.number)
    return [*known, -1 - piece.table_row] if following is None else [*known, *following[:missing]]


class _Score(NamedTuple):
    """Consecutive prompt tokens of one sequence whose logits are needed for log probabilities of the prompt."""

    number: int
    """Number of the request."""
    start: int
    """Position of the first of these tokens in the request."""
    indices: Array
    """`(tokens,)`: index of each of these tokens in the step."""
    targets: Array
    """`(tokens,)`: the prompt token that follows each of these tokens."""


def _scores(pieces: Sequence[_Piece], query_starts: Array, scored: Mapping[int, int]) -> list[_Score]:
    """Find the tokens whose logits give log probabilities of prompts. The result is sorted by request number, then by position.

    The last prompt token is not among them, because no prompt token follows it. `scored` is as in `BatchInputs.pack`.
    """
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
    """Return `(sequences,)`: the token that is `ahead + 1` positions after the last token of each sequence, or 0 if it is not known.

    Example: if a request has the tokens 4, 5, 6, 7, and a sequence has the first 3 of them, the result is 7 for `ahead` = 0 and 0 for 1.
    """
    ends = ((piece.part.tokens, piece.start + piece.count + ahead) for piece in pieces)
    return np.array([tokens[end] if end < len(tokens) else 0 for tokens, end in ends], np.int32)
