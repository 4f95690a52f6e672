"""Bytes of pipeline ranks by category, as array arithmetic shared by the exact account of a Plan and the closed form.

The executor, FSDP2 and the kernels decide which tensors are alive (docs/design/cost-model.md, "Memory").

A rank is fullest at one of three moments: in the head (logits and the head's gradients), in the first block's backward
while all activations are alive (gradients on their way), or when backward has ended (every gradient's sum, and copies
that travel).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.workload.arrays import Array
from meshwright.workload.buffers import (
    BLOCK_SLOTS,
    RECEIVES_AHEAD,
    STAGED_ELEMENTS,
    STAGING_BUFFERS,
    TOKEN_SLOTS,
    UNITS_IN_FLIGHT,
)

KINDS = ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "transfers", "framework")
WIDE = 4
"""Bytes of the loss's own sums (fp32)."""


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Bytes of the numbers of a run."""

    compute: Array = 2
    reduce: Array = 4
    stored: Array = 4
    resident: Array = 2
    """Of a weight that stays on the device while its optimizer is in host memory."""
    gathered: Array = 1.0
    """Of a block's gathered weight, over `compute`."""
    low: Array = 1.0
    """Of a product's input that is kept for backward, over `compute`."""
    travelling: Array = 0
    """Of the copies in which gradients travel between replicas; 0 when they travel as they are."""
    logit: Array = 2
    """A logit while the loss is made: a fused pass writes its gradient in its place, plain steps keep a wide copy beside it."""
    chunk: Array = 4096
    """Tokens whose logits exist at once."""
    workspace: Array = 200 << 20
    """Scratch memory of matrix products and attention."""
    window: Array = 0
    """1 where weights are gathered into a window that stays, by copy engines."""
    token_window: Array = 0
    """1 where tensor ranks copy tokens beside their products, through a window that stays."""
    framework: Array = 3 << 30
    """Context, communicators, kernels: what no tensor takes."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What pipeline ranks hold and when, one column each. Counts of parameters are those of one tensor rank."""

    owned: Array
    """Parameters of which the rank keeps master weight, sum of gradients and moments: its shards."""
    block: Array
    """Parameters of the largest block, with the experts that are on this rank, gathered."""
    ends: Array
    """Those of the embedding and the head that are here."""
    head: Array
    """Those of the unit that ends with the loss; 0 on other ranks."""
    shards: Array
    """Ranks that units are gathered over."""
    gathers: Array
    """1 when weights are gathered or brought to the compute format: all but plain full precision on one rank."""
    kept: Array
    """Layers whose gathered weights stay for the step."""
    ends_kept: Array
    """1 when those of the ends stay."""
    last: Array
    """Parameters of the unit gathered last, whose buffer stays until the next gather."""
    sums: Array
    """Bytes of earlier micro-batches' gradients when activations are at their maximum.

    0 with one micro-batch and in layered order.
    """
    reduces: Array
    """1 when units reduce their gradients in a backward that finds all activations alive."""
    away: Array
    """Memory of parameters with offloaded optimizer, as a share: shard, gradient sum, and chunks being updated."""
    layers: Array
    alive: Array
    """Bytes that forwards under way left for their backwards."""
    working: Array
    """Bytes of the block in backward beside them: what is recomputed, gradients of activations, gathered inputs."""
    tokens: Array
    """Of a micro-batch that the rank keeps activations of."""
    width: Array
    """Tensor ranks."""
    hidden: Array
    vocab: Array
    stays: Array
    """1 when gradients stay as they are made (`spec.layout.gradients_final_in_backward`)."""
    piled: Array
    """Micro-batches with gradients between two units: all in layered order; the head's also if all forwards come first."""
    piled_head: Array
    messages: Array
    """Of one micro-batch that go out to other ranks, both directions; negative without a pipeline."""


def account(held: Held, f: Formats) -> dict[str, Array]:
    """Bytes by kind of every column at its fullest moment. `transfers` is 0 without a pipeline."""
    stream = held.tokens * held.hidden * f.compute
    moments = (_in_the_head(held, f, stream), _first_backward(held, f, stream), _ended(held, f))
    totals = np.stack(np.broadcast_arrays(*(np.asarray(sum(kinds.values()), float) for kinds in moments)))
    fullest = np.argmax(totals, axis=0)
    at_peak = {
        kind: np.choose(fullest, np.broadcast_arrays(*(kinds[kind] for kinds in moments)))
        for kind in ("gradients", "gathered", "activations", "logits")
    }
    stays = 1 - held.away
    # Two moments, and the master weight where it is there too.
    kinds = 2.0 + (np.asarray(f.resident) < f.stored)
    staged = STAGING_BUFFERS * kinds * np.minimum(STAGED_ELEMENTS, held.owned * held.away)
    return {
        "weights": held.owned * (f.stored * stays + f.resident * held.away),
        "gradients": at_peak["gradients"],
        "optimizer": (2 * held.owned * stays + staged) * f.stored,
        "gathered": at_peak["gathered"],
        "activations": at_peak["activations"],
        "logits": at_peak["logits"],
        # A message sent is let go when the next one goes out.
        "transfers": np.where(held.messages < 0, 0.0, (RECEIVES_AHEAD + held.messages) * stream),
        # Mapped memory is not the allocator's: no tensor of torch's account takes it.
        "framework": f.framework + np.where(held.width > 1, f.token_window * TOKEN_SLOTS * held.width * stream, 0.0),
    }


def _weights_there(held: Held, f: Formats) -> Array:
    """Gathered weights, and the buffer of the last gather."""
    blocks = np.maximum(held.kept, np.minimum(UNITS_IN_FLIGHT, held.layers)) * held.block
    blocks = blocks * f.gathered
    ends = np.where(held.ends_kept > 0, held.ends, held.head)
    return held.gathers * (blocks + ends) * f.compute + _buffers(held, f, held.last)


def _buffers(held: Held, f: Formats, last: Array) -> Array:
    """Bytes that weights are gathered into: the buffer of the `last` gather, or a window."""
    end = np.maximum(held.head, held.ends - held.head)
    room = np.where(f.window > 0, BLOCK_SLOTS * held.block + end, last)
    return held.gathers * np.where(held.shards > 1, room, 0.0) * f.compute


def _in_the_head(held: Held, f: Formats, stream: Array) -> dict[str, Array]:
    """A chunk's logits, and the gradient of the head's weight in full width."""
    # The head sees the tokens of all tensor ranks, and its own part of the vocabulary.
    chunk = np.minimum(held.tokens * held.width, f.chunk) * held.vocab / held.width * f.logit
    table = held.vocab * held.hidden / held.width
    # A chunk's product is made beside the sum that it is added to: on H200s models of three sizes held a second one.
    wide = 2 * table * np.maximum(WIDE, f.compute) + np.where(held.piled > 0, table * f.reduce, 0.0)
    here = chunk + wide + stream * (1 + np.maximum(1.0, held.piled_head))
    return {
        "gradients": held.sums,
        "gathered": _weights_there(held, f),
        "activations": held.alive + held.piled * stream + f.workspace,
        "logits": np.where(held.head > 0, here, 0.0),
    }


def _first_backward(held: Held, f: Formats, stream: Array) -> dict[str, Array]:
    """Bytes of reduction buffers that coexist with a block's gradients: the head's, or a block's.

    On a pipeline's first rank, whose previous micro-batch ended its backward with the embedding, the embedding's.
    """
    # A unit that both ends share waits, summed in the format of the reduction, for the embedding's part.
    waits = np.where(held.head >= held.ends, 0.0, 1 / held.shards)
    before = np.where((held.head > 0) | (held.messages < 0), 0.0, held.ends)
    # What an exchange brought is let go on its own stream, whose memory compute gets none of.
    buffers = np.where((held.shards > 1) | (held.stays <= 0), f.reduce, 0.0)
    others = np.maximum(before, held.block) * (buffers + np.where(held.stays > 0, f.compute, f.reduce) / held.shards)
    reduced = held.reduces * np.maximum(held.head * (buffers + waits * f.reduce), others)
    made = held.block * (f.compute + np.where(held.piled > 0, f.reduce, 0.0))
    return {
        "gradients": held.sums,
        "gathered": _weights_there(held, f) + held.gathers * (reduced + made),
        "activations": held.alive + held.working + held.piled * stream + f.workspace,
        "logits": np.where(held.head > 0, stream * np.maximum(1.0, held.piled_head), 0.0),
    }


def _ended(held: Held, f: Formats) -> dict[str, Array]:
    """Gradients come as activations go, so a rank never holds all of both, unless earlier micro-batches left their sums."""
    unit = np.maximum(np.maximum(held.head, held.ends - held.head), held.block)
    alone = np.where(held.stays > 0, 0.0, UNITS_IN_FLIGHT * f.reduce)
    buffers = np.where(held.shards > 1, UNITS_IN_FLIGHT * f.reduce, alone)
    return {
        "gradients": held.owned * (np.where(held.stays > 0, f.compute, f.stored) + f.travelling),
        "gathered": held.gathers * unit * (f.compute + buffers) + _buffers(held, f, 0.0 * held.last),
        "activations": f.workspace + 0.0 * held.alive,
        "logits": 0.0 * held.alive,
    }
