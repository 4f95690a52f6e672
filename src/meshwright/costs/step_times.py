"""Seconds of one step of the inference engine, by its shape.

A step reads the weights once and multiplies them with all its tokens; the slower of both determines its time, with a soft maximum for
the region between. Decodes read their keys and values, chunks of prompts compute attention. The host launches a step with a prompt in
`prompt_seconds`, while the device computes; one without is launched as a graph, in no time. Fixed times and rates are `StepConstants`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from meshwright.costs.serve_work import DeviceWork, PromptPart
from meshwright.spec.serve_profile import StepConstants, StepFactor

SOFTNESS = 4.0
"""Exponent of the soft maximum: two equal times give 1.19 times one of them."""


@dataclass(frozen=True)
class Exchange:
    """Communication of a step between the devices of an instance: a fixed time, and a time per token of a group."""

    seconds: float = 0.0
    token_seconds: float = 0.0


class StepTimes:
    """The cost of the steps of one instance, for a simulator that asks often."""

    def __init__(
        self, work: DeviceWork, constants: StepConstants, *, groups: int = 1, exchange: Exchange | None = None
    ) -> None:
        self.work, self.constants, self.groups = work, constants, groups
        self._exchange = exchange or Exchange()
        self._lines: dict[int, tuple[float, float]] = {}
        self._products: dict[tuple[int, int], float] = {}

    def seconds(self, decodes: int, positions: int, chunks: Sequence[PromptPart] = ()) -> float:
        """Seconds of one of several such steps in turn, whose decodes attend to `positions` in all, with these chunks of prompts."""
        if not chunks:
            return self._decode_seconds(decodes, positions)
        computed = soft_maximum(self._computed(decodes, positions, chunks), self.launch_seconds(decodes, chunks))
        return computed * self._factor(decodes, chunks)

    def launch_seconds(self, decodes: int, chunks: Sequence[PromptPart]) -> float:
        """Seconds in which the host launches a step."""
        if not chunks:
            return 0.0
        k = self.constants
        seconds = k.prompt_seconds + (k.beside_seconds if decodes else 0.0)
        return seconds + k.whole_seconds * whole_chunks(chunks, k.whole_tokens)

    def device_seconds(self, decodes: int, positions: int, chunks: Sequence[PromptPart] = ()) -> float:
        """Seconds in which the device computes a step that the host has launched."""
        if not chunks:
            return self._decode_seconds(decodes, positions)
        return self._computed(decodes, positions, chunks) * self._factor(decodes, chunks)

    def _decode_seconds(self, decodes: int, positions: int) -> float:
        fixed, each = self.decode_line(decodes)
        return fixed + each * positions

    def _computed(self, decodes: int, positions: int, chunks: Sequence[PromptPart]) -> float:
        """`device_seconds` of a step with chunks, without its factor."""
        k, work, groups = self.constants, self.work, self.groups
        tokens = decodes + sum([chunk.count for chunk in chunks])
        total = k.decode_seconds + self.product_seconds(tokens, decodes + len(chunks))
        total += self._attended(decodes, positions) * work.cache_bytes / (k.cache_bytes_per_s * groups)
        total += work.pairs(chunks) * work.attention_flops / (k.attention_flops_per_s * groups)
        return total + (decodes * k.sequence_seconds + len(chunks) * k.chunk_seconds) / groups

    def _factor(self, decodes: int, chunks: Sequence[PromptPart]) -> float:
        return interpolated_factor(self.constants.prompt_factors, decodes + sum([chunk.count for chunk in chunks]))

    def decode_line(self, decodes: int) -> tuple[float, float]:
        """Seconds of a step of `decodes` decodes without their positions, and seconds of each position that they attend to.

        With a window the second is 0: each decode attends to as many positions as the window has.
        """
        line = self._lines.get(decodes)
        if line is None:
            k = self.constants
            factor = interpolated_factor(k.decode_factors, decodes)
            fixed = (
                k.decode_seconds + self.product_seconds(decodes, decodes) + decodes * k.sequence_seconds / self.groups
            )
            each = self.work.cache_bytes / (k.cache_bytes_per_s * self.groups)
            if self.work.window is not None:
                fixed, each = fixed + each * decodes * self.work.window, 0.0
            line = self._lines[decodes] = (fixed * factor, each * factor)
        return line

    def product_seconds(self, tokens: int, samples: int) -> float:
        """Seconds of the products with weights and of communication, for `tokens` of which `samples` give logits."""
        seconds = self._products.get((tokens, samples))
        if seconds is None:
            k, work, local = self.constants, self.work, max(1.0, tokens / self.groups)
            read = (work.weight_bytes(tokens) + work.head_bytes) / k.weight_bytes_per_s
            flops = local * (work.dense_flops + work.expert_flops) + max(1.0, samples / self.groups) * work.head_flops
            computed = flops / k.flops_per_s
            seconds = soft_maximum(read, computed)
            seconds += self._exchange.seconds + self._exchange.token_seconds * local
            self._products[tokens, samples] = seconds
        return seconds

    def _attended(self, decodes: int, positions: int) -> int:
        return positions if self.work.window is None else min(positions, decodes * self.work.window)


def whole_chunks(chunks: Sequence[PromptPart], tokens: int) -> int:
    """How many chunks begin a prompt and have so many tokens or more; none for 0 tokens."""
    return sum([chunk.start == 0 and chunk.count >= tokens for chunk in chunks]) if tokens else 0


def soft_maximum(first: float, second: float) -> float:
    """The larger of two positive times, and up to 1.19 times that where they are alike."""
    longer, shorter = (first, second) if first > second else (second, first)
    return longer * (1 + (shorter / longer) ** SOFTNESS) ** (1 / SOFTNESS) if longer else 0.0


def interpolated_factor(factors: Sequence[StepFactor], tokens: int) -> float:
    """The factor at `tokens`, linear in their logarithm between two entries and constant outside; 1 without entries."""
    if not factors or tokens < 1:
        return 1.0
    index = bisect_left(factors, tokens, key=lambda factor: factor.tokens)
    if index == len(factors):
        return factors[-1].factor
    above = factors[index]
    if index == 0 or above.tokens == tokens:
        return above.factor
    below = factors[index - 1]
    share = log(tokens / below.tokens) / log(above.tokens / below.tokens)
    return below.factor + share * (above.factor - below.factor)
