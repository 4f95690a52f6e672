"""Options of the inference engine: those that users set, and those that a program sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.spec.errors import BadInput
from meshwright.spec.fields import Positive

Fp8 = Literal["fp8"]
"""The format e4m3: 4 significant bits, values up to 448."""
WeightFormat = Literal["fp8", "int8"]
"""Formats to which weights and activations of linear layers are rounded."""
Dispatch = Literal["int8"]
"""A number format in which tokens are sent to experts: integers from -127 to 127, with one scale per token."""


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """Devices of one host that divide the experts of each layer. Each has its own requests and its own cache.

    Raises BadInput for options of several devices with a single device.
    """

    count: int = 1
    """Number of devices."""
    dispatch: Dispatch | None = None
    """Number format in which tokens are sent to experts on other devices; none is the model's dtype."""
    micro_batches: int = 1
    """Number of parts into which a step's decodes are divided.

    While one part is computed, the tokens of another are sent between devices.
    """

    def __post_init__(self) -> None:
        if self.count == 1 and (self.dispatch is not None or self.micro_batches > 1):
            raise BadInput("dispatch and micro-batches of experts: tokens travel between several devices only")


ONE_RANK = ExpertRanks()
"""A single device, which has all experts."""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculative decoding: drafts come from prompt lookup, from a draft model, or with `mtp` from the model's own
    modules.

    Raises BadInput for sizes below 1.
    """

    tokens: int = 4
    """Maximum number of draft tokens of a request in a step."""
    longest: int = 4
    """Prompt lookup searches a sequence for an earlier copy of its own last tokens.

    This is the largest number of last tokens.
    """
    shortest: int = 2
    """Smallest number of last tokens for which prompt lookup searches."""
    least: float | None = None
    """If a request has fewer accepted drafts per step than this, its drafts pause.

    0: never. None: decided by their cost (`policies.drafting`).
    """
    mtp: bool = False
    """Whether the model's modules for multi-token prediction propose the drafts, one draft each."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise BadInput(f"speculation: expected at least 1 draft token, got {self.tokens}")
        if not 1 <= self.shortest <= self.longest:
            raise BadInput(f"speculation: expected 1 ≤ shortest ≤ longest, got {self.shortest} and {self.longest}")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Sizes and formats of an engine, which are also keys of `meshwright serve`. Raises BadInput for sizes below 1."""

    sequences: Positive = 256
    """Maximum number of requests in a batch."""
    step_tokens: Positive = 8192
    """Maximum number of prompt tokens of a step, in addition to one token of each running request.

    Longer prompts are cut into chunks.
    """
    tokens_per_block: Positive = 16
    """Tokens in a block of the cache."""
    cache_blocks: Positive | None = None
    """Blocks in the cache; none is as many as fit on the device."""
    context: Positive | None = None
    """Longest sequence in tokens, prompt and new tokens together; none is the model's context, which is also the
    maximum.
    """
    prefix_cache: bool = True
    """Whether requests whose prompts begin with the same tokens share cached blocks."""
    weights: WeightFormat | None = None
    """Format of the matmuls in the transformer blocks; none is the model's dtype, or on a GPU the format of a quantised
    folder. With fp8, experts keep the model's dtype if several devices divide them, and on GPUs other than Hopper.
    """
    kv_cache: Fp8 | None = None
    """Format of cached keys and values; none is the model's dtype."""
    invariant: bool = False
    """Whether an answer is the same bit for bit, whatever other requests are in its batch (batch invariance); slower.
    """

    def __post_init__(self) -> None:
        for name in ("sequences", "step_tokens", "tokens_per_block", "cache_blocks", "context"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BadInput(f"{name}: expected at least 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineSettings):
    """All options of an engine, also those that only a program sets."""

    overlap: bool | None = None
    """Whether a step is launched before the tokens of the previous step are read; None: only on a GPU."""
    graphs: bool | None = None
    """Whether steps without prompts are replayed as CUDA graphs; None: only on a GPU."""
    prompt_graphs: bool = True
    """Whether, with `graphs`, steps with prompts are replayed as several graphs: one between the attention of two
    layers.

    Invariant steps are not replayed so.
    """
    absorb: bool = True
    """Whether decodes with latent attention attend to latents.

    If not, each decode expands the keys and values of its context.
    """
    texts: bool = True
    """Whether tokens are decoded to text and stop strings are found.

    A caller that decodes the tokens itself needs neither.
    """
    speculation: Speculation | None = None
    """Speculative decoding; None: without drafts."""

    @property
    def predictions(self) -> int:
        """Return the number of prediction modules that propose drafts."""
        return self.speculation.tokens if self.speculation is not None and self.speculation.mtp else 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.graphs and not self.absorb:
            raise BadInput("graphs: not without absorb, whose decodes read lengths on the host")

    @property
    def most_step_tokens(self) -> int:
        """Return the most tokens of a step: `step_tokens`, and one decode of each request."""
        return self.step_tokens + self.sequences
