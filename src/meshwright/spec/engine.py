"""Options of the inference engine: for its users, and those that a program sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.spec.errors import BadInput
from meshwright.spec.fields import Positive

Fp8 = Literal["fp8"]
"""e4m3: 4 significant bits, up to 448."""
WeightFormat = Literal["fp8", "int8"]
"""Formats that weights and activations of linear layers are rounded to."""
Dispatch = Literal["int8"]
"""A format of tokens on their way to experts: integers from -127 to 127, with a scale for each token."""


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """Devices of one host that share the experts of each layer; each has requests and a cache of its own."""

    count: int = 1
    dispatch: Dispatch | None = None
    """Format of tokens on their way to experts of other devices; none is the model's dtype."""
    micro_batches: int = 1
    """Parts of a step's decodes; the tokens of one travel between devices while another is computed."""

    def __post_init__(self) -> None:
        if self.count == 1 and (self.dispatch is not None or self.micro_batches > 1):
            raise BadInput("dispatch and micro-batches of experts: tokens travel between several devices only")


ONE_RANK = ExpertRanks()
"""A device that has all experts."""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculative decoding: by prompt lookup, the engine's draft model or, with `mtp`, the model's own modules.

    Raises BadInput for sizes below 1.
    """

    tokens: int = 4
    """Draft tokens of a request in a step at most."""
    longest: int = 4
    """Prompt lookup searches a text for its own last tokens, at most so many."""
    shortest: int = 2
    """Fewest last tokens that prompt lookup searches for."""
    least: float | None = None
    """Accepted drafts a step below which those of a request pause; 0 never, None by their cost (`policies.drafting`)."""
    mtp: bool = False
    """Whether the model's modules for multi-token prediction propose the drafts, one each."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise BadInput(f"speculation: expected at least 1 draft token, got {self.tokens}")
        if not 1 <= self.shortest <= self.longest:
            raise BadInput(f"speculation: expected 1 ≤ shortest ≤ longest, got {self.shortest} and {self.longest}")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Sizes and formats of an engine, which `meshwright serve` has as keys. Raises BadInput for sizes below 1."""

    sequences: Positive = 256
    """Requests in a batch at most."""
    step_tokens: Positive = 8192
    """Prompt tokens of a step at most, beside a token of each running request; longer prompts are cut into chunks."""
    tokens_per_block: Positive = 16
    """Tokens in a block of the cache."""
    cache_blocks: Positive | None = None
    """Blocks in the cache; none takes as many as fit the device."""
    context: Positive | None = None
    """Longest text in tokens, prompt and new tokens together; none is the model's context, which is the most."""
    prefix_cache: bool = True
    """Whether requests share cached blocks of equal prefixes."""
    weights: WeightFormat | None = None
    """Format of the matmuls in the transformer blocks; none is the model's dtype, or that of a quantised folder on a GPU.

    With fp8, experts keep the model's dtype if several devices share them, and on other GPUs than Hopper.
    """
    kv_cache: Fp8 | None = None
    """Format of cached keys and values; none is the model's dtype."""
    invariant: bool = False
    """Whether a text is equal bit for bit whatever other requests are in its batch (batch invariance); slower."""

    def __post_init__(self) -> None:
        for name in ("sequences", "step_tokens", "tokens_per_block", "cache_blocks", "context"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BadInput(f"{name}: expected at least 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineSettings):
    """Sizes and switches of an engine."""

    overlap: bool | None = None
    """Whether a step is launched before the tokens of the one before are read; None: on a GPU."""
    graphs: bool | None = None
    """Whether steps of decodes only are replayed as CUDA graphs; None: on a GPU."""
    prompt_graphs: bool = True
    """Whether, with graphs, steps with prompts are replayed in pieces: graphs between the attention of two layers.

    Invariant steps have none.
    """
    absorb: bool = True
    """Whether decodes of latent attention attend to latents; if not, each expands its context's keys and values."""
    texts: bool = True
    """Whether updates have texts and stop strings are found; a caller that decodes the tokens itself needs neither."""
    speculation: Speculation | None = None
    """Drafts by prompt lookup, a draft model or prediction modules; None: no drafts."""

    @property
    def predictions(self) -> int:
        """Prediction modules that propose drafts."""
        return self.speculation.tokens if self.speculation is not None and self.speculation.mtp else 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.graphs and not self.absorb:
            raise BadInput("graphs: not without absorb, whose decodes read lengths on the host")

    @property
    def most_step_tokens(self) -> int:
        """`step_tokens`, and a decode of each request."""
        return self.step_tokens + self.sequences
