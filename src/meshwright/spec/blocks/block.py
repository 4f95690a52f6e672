"""A block: sublayers, each of which adds its result to the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from meshwright.spec.blocks.adapter import AdapterSpec
from meshwright.spec.blocks.attention import AttentionSpec
from meshwright.spec.blocks.feed_forward import FeedForwardSpec
from meshwright.spec.blocks.latent_attention import LatentAttentionSpec
from meshwright.spec.blocks.moe import MoESpec
from meshwright.spec.blocks.norm import NormSpec
from meshwright.spec.blocks.part import BlockBody, BodyPlace
from meshwright.spec.blocks.table import Op, Table, Value


@dataclass(frozen=True, kw_only=True)
class SublayerSpec:
    """A sublayer: its bodies (attention, feed-forward network) compute from the normed residual stream, and the result
    is added to the stream.

    If there are two bodies, both read the same norm, and their results are added: a parallel block (MegaScale §3.1).
    """

    norm: NormSpec | None
    """Norm of the bodies' input; None if they read the residual stream itself."""
    bodies: tuple[BlockBody, ...]
    """Attention or feed-forward network, or both in a parallel block."""
    norm_out: NormSpec | None = None
    """Norm of the body's output before it is added. A sublayer with two bodies has none."""
    factor: float = 1.0
    """Factor of the result before it is added to the residual stream."""

    @property
    def shares_transfers(self) -> bool:
        """Return whether tensor ranks gather and scatter tokens once for all bodies.

        An MoE layer transfers its tokens itself.
        """
        return not any(isinstance(body, MoESpec) for body in self.bodies)


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """A block of a decoder."""

    hidden: int
    """Width of the residual stream."""
    sublayers: tuple[SublayerSpec, ...]
    std: float
    """Standard deviation of initial weights."""
    residual_std: float
    """Standard deviation of the initial weights of projections back into the residual stream."""
    adapter: AdapterSpec | None = None
    """Adapters of its linear layers. If there are any, all other weights of the block are frozen."""

    @property
    def bodies(self) -> tuple[BlockBody, ...]:
        """Return the bodies of all sublayers."""
        return tuple(body for sublayer in self.sublayers for body in sublayer.bodies)

    @property
    def mixer(self) -> AttentionSpec | LatentAttentionSpec:
        """Return its attention."""
        return next(body for body in self.bodies if isinstance(body, AttentionSpec | LatentAttentionSpec))

    @property
    def feed_forward(self) -> FeedForwardSpec | MoESpec:
        """Return its feed-forward network, or the experts instead of it."""
        return next(body for body in self.bodies if isinstance(body, FeedForwardSpec | MoESpec))

    @property
    def moe(self) -> MoESpec | None:
        """Return its MoE layer; None if it has none."""
        return next((body for body in self.bodies if isinstance(body, MoESpec)), None)

    def table(self, *, spread: bool = False) -> Table:
        """Return its operations. `spread` is true if the experts of a layer are on several ranks."""
        return _table(self, spread)


@lru_cache(maxsize=256)
def _table(block: BlockSpec, spread: bool) -> Table:
    source = Value("x0", block.hidden)
    operations = _operations(block, source.name, spread)
    if block.adapter is not None:
        operations = block.adapter.applied(operations)
    return Table(source, tuple(operations), frozen=block.adapter is not None)


def _operations(block: BlockSpec, stream: str, spread: bool) -> Iterator[Op]:
    """Yield the operations of a block without adapters; `stream` is the name of its input."""
    for number, sublayer in enumerate(block.sublayers, 1):
        source = stream
        if sublayer.norm is not None:
            normed = Value(sublayer.bodies[0].NORM, block.hidden)
            yield sublayer.norm.operation(normed.name, stream, normed, block.hidden)
            source = normed.name
        outputs = []
        for body in sublayer.bodies:
            place = BodyPlace(
                hidden=block.hidden,
                prefix=body.MODULE,
                reads=source,
                std=block.std,
                residual_std=block.residual_std,
                spread=spread,
            )
            yield from body.operations(place)
            output = place.output.name
            if sublayer.norm_out is not None:
                written = Value(body.OUTPUT_NORM, block.hidden)
                yield sublayer.norm_out.operation(body.OUTPUT_NORM, output, written, block.hidden)
                output = written.name
            outputs.append(output)
        added = Value(f"x{number}", block.hidden)
        yield Op(name=f"add{number}", reads=(stream, *outputs), writes=(added,))
        stream = added.name
