"""The blocks of a rank's model, those of prediction modules among them."""

from __future__ import annotations

from meshwright.models.block import Block
from meshwright.models.decoder import Decoder
from meshwright.models.prediction import PredictionModule


def numbered_blocks(model: Decoder) -> list[tuple[int, Block]]:
    """Every block with its number: prediction modules follow the layers."""
    blocks = [(int(layer), block) for layer, block in model.layers.items()]
    blocks += [(model.spec.layers + depth, module.block) for depth, module in enumerate(predictions_of(model))]
    assert all(isinstance(block, Block) for _, block in blocks)
    return blocks  # pyrefly: ignore [bad-return]  # a ModuleDict has modules


def blocks_with_layer(model: Decoder) -> list[tuple[int, Block]]:
    """Every block with the layer whose strategy it has: a prediction module's has that of the last layer."""
    return [(min(number, model.spec.layers - 1), block) for number, block in numbered_blocks(model)]


def predictions_of(model: Decoder) -> list[PredictionModule]:
    """The prediction modules that the rank has: all, or none."""
    return [module for module in model.predictions if isinstance(module, PredictionModule)]
