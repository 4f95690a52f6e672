"""The forward pass of expert ranks in micro-batches: while the tokens of one micro-batch are sent to experts, another one is computed.

Each micro-batch is a generator that yields while its tokens are being sent (`parallel.expert_inference`). All ranks compute the same number
of micro-batches in the same order, so that their exchanges match. If a rank has too few decodes, some of its micro-batches are empty; in
their exchanges the rank sends no tokens.
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
"""The forward pass of one micro-batch. It yields during each exchange, and returns `(x, delta)` as `serve.blocks.residual_stream`."""


class MicroBatchRunner(ModelRunner):
    """Computes each step in `micro_batches` micro-batches. If a step has chunks of prompts, its first micro-batch has all tokens."""

    micro_batches = 1
    """Number of micro-batches of a step. It must be the same on all ranks of a group."""

    def compute_nothing(self) -> None:
        """Take part in all exchanges of a step in which this rank has no tokens."""
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
    """Advance the streams in turn, each to its next exchange, until all have ended. Returns the results of the streams, in order.

    Before a stream is advanced, `select` is called with its index.
    """
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
    """Split a step into `count` steps that have about equally many decodes.

    A step is not split if it has chunks of prompts, decodes with drafts, or fewer tokens than `count`. Then the result is the step itself
    and `count` - 1 empty steps. The other inputs of an empty step, except `tokens`, are not empty. Example: a step of 5 decodes split by 2
    gives steps of 2 and 3 decodes.
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
    """Compute what `serve.blocks.residual_stream` computes, and yield during each exchange of tokens."""
    x = model.embed_tokens(inputs.tokens[None], inputs.positions[None])
    delta = None
    for module in model.layers.values():
        block = cast("Block", module)
        if block.routed:
            x, normed = moe_input(block, x, delta)
            output = yield from moe_in_stages(block.moe, normed)
            delta = block.mlp_branch_output(output)
        else:
            x, branch = block_forward(block, x, delta)
            assert not isinstance(branch, CopyOutputs), "a block without experts has one output"
            delta = branch
    return x, delta


def _nothing(model: Decoder) -> Stream:
    yield from exchange_nothing(model)
    return model.embed.weight.new_empty(1, 0, model.spec.hidden), None
