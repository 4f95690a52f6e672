"""Measured steps of the inference engine, and the constants of its cost model that are fitted to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshwright.spec.engine import Fp8, WeightFormat
from meshwright.spec.fields import Bound, NotNegative, Positive
from meshwright.spec.model import ModelSpec

Seconds = Annotated[float, Bound(more_than=0)]
NotNegativeSeconds = Annotated[float, Bound(at_least=0)]
Rate = Annotated[float, Bound(more_than=0)]
NotNegativeRate = Annotated[float, Bound(at_least=0)]


@dataclass(frozen=True, kw_only=True)
class ProfiledChunk:
    """Consecutive tokens of one prompt in a step."""

    start: NotNegative
    """Positions of the prompt that were computed before."""
    count: Positive
    """Tokens of the chunk."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A measured step."""

    decodes: NotNegative
    """Requests with one new token each."""
    positions: NotNegative
    """Positions that these attend to in all, their own included."""
    longest: NotNegative = 0
    """The most positions of one of them; 0 if all attend to equally many."""
    chunks: tuple[ProfiledChunk, ...] = ()
    """Chunks of prompts."""
    seconds: Seconds
    """Median time from the end of the step before to the end of this one."""
    launch_seconds: NotNegativeSeconds = 0.0
    """Median time in which the host launched it, on a device that computes meanwhile; 0 if it was not measured."""
    exposed_seconds: NotNegativeSeconds = 0.0
    """Median time for which the host was still launching it when the device could compute it."""

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.decodes + sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, kw_only=True)
class StepFactor:
    """Measured over modelled time of steps with so many tokens."""

    tokens: Positive
    factor: Rate


@dataclass(frozen=True, kw_only=True)
class StepConstants:
    """Constants of a step's time on one device (`costs.serve_costs`)."""

    weight_bytes_per_s: Rate
    """Rate at which a step reads the weights."""
    expert_bytes_per_s: NotNegativeRate = 0.0
    """Rate at which it reads those of routed experts; 0: as the others."""
    routed_seconds: NotNegativeSeconds = 0.0
    """Time of each layer with routed experts beside that of its bytes."""
    flops_per_s: Rate
    """Rate of the matmuls with weights."""
    expert_flops_per_s: NotNegativeRate = 0.0
    """Rate of the matmuls with routed experts; 0: as the others."""
    cache_bytes_per_s: Rate
    """Rate at which decodes read keys and values."""
    decode_flops_per_s: NotNegativeRate = 0.0
    """Rate of the attention of decodes, which latents reach before that of their bytes; 0: bytes alone count."""
    text_bytes_per_s: NotNegativeRate = 0.0
    """Rate at which one program of a decode reads keys and values; 0: the longest text costs no more than its bytes."""
    decode_programs: NotNegative = 0
    """Programs into which the device divides the decodes of a step, so that few texts have several each; 0: not known."""
    attention_flops_per_s: Rate
    """Rate of the attention of prompts."""
    decode_seconds: NotNegativeSeconds
    """Fixed time of a step on the device."""
    prompt_seconds: NotNegativeSeconds
    """Time in which the host launches a step with chunks of prompts, while the device computes. It then takes in no tokens."""
    beside_seconds: NotNegativeSeconds = 0.0
    """Time added to this launch if the step also has decodes."""
    whole_seconds: NotNegativeSeconds = 0.0
    """Time added to this launch by each chunk of at least `whole_tokens` tokens at the beginning of a prompt."""
    whole_tokens: NotNegative = 0
    """Tokens from which on such a chunk is computed by an attention kernel without the cache; 0: there is none."""
    prompt_sizes: tuple[Positive, ...] = ()
    """Tokens to which steps with chunks of prompts are padded, ascending; steps with more than the last are not padded."""
    sequence_seconds: NotNegativeSeconds
    """Time of each decode beside its matmuls and its attention: sampling, and the host."""
    chunk_seconds: NotNegativeSeconds
    """Time of each chunk beside its matmuls and its attention."""
    decode_factors: tuple[StepFactor, ...] = ()
    """By number of decodes, measured over modelled time of steps without a prompt; between two, it is interpolated."""
    prompt_factors: tuple[StepFactor, ...] = ()
    """By number of tokens, the same of steps with a prompt."""


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """Steps of the engine with one model on one device, and the constants fitted to them."""

    date: str
    """Day and time of the measurement, UTC, ISO 8601."""
    model: ModelSpec
    """Dimensions of the model; its weights were random."""
    weights: WeightFormat | None = None
    """Format of the matmuls with the blocks' weights; none is the model's dtype."""
    kv_cache: Fp8 | None = None
    """Format of cached keys and values; none is the model's dtype."""
    item_bytes: Positive = 2
    """Bytes of a number in the model's dtype."""
    overlap: bool = True
    """Whether a step was planned while the one before it ran, as on a GPU."""
    other_bytes: NotNegative = 0
    """Memory of the device that neither weights, cache nor a step take."""
    constants: StepConstants
    """Constants fitted to `steps`."""
    steps: tuple[StepTime, ...] = ()
    """The measured steps."""
    median_error: NotNegativeSeconds = 0.0
    """Median of the constants' relative errors at steps that were left out of the fit in turn."""
