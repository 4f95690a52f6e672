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
    """Consecutive tokens of one prompt that a step computes."""

    start: NotNegative
    """Number of the prompt's tokens that were computed before."""
    count: Positive
    """Number of tokens of the chunk."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A measured step: what it computed, and how long that took."""

    decodes: NotNegative
    """Number of requests that get one new token each."""
    positions: NotNegative
    """Number of positions to which these requests attend in all, their own included."""
    longest: NotNegative = 0
    """Largest number of positions of one of these requests; 0 if all have equally many."""
    chunks: tuple[ProfiledChunk, ...] = ()
    """Chunks of prompts."""
    seconds: Seconds
    """Median seconds from the end of the previous step to the end of this step."""
    launch_seconds: NotNegativeSeconds = 0.0
    """Median seconds that the host needed to launch the step, while the device computed; 0 if it was not measured."""
    exposed_seconds: NotNegativeSeconds = 0.0
    """Median seconds for which the device was free but the host was still launching the step."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the step computes."""
        return self.decodes + sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, kw_only=True)
class StepFactor:
    """Factor on the predicted time of steps with a number of tokens."""

    tokens: Positive
    """Tokens (or decodes) of the steps."""
    factor: Rate
    """Measured time divided by predicted time."""


@dataclass(frozen=True, kw_only=True)
class StepConstants:
    """Constants of a step's time on one device (`costs.step_times`).

    Rates are in bytes/s or FLOP/s, times in seconds.
    """

    weight_bytes_per_s: Rate
    """Rate at which a step reads the weights."""
    expert_bytes_per_s: NotNegativeRate = 0.0
    """Rate at which a step reads the weights of routed experts; 0: the rate of other weights."""
    routed_seconds: NotNegativeSeconds = 0.0
    """Seconds of each layer with routed experts, in addition to reading their weights."""
    flops_per_s: Rate
    """Rate of the matmuls with weights."""
    expert_flops_per_s: NotNegativeRate = 0.0
    """Rate of the matmuls with routed experts; 0: the rate of other matmuls."""
    cache_bytes_per_s: Rate
    """Rate at which decodes read keys and values."""
    decode_flops_per_s: NotNegativeRate = 0.0
    """Rate of the attention of decodes.

    It limits latent attention, which computes much for each byte that it reads; 0: only the bytes count.
    """
    text_bytes_per_s: NotNegativeRate = 0.0
    """Rate at which one program of the attention kernel reads keys and values; 0: the longest sequence takes no longer
    than its bytes.
    """
    decode_programs: NotNegative = 0
    """Number of GPU programs over which the attention of a step's decodes is divided, so that each of a few sequences
    has several; 0: not known.
    """
    attention_flops_per_s: Rate
    """Rate of the attention of prompts."""
    decode_seconds: NotNegativeSeconds
    """Fixed seconds of a step on the device."""
    prompt_seconds: NotNegativeSeconds
    """Seconds in which the host launches a step with prompt chunks, while the device computes.

    The engine accepts no tokens meanwhile.
    """
    beside_seconds: NotNegativeSeconds = 0.0
    """Seconds that this launch takes longer if the step also has decodes."""
    whole_seconds: NotNegativeSeconds = 0.0
    """Seconds that this launch takes longer for each chunk that begins a prompt and has at least `whole_tokens` tokens.
    """
    whole_tokens: NotNegative = 0
    """Number of tokens from which on such a chunk is computed by an attention kernel that does not read the cache; 0:
    there is none.
    """
    prompt_sizes: tuple[Positive, ...] = ()
    """Token counts to which steps with prompt chunks are padded, ascending.

    Steps with more tokens than the last are not padded.
    """
    sequence_seconds: NotNegativeSeconds
    """Seconds of each decode in addition to its matmuls and its attention: sampling, and the host."""
    chunk_seconds: NotNegativeSeconds
    """Seconds of each prompt chunk in addition to its matmuls and its attention."""
    decode_factors: tuple[StepFactor, ...] = ()
    """Measured over predicted time of steps without prompts, by number of decodes.

    Between two numbers it is interpolated.
    """
    prompt_factors: tuple[StepFactor, ...] = ()
    """Measured over predicted time of steps with prompts, by number of tokens."""


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """Measured steps of the engine with one model on one device, and the constants that were fitted to them."""

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
    """Whether each step was planned while the previous step ran, as on a GPU."""
    other_bytes: NotNegative = 0
    """Device memory that is used by neither weights, cache nor a step."""
    constants: StepConstants
    """Constants fitted to `steps`."""
    steps: tuple[StepTime, ...] = ()
    """The measured steps."""
    median_error: NotNegativeSeconds = 0.0
    """Median relative error of the constants at a step that was left out of the fit; each step was left out once."""
