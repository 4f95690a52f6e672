"""Reading the tokens of a step on the host, without waiting for the device when the step is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.policies.batch_request import Part, Step

BUFFERS = 3
"""Steps whose tokens may be on their way to the host, and one more."""


@dataclass(slots=True)
class LaunchedStep:
    """A step whose tokens have not been read."""

    step: Step
    parts: Sequence[Part]
    """The parts that get a token."""
    tokens: Tensor
    """Their tokens on the host, once `copied` has passed."""
    copied: torch.cuda.Event | None
    """None on a CPU."""

    def read(self) -> list[int]:
        """The tokens; waits until the device has computed them."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.tokens.tolist()


class TokenReadback:
    """Copies tokens to pinned memory of the host."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        count = BUFFERS if self._cuda else 0
        self._buffers = [torch.empty(tokens, dtype=torch.int32, pin_memory=True) for _ in range(count)]
        self._events = [torch.cuda.Event() for _ in range(count)]
        self._turn = 0

    def start(self, tokens: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Where tokens `(count,)` will be on the host, and the event after which they are there."""
        if not self._cuda:
            return tokens, None
        buffer, event = self._buffers[self._turn][: len(tokens)], self._events[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        buffer.copy_(tokens, non_blocking=True)
        event.record()
        return buffer, event
