"""A serving deployment, the requests and limits for which it is planned, and the file that asks for its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, get_args

from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.engine import Dispatch, Fp8, WeightFormat
from meshwright.spec.fields import Bound, Positive
from meshwright.spec.run import ModelSection

Role = Literal["both", "prefill", "decode"]
"""What an instance computes of its requests: see `InstanceSpec.role`."""
Limit = Literal["ttft", "tpot"]
"""A limit of latency: time to the first token, or time per further token."""
PricedFormat = Literal["bf16", "fp8", "int8", "mxfp8", "nvfp4", "mxfp4", "int4"]
"""Formats of weights for which the planner predicts times.

With int4, only weights are narrow: the matmuls are in bf16.
"""
WEIGHT_BYTES: dict[PricedFormat, float] = {
    "fp8": 1.0,
    "int8": 1.0,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 1 / 2 + 1 / 16,
    "mxfp4": 1 / 2 + 1 / 32,
    "int4": 1 / 2 + 2 / 32,
}
"""Bytes of a weight with its share of the scales.

A scale of one byte belongs to 32 weights (mxfp8, mxfp4) or to 16 weights (nvfp4); a scale of two bytes to 32 weights
(int4).
"""
ServingSoftwareName = Literal["vllm", "sglang", "trtllm"]
"""Servers with fitted constants (`costs.serving_software`): vLLM, SGLang, TensorRT-LLM."""
PREFIX_BLOCK = 512
"""Number of prompt tokens for which a trace has one prefix block."""


def weight_bytes(weights: PricedFormat | None, item: int) -> float:
    """Return the bytes of a weight in the format `weights`.

    For None and bf16 it is `item`, the bytes of a number in the model's dtype.
    """
    return float(item) if weights in (None, "bf16") else WEIGHT_BYTES[weights]


class TimedRequest(NamedTuple):
    """A request with its arrival time."""

    arrival_seconds: float
    """Seconds from the start of the workload to the request."""
    input_tokens: int
    """Tokens of the prompt."""
    output_tokens: int
    """New tokens of the answer."""
    prefix_blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks of `PREFIX_BLOCK` tokens.

    If the first n ids of two prompts are equal, the prompts begin with the same n blocks.
    """


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """Number formats of a server where they differ from the model's own dtype."""

    weights: PricedFormat | None = None
    """Format of the matmuls with the blocks' weights; none is the model's dtype."""
    experts: PricedFormat | None = None
    """Format of routed experts; none is the format of `weights`."""
    kv_cache: Fp8 | None = None
    """Format of cached keys and values; none is the model's dtype."""

    @property
    def release_mistake(self) -> tuple[str, str] | None:
        """Return (the key of a format that this release cannot serve, what is expected there).

        The result is None if it can serve all of them.
        """
        servable = get_args(WeightFormat)
        weights, experts = (None if value == "bf16" else value for value in (self.weights, self.experts))
        if weights not in (None, *servable):
            return "weights", f"weights: expected {', '.join(servable)} or none, got {weights}"
        if self.experts is not None and experts != weights:
            return "experts", f"experts: expected {weights or 'none'}, the format of weights, got {self.experts}"
        return None

    @property
    def served_weights(self) -> WeightFormat | None:
        """Return the format in which this release serves the weights; None if it does not serve that format."""
        return next((name for name in get_args(WeightFormat) if name == self.weights), None)


@dataclass(frozen=True, kw_only=True)
class InstanceSpec:
    """Several equal instances: copies of a model, each with its own engine and cache."""

    role: Role = "both"
    """Part of a request that an instance computes: the prompt, the new tokens, or both."""
    count: Positive = 1
    """Number of instances."""
    tensor: Positive = 1
    """Number of devices that divide every layer of an instance."""
    expert: Positive = 1
    """Number of groups of `tensor` devices that divide the routed experts of an instance.

    Each group computes the attention of its own requests.
    """
    token_budget: Positive = 2048
    """Maximum number of prompt tokens of a step, in addition to one token of each running request (`step_tokens` of a
    server).
    """

    @property
    def devices(self) -> int:
        """Return the number of devices of all these instances."""
        return self.count * self.tensor * self.expert


@dataclass(frozen=True, kw_only=True)
class EngineSwitches:
    """Switches of the engines of all instances. The planner does not choose them."""

    expert_dispatch: Dispatch | None = None
    """Number format in which tokens are sent to experts on other devices; none is the model's dtype."""
    expert_micro_batches: Positive = 1
    """Number of parts into which a step's decodes are divided.

    While one part is computed, the tokens of another are sent between devices.
    """
    absorb: bool = True
    """Whether decodes with latent attention attend to latents.

    If not, each decode expands the keys and values of its context.
    """


@dataclass(frozen=True, kw_only=True)
class DeploymentPrediction:
    """Predicted goodput of a deployment."""

    goodput_per_gpu: Annotated[float, Bound(at_least=0)]
    """Requests per second and device that meet both limits, at the highest rate with the required attainment."""
    low: Annotated[float, Bound(at_least=0)]
    """Lower end of the 80% band over resampled arrivals."""
    high: Annotated[float, Bound(at_least=0)]
    """Upper end of that band."""
    binding: Limit
    """The limit that more requests miss above that rate."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The instances that serve a model together. The planner writes it; a person may edit it."""

    instances: tuple[InstanceSpec, ...]
    """Instances by role and size. Instances that only compute prompts need others that decode, and the reverse."""
    quantisation: Quantisation = field(default_factory=Quantisation)
    """Number formats of all instances."""
    software: ServingSoftwareName | None = None
    """Inference server for which the prediction is made; none is this program."""
    engine: EngineSwitches = field(default_factory=EngineSwitches)
    """Switches of the engines of all instances."""
    predicted: DeploymentPrediction | None = None
    """The planner's prediction. It has no effect."""
    why: tuple[str, ...] = ()
    """The planner's reasons. They have no effect."""

    @property
    def devices(self) -> int:
        """Return the number of devices of all instances."""
        return sum(instance.devices for instance in self.instances)

    @property
    def colocated(self) -> bool:
        """Return whether every instance computes both prompts and new tokens."""
        return all(instance.role == "both" for instance in self.instances)

    @property
    def runnable(self) -> bool:
        """Return whether this release can serve it."""
        return self.release_limit is None

    @property
    def release_limit(self) -> str | None:
        """Return why this release cannot serve it, as text; None if it can."""
        if self.software is not None:
            return f"its prices are those of {self.software}"
        if (problem := self.release_mistake) is not None:
            return problem[1]
        found = (release_error(instance, self.quantisation) for instance in self.instances)
        return next(filter(None, found), None)

    @property
    def release_mistake(self) -> tuple[str, str] | None:
        """Return (the key, for all instances, with a value that this release cannot serve; what is expected there).

        The result is None if there is none.
        """
        if self.software is not None:
            return "software", f"software: expected none, as this program is no {self.software}"
        mistake = self.quantisation.release_mistake
        return None if mistake is None else (f"quantisation.{mistake[0]}", mistake[1])


def deployment_name(deployment: Deployment) -> str:
    """Return a short text about the instances: `4 × TP 2, 2,048 tokens` or `5 prefill × TP 1 + 3 decode × TP 1`."""
    parts = []
    for instance in deployment.instances:
        role = "" if instance.role == "both" else f" {instance.role}"
        expert = f" EP {instance.expert}" if instance.expert > 1 else ""
        budget = f", {instance.token_budget:,} tokens" if instance.role == "both" else ""
        parts.append(f"{instance.count}{role} × TP {instance.tensor}{expert}{budget}")
    return " + ".join(parts)


def release_error(instance: InstanceSpec, quantisation: Quantisation) -> str | None:
    """Return the key of an instance that this release cannot serve, with what it expects and why.

    The result is None if it serves the instance.
    """
    if instance.expert > 1 and (instance.tensor > 1 or instance.role != "both"):
        return (
            f"expert: expected 1 beside tensor {instance.tensor} and role {instance.role}, got {instance.expert}: devices share experts "
            "with tensor 1 and role both only"
        )
    if instance.expert > 1 and quantisation.experts == "fp8":
        return f"expert: expected 1 beside experts in fp8, got {instance.expert}"
    if instance.expert > 1 and quantisation.weights == "int8":
        return f"expert: expected 1 beside weights in int8, got {instance.expert}"
    return None


def role_error(roles: Sequence[Role]) -> str | None:
    """Return which role a set of instances lacks to serve requests, as text; None if it lacks none."""
    present = set(roles)
    if present == {"prefill"}:
        return "decode or both instances beside the prefill instances, which compute prompts only"
    if "decode" in present and "prefill" not in present:
        return "prefill instances beside the decode instances, which compute no prompts"
    return None if present else "at least one instance"


@dataclass(frozen=True, kw_only=True)
class ServeLimits:
    """Limits of latency. A request is good if it meets both."""

    ttft_seconds: Annotated[float, Bound(more_than=0, at_most=1e6)]
    """Longest time from a request's arrival to its first token."""
    tpot_seconds: Annotated[float, Bound(more_than=0, at_most=1e6)]
    """Longest mean time of an output token after the first."""
    attainment: Annotated[float, Bound(more_than=0, at_most=1)] = 0.9
    """Fraction of requests that must meet both."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests: either the requests of a trace, or equal requests that arrive at random."""

    trace: str | None = None
    """CSV file (or `.csv.gz`) with columns arrival_seconds, input_tokens, output_tokens and, if wanted, prefix_blocks_of_512."""
    rate: Annotated[float, Bound(more_than=0, at_most=1e9)] | None = None
    """Expected requests per second, with Poisson arrivals; a trace has its own rate."""
    input_tokens: Positive | None = None
    """Tokens of each prompt; not with a trace."""
    output_tokens: Positive | None = None
    """New tokens of each request; not with a trace."""
    prefix_sharing: Annotated[float, Bound(at_least=0, less_than=1)] = 0.0
    """Fraction of each prompt that is the same in all prompts, in whole blocks of 512 tokens; not with a trace."""


@dataclass(frozen=True, kw_only=True)
class ServeTarget:
    """Requests that a deployment must serve, limits of their latency, and number formats."""

    workload: Workload
    """The requests."""
    limits: ServeLimits
    """The limits of latency."""
    quantisation: Quantisation = field(default_factory=Quantisation)
    """Number formats. `fp8` alone stands for fp8 weights and an fp8 cache, `int8` alone for int8 weights."""
    software: ServingSoftwareName | None = None
    """Inference server whose step times are predicted, by constants fitted to published measurements; none is this
    program.
    """


@dataclass(frozen=True, kw_only=True)
class DeploymentSpec:
    """The file that asks for the plan of a deployment."""

    name: str
    """Name of the deployment; the file's stem when left out."""
    model: ModelSection
    """The model to serve."""
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    """The devices; `auto`, also when it is left out, uses the devices of this machine."""
    serve: ServeTarget
    """Workload, limits and number formats."""
