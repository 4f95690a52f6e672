"""Sampling of new tokens on the device, for a batch of requests with different options."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.kernels.token_draw import draw_tokens


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token of a request is chosen from its logits."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Only so many likeliest tokens are drawn; 0 allows all."""
    seed: int = 0
    """The draws of a request depend on its seed and the positions of its tokens alone."""


GREEDY = SamplingOptions(temperature=0.0)


class Sampler:
    """Draws tokens for the requests of a batch; the options of each table row are on the device."""

    def __init__(self, table_rows: int, device: torch.device) -> None:
        self._floats = torch.zeros(table_rows, dtype=torch.float32)
        self._integers = torch.zeros(2, table_rows, dtype=torch.int64)
        self._device, self._temperatures, self._top_k_and_seeds = device, self._floats, self._integers
        self._changed = False

    def assign(self, table_row: int, options: SamplingOptions) -> None:
        """A table row gets another request."""
        self._floats[table_row] = options.temperature
        self._integers[0, table_row], self._integers[1, table_row] = options.top_k, options.seed
        self._changed = True

    def sample(self, logits: Tensor, table_rows: Tensor, positions: Tensor, *, greedy: bool) -> Tensor:
        """The next tokens `(samples,)` int32 of logits `(samples, vocab)`.

        `table_rows` and `positions` `(samples,)` are the table rows and the positions of the new tokens.
        `greedy`: no request has a temperature.
        """
        if greedy:
            return logits.argmax(1).to(torch.int32)
        if self._changed:
            self._temperatures = self._floats.to(self._device)
            self._top_k_and_seeds = self._integers.to(self._device)
            self._changed = False
        top_k, seeds = self._top_k_and_seeds[:, table_rows]
        return draw_tokens(logits, self._temperatures[table_rows], top_k, seeds, positions.long()).to(torch.int32)
