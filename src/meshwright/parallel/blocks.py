"""The blocks of a rank's model, those of prediction modules among them."""

from __future__ import annotations

from meshwright.models.block import Block
from meshwright.models.decoder import Decoder
from meshwright.models.prediction import PredictionModule


def numbered_blocks(model: Decoder) -> list[tuple[int, Block]]:
    """Return every block of this rank with its number. The blocks of prediction modules are numbered after the layers."""
    blocks = [(int(layer), block) for layer, block in model.layers.items()]
    blocks += [(model.spec.layers + depth, module.block) for depth, module in enumerate(predictions_of(model))]
    assert all(isinstance(block, Block) for _, block in blocks)
    return blocks  # pyrefly: ignore [bad-return]  # a ModuleDict has modules


def blocks_with_layer(model: Decoder) -> list[tuple[int, Block]]:
    """Return every block with the layer whose strategy it uses. The block of a prediction module uses the last layer's strategy."""
    return [(min(number, model.spec.layers - 1), block) for number, block in numbered_blocks(model)]


def predictions_of(model: Decoder) -> list[PredictionModule]:
    """Return the prediction modules on this rank: all of the model's, or none."""
    return [module for module in model.predictions if isinstance(module, PredictionModule)]
