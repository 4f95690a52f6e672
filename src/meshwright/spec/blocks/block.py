"""A block: sublayers around the residual stream."""

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
    """Adds to the residual stream what its bodies compute from the norm of it.

    Two bodies read one norm and are added: a parallel block (MegaScale §3.1).
    """

    norm: NormSpec | None
    """None where the bodies read the residual stream itself."""
    bodies: tuple[BlockBody, ...]
    norm_out: NormSpec | None = None
    """Norm of the body's output before it is added; a sublayer with two bodies has none."""
    factor: float = 1.0
    """Factor of what is added to the residual stream."""

    @property
    def shares_transfers(self) -> bool:
        """Whether tensor ranks gather and scatter tokens once for all bodies; an MoE layer transfers its tokens itself."""
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
    """That of projections back into the residual stream."""
    adapter: AdapterSpec | None = None
    """Adapters of its linear layers, beside which all its other weights are frozen."""

    @property
    def bodies(self) -> tuple[BlockBody, ...]:
        return tuple(body for sublayer in self.sublayers for body in sublayer.bodies)

    @property
    def mixer(self) -> AttentionSpec | LatentAttentionSpec:
        """Its attention."""
        return next(body for body in self.bodies if isinstance(body, AttentionSpec | LatentAttentionSpec))

    @property
    def feed_forward(self) -> FeedForwardSpec | MoESpec:
        """Its feed-forward network, or the experts in place of one."""
        return next(body for body in self.bodies if isinstance(body, FeedForwardSpec | MoESpec))

    @property
    def moe(self) -> MoESpec | None:
        """Its MoE layer, if it has one."""
        return next((body for body in self.bodies if isinstance(body, MoESpec)), None)

    def table(self, *, spread: bool = False) -> Table:
        """Its operations; `spread`: the experts of a layer are on several ranks."""
        return _table(self, spread)


@lru_cache(maxsize=256)
def _table(block: BlockSpec, spread: bool) -> Table:
    source = Value("x0", block.hidden)
    operations = _operations(block, source.name, spread)
    if block.adapter is not None:
        operations = block.adapter.applied(operations)
    return Table(source, tuple(operations), frozen=block.adapter is not None)


def _operations(block: BlockSpec, stream: str, spread: bool) -> Iterator[Op]:
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
