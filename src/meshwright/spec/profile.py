"""The measurements of one machine by `meshwright profile`. `config/profile_file.py` reads and writes the file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from meshwright.spec.fields import Bound
from meshwright.spec.model import mean_span
from meshwright.spec.serve_profile import EngineProfile

FORMAT = 1
"""Version of the file."""
Count = Annotated[int, Bound(at_least=1)]
Seconds = Annotated[float, Bound(more_than=0)]
Rate = Annotated[float, Bound(more_than=0)]
Format = Literal["bf16", "fp16", "fp8", "fp32", "fp64"]
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p"]


@dataclass(frozen=True, kw_only=True)
class MatmulTime:
    """Time of one matmul (m, k) × (k, n).

    If the format allows it, it is the mean of a linear layer's three matmuls (forward and both gradients).
    """

    format: Format
    """Number format of the inputs."""
    m: Count
    """Rows of the result."""
    k: Count
    """Inner dimension."""
    n: Count
    """Columns of the result."""
    seconds: Seconds
    """Seconds on a device that has computed for a while, as in a training step."""
    burst_seconds: Seconds
    """Seconds on a device that was idle before."""


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """Time of causal attention with the kernel that training uses."""

    format: Format
    """Number format of queries, keys and values."""
    seq: Count
    """Tokens of a sequence."""
    heads: Count
    kv_heads: Count
    head_dim: Count
    """Size of a head."""
    tokens: Count
    """Tokens of all sequences together."""
    forward_seconds: Seconds
    backward_seconds: Seconds
    window: Count | None = None
    """Number of tokens to which each token attends at most, itself included; none is all tokens before it."""

    @property
    def span(self) -> float:
        """Return the mean number of tokens to which a token attends."""
        return mean_span(self.window, self.seq, causal=True)


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """Time of one collective in all parallel groups at the same time, as in a training job."""

    op: Operation
    ranks: Count
    """Ranks of one group."""
    nodes: Count
    """Nodes on which one group has ranks."""
    bytes: Count
    """Size of the message.

    All-gather: the result. Reduce-scatter: the input. All-reduce: the tensor. All-to-all: what each rank sends.
    """
    seconds: Seconds
    """Seconds of the collective on the slowest rank."""

    @property
    def crosses(self) -> Literal["device", "node"]:
        """Return the slowest border that messages cross: between devices of a node, or between nodes."""
        return "node" if self.nodes > 1 else "device"


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """Rates of copies between the memory of a device and pinned host memory, in bytes/s of one device."""

    devices: Count
    """Devices of the host that copied at the same time."""
    to_host: Rate
    """Rate from device to host."""
    to_device: Rate
    """Rate from host to device."""


@dataclass(frozen=True, kw_only=True)
class Interference:
    """Times of matmuls that run at the same time as a collective or a copy to the host."""

    op: Literal["all_gather", "reduce_scatter", "to_host"]
    ranks: Count
    """Ranks of one group."""
    nodes: Count
    """Nodes on which one group has ranks."""
    bytes: Count
    """Size of the message or the copy."""
    compute_seconds: Seconds
    """Seconds of the matmuls alone."""
    other_seconds: Seconds
    """Seconds of the collective or the copy alone."""
    together_seconds: Seconds
    """Seconds of the matmuls while the collective or the copy runs too, which ends before they do."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Predicted and measured step time of a finished run."""

    run: str
    """Name of the run."""
    date: str
    """Day and time, UTC, ISO 8601."""
    predicted_seconds: Seconds
    """Step time that this profile predicts without corrections."""
    measured_seconds: Seconds
    """Median step time of the run after warm-up."""
    factor: Rate
    """Measured device time divided by the device time that the profile predicts."""


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """Measured rates of a machine.

    A field that is empty or none was not measured, so the cost model uses its own value.
    """

    version: Annotated[int, Bound(at_least=FORMAT, at_most=FORMAT)] = FORMAT
    """Version of the file's format."""
    date: str
    """Day and time of the measurement, UTC, ISO 8601."""
    gpu: str
    """Name of the chip as in `cluster.gpu`; `cpu` for ranks on the processor."""
    device: str
    """Name of the device as the driver or the system reports it."""
    devices: Count
    """Ranks on a host."""
    nodes: Count
    """Number of hosts, or of the nodes that one host emulated."""
    cores: Count
    """Processor cores of a host."""
    memory_bytes: Count
    """Memory of one device; for `cpu` memory of the host."""
    link_bytes_per_s: Rate | None = None
    """Nominal bytes/s from one device to its neighbours, to which measured collectives are relative; none: not known.
    """
    port_bytes_per_s: Rate | None = None
    """Nominal bytes/s from one device to other nodes; none: not known."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of software and driver."""
    products: tuple[MatmulTime, ...] = ()
    """Times of matmuls."""
    attention: tuple[AttentionTime, ...] = ()
    copy_bytes_per_s: Rate | None = None
    """Bytes/s that a copy inside device memory reads and writes."""
    pass_bytes_per_s: Rate | None = None
    """Bytes/s that the addition of two tensors reads and writes."""
    adamw_parameters_per_s: Rate | None = None
    """fp32 parameters per second that AdamW updates on one device."""
    launch_seconds: Seconds | None = None
    """Host seconds to launch one small kernel."""
    collectives: tuple[CollectiveTime, ...] = ()
    host_links: tuple[HostLink, ...] = ()
    interference: tuple[Interference, ...] = ()
    corrections: tuple[Correction, ...] = ()
    """Finished runs by which the profile is corrected, each once."""
    engine: tuple[EngineProfile, ...] = ()
    """Measured steps of the inference engine, by model and number formats."""

    def __hash__(self) -> int:
        """Return a hash of the fields that identify a measurement.

        It is fast, because a search looks up the same profile thousands of times.
        """
        return hash((self.date, self.device, self.devices, self.nodes, self.corrections))
