"""The tensors of steps that the real policy plans, against a slow construction from each request's whole text."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch

from meshwright.policies.batch_request import BatchLimits, CacheGroup, EngineStep, Request, RequestPart
from meshwright.policies.batching import BatchPolicy
from meshwright.policies.cache_blocks import CacheBlocks
from meshwright.serve.batch_inputs import BatchInputs, PackedStep, StepInputs
from meshwright.serve.request_rows import RequestRows

SIZE, SEQUENCES, STEP_TOKENS, CONTEXT = 4, 5, 12, 40
"""Tokens of a block, requests of a batch, tokens of a step, tokens of a text at most."""
DECODE_SIZES = (1, 2, 4)
FULL, WINDOW = CacheGroup(19), CacheGroup(16, window=6)
"""Too few blocks for five texts, so that some are preempted."""


def whole_text(number: int, prompt: int, total: int) -> list[int]:
    """Prompts of one family begin alike; new tokens differ."""
    return [1 + (number % 2) + 7 * p % 50 if p < prompt else 100 + (13 * number + 7 * p) % 1000 for p in range(total)]


class Piece(NamedTuple):
    """Consecutive tokens of a part."""

    part: RequestPart
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.part.samples and self.start + self.count == self.part.start + self.part.count


class Player:
    """Computes steps as the engine does, with texts that are known from the beginning."""

    def __init__(self, groups: list[CacheGroup], decode_sizes: tuple[int, ...], seed: int, unit: int = 1) -> None:
        self.draw, self.groups, self.decode_sizes = random.Random(seed), groups, decode_sizes
        self.unit = unit
        self.policy = BatchPolicy(BatchLimits(STEP_TOKENS, SEQUENCES), CacheBlocks(groups, SIZE))
        self.table_rows = RequestRows(2 * SEQUENCES)
        self.inputs = BatchInputs(
            table_rows=2 * SEQUENCES,
            blocks=CONTEXT // SIZE,
            groups=len(groups),
            tokens_per_block=SIZE,
            step_tokens=STEP_TOKENS + SEQUENCES,
            device=torch.device("cpu"),
            prompt_unit=unit,
            drafts=3,
        )
        self.texts: dict[int, list[int]] = {}
        self.in_flight: tuple[EngineStep, list[int]] | None = None
        self.seen: Counter[str] = Counter()

    def play(self, requests: int, overlap: bool) -> None:
        """Play all requests to their ends; `overlap` launches each step before the last is completed."""
        while self.policy.unfinished or len(self.texts) < requests:
            if len(self.texts) < requests and self.draw.random() < 0.3:
                self.add(len(self.texts))
            if self.draw.random() < 0.02 and self.texts:
                self.policy.abort(self.draw.choice(list(self.texts)))
                self.release()
            if not overlap:
                self.complete()
            launched = self.launch()
            self.complete()
            self.in_flight = launched
        self.complete()

    def add(self, number: int) -> None:
        prompt = self.draw.randint(1, 24)
        new = self.draw.randint(1, CONTEXT - prompt)
        self.texts[number] = text = whole_text(number, prompt, prompt + new)
        self.policy.add(Request(number, text[:prompt], new))

    def launch(self) -> tuple[EngineStep, list[int]] | None:
        """Plan a step, check its tensors, and leave the new tokens where the next step finds them."""
        if (step := self.policy.next_step(0.0)) is None:
            return None
        needed = {part.request.number for part in step.parts}
        needed |= set() if self.in_flight is None else {part.request.number for part in self.in_flight[0].parts}
        for number in [part.request.number for part in step.parts if part.request.number not in self.table_rows.row_of]:
            self.inputs.forget_row(self.table_rows.take(number, needed))
        packed = self.inputs.pack(step, self.table_rows.row_of, self.decode_sizes)
        resolved = self.inputs.resolve(packed)
        self.check(step, packed, resolved)
        new = {part.request.number: self.texts[part.request.number][part.start + part.count] for part in step.sampling}
        sampled = [new[part.request.number] for part in packed.sampled_parts]
        self.inputs.newest[packed.sampled_rows] = torch.tensor(sampled, dtype=torch.int32)
        return step, list(new.values())

    def complete(self) -> None:
        if self.in_flight is None:
            return
        (step, tokens), self.in_flight = self.in_flight, None
        numbers = [part.request.number for part in step.sampling]
        self.policy.complete(step, tokens, {number for number in numbers if self.draw.random() < 0.01})
        self.release()

    def release(self) -> None:
        for ended in self.policy.drain_ended():
            self.table_rows.release(ended.number)

    def check(self, step: EngineStep, packed: PackedStep, inputs: StepInputs) -> None:
        """Decodes come first, then tokens of chunks that attend to the cache, then those that do not."""
        chunks = step.parts[step.decodes :]
        alone = [part.count // self.unit * self.unit if part.start == 0 else 0 for part in chunks]
        behind = [Piece(p, p.start + n, p.count - n) for p, n in zip(chunks, alone, strict=True) if n < p.count]
        first = [Piece(p, 0, n) for p, n in zip(chunks, alone, strict=True) if n]
        parts = [*(Piece(part, part.start, part.count) for part in step.parts[: step.decodes]), *behind, *first]
        padding = 0
        if not chunks:
            size = min((size for size in self.decode_sizes if size >= len(parts)), default=len(parts))
            padding = size - len(parts)
            assert packed.decode_size == size
        self.count_cases(step, padding)
        self.seen["divided"] += len(parts) > len(step.parts)
        spans = [(part, range(part.start, part.start + part.count)) for part in parts]
        tokens = [self.texts[part.part.request.number][position] for part, span in spans for position in span]
        assert inputs.tokens.tolist()[: len(tokens)] == tokens
        assert len(inputs.tokens) == len(inputs.positions) == len(tokens) + padding
        assert inputs.positions.tolist() == [position for _, span in spans for position in span] + [0] * padding
        assert inputs.slots.shape[0] == len(inputs.block_tables) == len(self.groups)
        for group in range(len(self.groups)):
            slots = [part.part.tables[group][at // SIZE] * SIZE + at % SIZE for part, span in spans for at in span]
            assert inputs.slots[group].tolist() == slots + [-1] * padding
            self.check_tables(parts, group, inputs.block_tables[group], padding)
        ends = [part.start + part.count for part in parts]
        assert inputs.context_lengths.tolist() == ends + [0] * padding
        counts = [part.count for part in parts] + [1] * padding
        assert inputs.query_starts.tolist() == [sum(counts[:index]) for index in range(len(counts) + 1)]
        assert inputs.decodes == step.decodes + padding and packed.decodes == step.decodes
        assert inputs.prompts == tuple(part.count for part in first)
        self.check_samples(parts, packed, inputs)

    def check_tables(self, parts: list[Piece], group: int, tables: torch.Tensor, padding: int) -> None:
        """A table has every block that the part's queries attend to; what stands for others is not read."""
        assert len(tables) == len(parts) + padding
        window = self.groups[group].window or CONTEXT
        for part, table in zip(parts, tables.tolist(), strict=False):
            first, last = max(part.start - window + 1, 0) // SIZE, (part.start + part.count - 1) // SIZE + 1
            assert table[first:last] == part.part.tables[group][first:last]
            assert 0 not in table[first:last]
            self.seen["blocks outside of the window"] += first > 0

    def check_samples(self, parts: list[Piece], packed: PackedStep, inputs: StepInputs) -> None:
        samples = [part for part in parts if part.samples]
        assert list(packed.sampled_parts) == [part.part for part in samples]
        assert packed.sampled_rows.tolist() == [self.table_rows.row_of[part.part.request.number] for part in samples]
        assert packed.sampled_positions.tolist() == [part.start + part.count for part in samples]
        if inputs.sampled is not None:
            last = [sum(part.count for part in parts[: index + 1]) - 1 for index in range(len(parts))]
            assert inputs.sampled.tolist() == [at for at, part in zip(last, parts, strict=True) if part.samples]
        else:
            assert samples == parts

    def count_cases(self, step: EngineStep, padding: int) -> None:
        parts = step.parts
        unknown = [part for part in parts if len(part.tokens) < part.start + part.count]
        self.seen["tokens on the device only"] += len(unknown)
        self.seen["such tokens beside chunks"] += bool(unknown) and len(parts) > step.decodes
        self.seen["padding"] += padding
        self.seen["unchanged"] += step.unchanged
        self.seen["grown"] += step.unchanged and bool(step.grown)
        self.seen["computed again"] += sum(part.computation > 0 and part.start == 0 for part in parts)
        self.seen["behind a chunk"] += sum(part.start > 0 for part in parts[step.decodes :])


@pytest.mark.parametrize(("decode_sizes", "unit"), [((), 1), (DECODE_SIZES, 3)], ids=["exact", "padded"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("groups", [[FULL], [WINDOW], [FULL, WINDOW]], ids=["full", "window", "both"])
def test_tensors_are_those_of_the_texts(
    groups: list[CacheGroup], overlap: bool, decode_sizes: tuple[int, ...], unit: int
) -> None:
    player = Player(groups, decode_sizes, seed=len(groups), unit=unit)
    player.play(30, overlap)
    expected = {"unchanged", "grown", "behind a chunk"}
    expected |= {"tokens on the device only", "such tokens beside chunks"} if overlap else set()
    expected |= {"padding"} if decode_sizes else set()
    expected |= {"divided"} if unit > 1 else set()
    expected |= {"blocks outside of the window"} if WINDOW in groups else set()
    expected |= {"computed again"} if FULL in groups else set()
    assert {name for name, count in player.seen.items() if count} >= expected, player.seen


@pytest.mark.parametrize("groups", [[FULL], [FULL, WINDOW]], ids=["full", "both"])
@pytest.mark.parametrize("decode_sizes", [(), DECODE_SIZES], ids=["exact", "padded"])
def test_decodes_with_drafts_have_equal_numbers_of_tokens(
    decode_sizes: tuple[int, ...], groups: list[CacheGroup]
) -> None:
    """Three requests with none, one and three drafts of at most three; the first text is shorter than that."""
    player = Player(groups, decode_sizes, seed=0)
    prompts, drafts = ([5], [6] * 4, [8] * 7), {1: [71], 2: [81, 82, 83]}
    for number, prompt in enumerate(prompts):
        player.policy.add(Request(number, prompt, 9))
        player.inputs.forget_row(player.table_rows.take(number, ()))
    step = player.policy.next_step(0.0)
    assert step is not None and len(step.sampling) == 3
    player.inputs.pack(step, player.table_rows.row_of)
    player.policy.complete(step, [50, 60, 80])
    player.inputs.newest[[0, 1, 2]] = torch.tensor([50, 60, 80], dtype=torch.int32)
    step = player.policy.next_step(0.0, {number: len(tokens) for number, tokens in drafts.items()})
    assert step is not None
    packed = player.inputs.pack(step, player.table_rows.row_of, decode_sizes, drafts)
    inputs = player.inputs.resolve(packed)
    padding = 1 if decode_sizes else 0
    assert (packed.decode_size, packed.decodes, inputs.decodes, inputs.decode_queries) == (
        3 + padding,
        3,
        3 + padding,
        4,
    )
    assert packed.sampled_tokens is not None and packed.drafts is not None
    sampled = packed.sampled_tokens.tolist()
    assert inputs.tokens[sampled].tolist() == [60, 71, 80, 81, 82, 83, 50]
    assert inputs.positions[sampled].tolist() == [4, 5, 7, 8, 9, 10, 1]
    assert packed.sampled_positions.tolist() == [5, 6, 8, 9, 10, 11, 2]
    assert packed.sampled_rows.tolist() == [1, 1, 2, 2, 2, 2, 0]
    assert [part.request.number for part in packed.sampled_parts] == [1, 2, 0]
    assert inputs.context_lengths.tolist() == [6, 11, 2] + [0] * padding
    assert inputs.query_starts.tolist() == list(range(0, 4 * (4 + padding), 4))
    for group in range(len(groups)):
        expected = [-1] * len(inputs.tokens)
        for token, row, position in zip(
            sampled, packed.sampled_rows.tolist(), inputs.positions[sampled].tolist(), strict=True
        ):
            part = next(part for part in step.parts if player.table_rows.row_of[part.request.number] == row)
            expected[token] = part.tables[group][position // SIZE] * SIZE + position % SIZE
        assert inputs.slots[group].tolist() == expected
    assert packed.drafts.counts == (2, 4) and packed.drafts.lengths.tolist() == [1, 3]
    assert packed.drafts.positions.tolist() == [4, 7] and packed.drafts.table_rows.tolist() == [1, 2]
    assert packed.drafts.tokens[1].tolist() == [81, 82, 83] and packed.drafts.tokens[0, 0] == 71
    assert packed.drafts.samples.tolist() == [[0, 1, 1, 1], [2, 3, 4, 5]]
    assert packed.drafts.indices.tolist() == [0, 1, 4, 5, 6, 7]


def test_a_step_of_padding_writes_and_samples_nothing() -> None:
    player = Player([FULL, WINDOW], DECODE_SIZES, seed=0)
    packed = player.inputs.pack_padding(4)
    inputs = player.inputs.resolve(packed)
    assert inputs.slots.tolist() == [[-1] * 4] * 2
    assert inputs.context_lengths.tolist() == inputs.positions.tolist() == [0] * 4
    assert inputs.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert packed.decode_size == inputs.decodes == 4
    assert not len(packed.sampled_rows) and not packed.sampled_parts
    assert all(table.shape == (4, CONTEXT // SIZE) for table in inputs.block_tables)
    inputs = player.inputs.resolve(player.inputs.pack_padding(2, 4))
    assert inputs.slots.tolist() == [[-1] * 8] * 2 and not inputs.context_lengths.any()
    assert (inputs.decodes, inputs.decode_queries, inputs.query_starts.tolist()) == (2, 4, [0, 4, 8])


def test_a_row_with_another_request_has_its_table() -> None:
    """Both requests have as many blocks, so only `forget_row` tells them apart."""
    inputs = Player([FULL], (), seed=0).inputs
    for blocks in ([3, 4], [5, 6]):
        policy = BatchPolicy(BatchLimits(STEP_TOKENS, SEQUENCES), CacheBlocks([FULL], SIZE))
        policy.add(Request(7, list(range(SIZE + 1)), 2))
        step = policy.next_step(0.0)
        assert step is not None
        step.parts[0].tables[0][:] = blocks
        inputs.forget_row(2)
        table: Any = inputs.resolve(inputs.pack(step, {7: 2})).block_tables[0]
        assert table.tolist() == [blocks]
