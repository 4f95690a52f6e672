"""The forward pass of expert ranks in micro-batches: while the tokens of one travel to experts, another is computed.

Each micro-batch is a generator that yields when its tokens are on their way (`parallel.expert_inference`). All ranks take the same number
in the same order, so their exchanges match; a rank with fewer decodes, or with none, exchanges nothing for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from meshwright.models.block import Block
from meshwright.models.decoder import Decoder
from meshwright.parallel.expert_inference import exchange_nothing, moe_in_stages
from meshwright.serve.batch_inputs import StepInputs
from meshwright.serve.blocks import CopyOutputs, block_forward, moe_input
from meshwright.serve.model_runner import ModelRunner

Stream = Generator[None, None, tuple[Tensor, Tensor | None]]


class MicroBatchRunner(ModelRunner):
    """Computes steps in micro-batches; one with chunks of prompts is a single one."""

    micro_batches = 1
    """Number of micro-batches of a step, the same on all ranks of a group."""

    def compute_nothing(self) -> None:
        """Take part in the exchanges of a step without tokens of this rank."""
        run_in_turn([_nothing(self._model) for _ in range(self.micro_batches)])

    def _residual(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        parts = split_decodes(inputs, self.micro_batches)
        streams = [_stream(self._model, part) if len(part.tokens) else _nothing(self._model) for part in parts]

        def select(index: int) -> None:
            self._step.inputs = parts[index]

        outputs = run_in_turn(streams, select)
        x, deltas = zip(*outputs, strict=True)
        return torch.cat(x, 1), torch.cat([delta for delta in deltas if delta is not None], 1)


def run_in_turn(
    streams: Sequence[Stream], select: Callable[[int], None] = lambda index: None
) -> list[tuple[Tensor, Tensor | None]]:
    """Advance each stream to its next exchange, in turn, until all have ended; `select` is called before with its number."""
    outputs: dict[int, tuple[Tensor, Tensor | None]] = {}
    while len(outputs) < len(streams):
        for index, stream in enumerate(streams):
            if index in outputs:
                continue
            select(index)
            try:
                next(stream)
            except StopIteration as end:
                outputs[index] = end.value
    return [outputs[index] for index in range(len(streams))]


def split_decodes(step: StepInputs, count: int) -> list[StepInputs]:
    """`count` steps with about as many decodes each; if it has too few or is mixed, the step itself and empty ones.

    Their tokens in order are those of the step. The inputs of an empty step have no tokens only.
    """
    tokens = len(step.tokens)
    if step.decodes < len(step.context_lengths) or step.decode_queries > 1 or tokens < count:
        return [step] + [step._replace(tokens=step.tokens[:0])] * (count - 1)
    bounds = [tokens * index // count for index in range(count + 1)]
    return [_decodes_between(step, *ends) for ends in pairwise(bounds)]


def _decodes_between(step: StepInputs, first: int, last: int) -> StepInputs:
    part = slice(first, last)
    return step._replace(
        tokens=step.tokens[part],
        positions=step.positions[part],
        slots=step.slots[:, part],
        block_tables=tuple(table[part] for table in step.block_tables),
        context_lengths=step.context_lengths[part],
        query_starts=step.query_starts[: last - first + 1],
        decodes=last - first,
    )


def _stream(model: Decoder, inputs: StepInputs) -> Stream:
    """`serve.blocks.residual_stream` that yields during exchanges."""
    x = model.embed_tokens(inputs.tokens[None], inputs.positions[None])
    delta = None
    for module in model.layers.values():
        block = cast("Block", module)
        if block.routed:
            x, normed = moe_input(block, x, delta)
            output = yield from moe_in_stages(block.moe, normed)
            delta = block.added_output(output)
        else:
            x, branch = block_forward(block, x, delta)
            assert not isinstance(branch, CopyOutputs), "a block without experts has one output"
            delta = branch
    return x, delta


def _nothing(model: Decoder) -> Stream:
    yield from exchange_nothing(model)
    return model.embed.weight.new_empty(1, 0, model.spec.hidden), None
