"""Seconds of one step of the inference engine, by its shape.

A step reads the weights once, of routed experts those with a token, and multiplies them with all its tokens; the slower of both
determines its time, with a soft maximum for the region between. Decodes read their keys and values; few programs read the longest text,
so it takes longer than its share of the bytes. Chunks of prompts compute attention. The host launches a step with a prompt in
`prompt_seconds`, while the device computes; a step without one is a graph, whose launch counts as no time. Graphs pad steps with prompts
to the next of `prompt_sizes`. Fixed times and rates are `StepConstants`.
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
PADDED_DECODES = 8
MOST_PARTS = 32
"""Graphs have a multiple of so many decodes; at most so many programs share a text (`kernels.paged_attention`)."""


@dataclass(frozen=True)
class ExchangeTime:
    """Communication of a step between the devices of an instance: a fixed time, and a time per token of a group."""

    seconds: float = 0.0
    token_seconds: float = 0.0


class InstanceStepTimes:
    """The cost of the steps of one instance, for a simulator that asks often."""

    def __init__(
        self, work: DeviceWork, constants: StepConstants, *, groups: int = 1, exchange: ExchangeTime | None = None
    ) -> None:
        self.work = work
        self.constants = constants
        self.groups = groups
        self._exchange = exchange or ExchangeTime()
        self._lines: dict[int, tuple[float, float, float]] = {}
        self._matmuls: dict[tuple[int, int], float] = {}
        read = work.cache_bytes / constants.cache_bytes_per_s
        rate = constants.decode_flops_per_s
        self._position_seconds = (soft_maximum(read, work.attention_flops / rate) if rate else read) / groups
        """Seconds of each position that decodes attend to."""

    def seconds(self, decodes: int, positions: int, chunks: Sequence[PromptPart] = (), longest: int = 0) -> float:
        """Seconds of one of several such steps in turn, whose decodes attend to `positions` in all and one of them to `longest`.

        A `longest` of 0 stands for equal texts.
        """
        if not chunks:
            return self._decode_seconds(decodes, positions, longest)
        tokens = self.computed_tokens(decodes, chunks)
        computed = self._computed(tokens, decodes, positions, chunks, longest)
        return soft_maximum(computed, self.launch_seconds(decodes, chunks)) * self._factor(tokens)

    def launch_seconds(self, decodes: int, chunks: Sequence[PromptPart]) -> float:
        """Seconds in which the host launches a step."""
        if not chunks:
            return 0.0
        k = self.constants
        seconds = k.prompt_seconds + (k.beside_seconds if decodes else 0.0)
        return seconds + k.whole_seconds * whole_chunks(chunks, k.whole_tokens)

    def device_seconds(
        self, decodes: int, positions: int, chunks: Sequence[PromptPart] = (), longest: int = 0
    ) -> float:
        """Seconds in which the device computes a step that the host has launched."""
        if not chunks:
            return self._decode_seconds(decodes, positions, longest)
        tokens = self.computed_tokens(decodes, chunks)
        return self._computed(tokens, decodes, positions, chunks, longest) * self._factor(tokens)

    def _decode_seconds(self, decodes: int, positions: int, longest: int) -> float:
        fixed, each, of_longest = self.decode_line(decodes)
        return fixed + each * positions + of_longest * (longest or positions / max(1, decodes))

    def _computed(self, tokens: int, decodes: int, positions: int, chunks: Sequence[PromptPart], longest: int) -> float:
        """`device_seconds` of a step with chunks and so many `computed_tokens`, without its factor."""
        k = self.constants
        work = self.work
        groups = self.groups
        total = k.decode_seconds + self.matmul_seconds(tokens, decodes + len(chunks))
        if decodes:
            total += self.work.attended(decodes, positions) * self._position_seconds
            total += self._longest_seconds(decodes) * self.work.attended(1, longest or positions // decodes)
        total += work.pairs(chunks) * work.attention_flops / (k.attention_flops_per_s * groups)
        return total + (decodes * k.sequence_seconds + len(chunks) * k.chunk_seconds) / groups

    def _factor(self, tokens: int) -> float:
        return interpolated_factor(self.constants.prompt_factors, tokens)

    def computed_tokens(self, decodes: int, chunks: Sequence[PromptPart]) -> int:
        """Tokens of a step with chunks, with those to which its graph pads it."""
        tokens = decodes + sum([chunk.count for chunk in chunks])
        sizes = self.constants.prompt_sizes
        return sizes[bisect_left(sizes, tokens)] if sizes and tokens <= sizes[-1] else tokens

    def decode_line(self, decodes: int) -> tuple[float, float, float]:
        """Seconds of a step of so many decodes without positions, of each position, and of each of the longest text.

        Layers with a window add nothing to the last two: each decode attends to as many positions as the window has.
        """
        line = self._lines.get(decodes)
        if line is None:
            k = self.constants
            factor = interpolated_factor(k.decode_factors, decodes)
            fixed = (
                k.decode_seconds + self.matmul_seconds(decodes, decodes) + decodes * k.sequence_seconds / self.groups
            )
            each = self._position_seconds
            of_longest = self._longest_seconds(decodes)
            fixed += sum(
                (each * decodes + of_longest) * window * share
                for window, share in self.work.windows
                if window is not None
            )
            whole = sum(share for window, share in self.work.windows if window is None)
            each = each * whole
            of_longest = of_longest * whole
            line = self._lines[decodes] = (fixed * factor, each * factor, of_longest * factor)
        return line

    def _longest_seconds(self, decodes: int) -> float:
        """Seconds of each position of the longest of `decodes` texts: the others have ended while its programs take them in turn."""
        k = self.constants
        work = self.work
        if not (k.text_bytes_per_s and k.decode_programs):
            return 0.0
        local = max(1, round(decodes / self.groups))
        padded = local if local < PADDED_DECODES // 2 else -(-local // PADDED_DECODES) * PADDED_DECODES
        parts = max(1, min(MOST_PARTS, -(-k.decode_programs // (padded * work.kv_heads))))
        return work.cache_bytes / work.kv_heads / (parts * k.text_bytes_per_s)

    def matmul_seconds(self, tokens: int, samples: int) -> float:
        """Seconds of the matmuls with weights and of communication, for `tokens` of which `samples` give logits."""
        seconds = self._matmuls.get((tokens, samples))
        if seconds is None:
            k = self.constants
            work = self.work
            local = max(1.0, tokens / self.groups)
            read = (work.dense_bytes + work.head_bytes) / k.weight_bytes_per_s
            read += work.read_expert_bytes(tokens) / (k.expert_bytes_per_s or k.weight_bytes_per_s)
            computed = (local * work.dense_flops + max(1.0, samples / self.groups) * work.head_flops) / k.flops_per_s
            computed += local * work.expert_flops / (k.expert_flops_per_s or k.flops_per_s)
            seconds = soft_maximum(read, computed) + work.routed_layers * k.routed_seconds
            seconds += self._exchange.seconds + self._exchange.token_seconds * local
            self._matmuls[tokens, samples] = seconds
        return seconds


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
