"""Seconds of one step of the inference engine, by its decodes and prompt chunks.

- Matmuls: the step reads all weights once (of routed experts only those that get a token), and multiplies them with all its tokens. The
  slower of reading and computing determines the time; where both are similar, a soft maximum gives a little more.
- Decodes read the keys and values of their sequences. Only a few GPU programs read the longest sequence, so it takes longer than its share
  of the bytes.
- Prompt chunks compute attention.
- Launch: with a prompt chunk, the host needs `prompt_seconds` to launch the step, at the same time as the device computes. A step without
  prompt chunks is launched as one CUDA graph, whose launch time is not counted.
- Padding: a step with prompt chunks is padded to the next token count in `prompt_sizes`, if a graph exists for it.

Fixed times and rates are in `StepConstants`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from meshwright.costs.serve_work import DeviceWork, PromptPart
from meshwright.spec.serve_profile import StepConstants, StepFactor

SOFTNESS = 4.0
"""Exponent of the soft maximum. With 4, two equal times give 2 ** (1 / 4) = 1.19 times one of them."""
PADDED_DECODES = 8
"""CUDA graphs exist for multiples of this number of decodes."""
MOST_PARTS = 32
"""The most GPU programs that share the attention of one sequence (`kernels.paged_attention`)."""


@dataclass(frozen=True)
class ExchangeTime:
    """Communication between the devices of an instance in a step."""

    seconds: float = 0.0
    """Seconds that do not depend on the tokens: latencies."""
    token_seconds: float = 0.0
    """Further seconds for each token of a group."""


class InstanceStepTimes:
    """Computes the seconds of an instance's steps, with caches for a simulator that asks for many steps."""

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
        """Seconds for each position that a decode attends to."""

    def seconds(self, decodes: int, positions: int, chunks: Sequence[PromptPart] = (), longest: int = 0) -> float:
        """Return the seconds of a step if steps like it follow each other: the larger of launch and device time, by a soft maximum.

        `positions` is how many positions all decodes attend to together, `longest` how many the longest sequence among them has; 0 means
        that all sequences are equally long. `chunks` are the prompt chunks of the step.
        """
        if not chunks:
            return self._decode_seconds(decodes, positions, longest)
        tokens = self.computed_tokens(decodes, chunks)
        computed = self._computed(tokens, decodes, positions, chunks, longest)
        return soft_maximum(computed, self.launch_seconds(decodes, chunks)) * self._factor(tokens)

    def launch_seconds(self, decodes: int, chunks: Sequence[PromptPart]) -> float:
        """Return the seconds that the host needs to launch a step; 0 without prompt chunks."""
        if not chunks:
            return 0.0
        k = self.constants
        seconds = k.prompt_seconds + (k.beside_seconds if decodes else 0.0)
        return seconds + k.whole_seconds * whole_chunks(chunks, k.whole_tokens)

    def device_seconds(
        self, decodes: int, positions: int, chunks: Sequence[PromptPart] = (), longest: int = 0
    ) -> float:
        """Return the seconds that the device computes a launched step; the arguments are those of `seconds`."""
        if not chunks:
            return self._decode_seconds(decodes, positions, longest)
        tokens = self.computed_tokens(decodes, chunks)
        return self._computed(tokens, decodes, positions, chunks, longest) * self._factor(tokens)

    def _decode_seconds(self, decodes: int, positions: int, longest: int) -> float:
        fixed, each, of_longest = self.decode_line(decodes)
        return fixed + each * positions + of_longest * (longest or positions / max(1, decodes))

    def _computed(self, tokens: int, decodes: int, positions: int, chunks: Sequence[PromptPart], longest: int) -> float:
        """Return `device_seconds` of a step with prompt chunks, without its factor; `tokens` are its `computed_tokens`."""
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
        """Return how many tokens the device computes in a step with prompt chunks, including padding."""
        tokens = decodes + sum([chunk.count for chunk in chunks])
        sizes = self.constants.prompt_sizes
        return sizes[bisect_left(sizes, tokens)] if sizes and tokens <= sizes[-1] else tokens

    def decode_line(self, decodes: int) -> tuple[float, float, float]:
        """Return the coefficients (fixed, each, of_longest) of the seconds of a step of `decodes` decodes.

        The step takes `fixed + each * positions + of_longest * longest` seconds. Layers with a window count only in `fixed`: there each
        decode attends to as many positions as the window has.
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
        """Return the further seconds for each position of the longest of `decodes` sequences.

        At most `MOST_PARTS` programs share a sequence. So the programs of the longest one still read it when the others have finished.
        """
        k = self.constants
        work = self.work
        if not (k.text_bytes_per_s and k.decode_programs):
            return 0.0
        local = max(1, round(decodes / self.groups))
        padded = local if local < PADDED_DECODES // 2 else -(-local // PADDED_DECODES) * PADDED_DECODES
        parts = max(1, min(MOST_PARTS, -(-k.decode_programs // (padded * work.kv_heads))))
        return work.cache_bytes / work.kv_heads / (parts * k.text_bytes_per_s)

    def matmul_seconds(self, tokens: int, samples: int) -> float:
        """Return the seconds of matmuls with weights and of communication for `tokens` tokens, where `samples` of them need logits."""
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
    """Return how many chunks begin a prompt and have at least `tokens` tokens; 0 if `tokens` is 0."""
    return sum([chunk.start == 0 and chunk.count >= tokens for chunk in chunks]) if tokens else 0


def soft_maximum(first: float, second: float) -> float:
    """Return the larger of two times, or up to 1.19 times it if they are similar: (a⁴ + b⁴)^(1/4)."""
    longer, shorter = (first, second) if first > second else (second, first)
    return longer * (1 + (shorter / longer) ** SOFTNESS) ** (1 / SOFTNESS) if longer else 0.0


def interpolated_factor(factors: Sequence[StepFactor], tokens: int) -> float:
    """Return the factor for `tokens` tokens, interpolated between two entries on a logarithmic scale of tokens.

    Below the first and above the last entry it is constant. Without entries it is 1.
    """
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
