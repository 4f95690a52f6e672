"""Multi-token prediction (DeepSeek-AI 2024, arXiv 2412.19437, §2.2): modules that predict further tokens.

The modules follow the last block. Module k (k = 1, 2, …) predicts token i + 1 + k at position i. Its inputs are the embedding of token i +
k and, at position i, the normed output of the model (for k = 1) or of module k - 1. The modules use the model's embedding and head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.linear import Linear
from meshwright.models.block import Block
from meshwright.models.norm import Norm
from meshwright.spec.model import ModelSpec


class FurtherTokens(NamedTuple):
    """What prediction modules read and predict at each position, `(batch, seq, depth)` each; entry k - 1 is for module k.

    - `inputs`: tokens whose embeddings the modules read.
    - `targets`: tokens to predict; -1 is ignored.
    - `weights`: factors of the losses; None: all are 1.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> FurtherTokens:
        """Return a copy in which `change` is applied to each tensor."""
        weights = None if self.weights is None else change(self.weights)
        return FurtherTokens(change(self.inputs), change(self.targets), weights)


class PredictionModule(nn.Module):
    """Norms of both inputs, a projection of the two inputs together, one block, and the norm before the head.

    With `reference` the norms use the kernels' reference implementations; `block` is created by the caller.
    """

    def __init__(self, spec: ModelSpec, reference: bool, block: Block) -> None:
        super().__init__()
        self.token_norm = Norm(spec.residual_norm, spec.hidden, reference)
        self.hidden_norm = Norm(spec.residual_norm, spec.hidden, reference)
        self.project = Linear(2 * spec.hidden, spec.hidden, bias=False)
        self.block = block
        self.norm = Norm(spec.residual_norm, spec.hidden, reference)

    def join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return the block's input, from `hidden` (the earlier output) and the `embedded` tokens; all are `(batch, seq, hidden)`."""
        return self.project(torch.cat([self.token_norm(embedded), self.hidden_norm(hidden)], dim=-1))


def further_tokens(
    tokens: Tensor, targets: Tensor, documents: Tensor | None, depth: int, weights: Tensor | None = None
) -> FurtherTokens:
    """Return the further tokens of whole sequences. The arguments are `(batch, seq)` as in `Decoder.forward`.

    A target counts if it is trained on and belongs to the same document as its position. At the end of a sequence there is no token to
    read, so the sequence's first tokens are read instead. This is harmless: the target there does not count, and no earlier position
    attends to these positions.
    """
    inputs = []
    shifted = []
    of_targets = []
    for distance in range(1, depth + 1):
        inputs.append(tokens.roll(-distance, 1))
        target = F.pad(targets[:, distance:], (0, min(distance, targets.shape[1])), value=-1)
        if documents is not None:
            target = target.masked_fill(documents.roll(-distance, 1) != documents, -1)
        shifted.append(target)
        if weights is not None:
            of_targets.append(F.pad(weights[:, distance:], (0, min(distance, targets.shape[1]))))
    stacked = torch.stack(of_targets, -1) if of_targets else None
    return FurtherTokens(torch.stack(inputs, -1), torch.stack(shifted, -1), stacked)
