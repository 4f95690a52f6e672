"""What `meshwright profile` measured of one machine: one field for each measurement. `config/profile_file.py` reads and writes its file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from meshwright.spec.fields import Bound
from meshwright.spec.model import mean_span

FORMAT = 1
"""Version of the file."""
Count = Annotated[int, Bound(at_least=1)]
Seconds = Annotated[float, Bound(more_than=0)]
Rate = Annotated[float, Bound(more_than=0)]
Format = Literal["bf16", "fp16", "fp8", "fp32", "fp64"]
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p"]


@dataclass(frozen=True, kw_only=True)
class ProductTime:
    """One matrix product, (m, k) times (k, n); where the format allows it the mean of a linear layer's three (forward, both gradients)."""

    format: Format
    """Number format of the inputs."""
    m: Count
    k: Count
    n: Count
    seconds: Seconds
    """In a device that has been computing for a while: what a training step sees."""
    burst_seconds: Seconds
    """The same in a device that was idle before."""


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """Causal attention by the kernel that training picks."""

    format: Format
    seq: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    tokens: Count
    """Of all sequences together."""
    forward_seconds: Seconds
    backward_seconds: Seconds
    window: Count | None = None
    """Tokens that each sees, itself included; none is all before it."""

    @property
    def span(self) -> float:
        """Tokens that each sees, on average."""
        return mean_span(self.window, self.seq, causal=True)


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """One operation in all groups of its kind at once, as every rank of a job runs it."""

    op: Operation
    ranks: Count
    """Of one group."""
    nodes: Count
    """That one group spans."""
    bytes: Count
    """Gathered result, input of a reduce-scatter, tensor of an all-reduce, what each rank sends in an all-to-all, or one message."""
    seconds: Seconds

    @property
    def crosses(self) -> Literal["device", "node"]:
        """The slowest kind of link on the way."""
        return "node" if self.nodes > 1 else "device"


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """Copies between a device's memory and pinned host memory, in bytes/s of one device."""

    devices: Count
    """Devices of the host that copied at once."""
    to_host: Rate
    to_device: Rate


@dataclass(frozen=True, kw_only=True)
class Interference:
    """Matrix products beside a collective or a copy to the host that runs at the same time."""

    op: Literal["all_gather", "reduce_scatter", "to_host"]
    ranks: Count
    nodes: Count
    bytes: Count
    compute_seconds: Seconds
    """The products alone."""
    other_seconds: Seconds
    """The collective or copy alone."""
    together_seconds: Seconds
    """The products, beside one such collective or copy, which ends before they do."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What a finished run showed: predicted and measured seconds of its step, and what makes the two equal."""

    run: str
    """Name of the run."""
    date: str
    predicted_seconds: Seconds
    """By this profile without corrections."""
    measured_seconds: Seconds
    """Median of its steps after warm-up."""
    factor: Rate
    """Device time is this many times what the profile says."""


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """A machine's measured rates. What was not measured is empty or none, and stays a figure of the cost model."""

    version: Annotated[int, Bound(at_least=FORMAT, at_most=FORMAT)] = FORMAT
    """Of the file's format."""
    date: str
    """Day and time of the measurement, UTC, ISO 8601."""
    gpu: str
    """Chip name as in `cluster.gpu`; `cpu` for ranks on the processor."""
    device: str
    """What the driver or the system calls it."""
    devices: Count
    """Ranks on a host."""
    nodes: Count
    """Hosts, or the nodes that one host played."""
    cores: Count
    """Processor cores of a host."""
    memory_bytes: Count
    """Of one device; of the host for `cpu`."""
    link_bytes_per_s: Rate | None = None
    """What one device was said to move to its neighbours; measured collectives are a share of it. None: not known."""
    port_bytes_per_s: Rate | None = None
    """The same across nodes."""
    versions: dict[str, str] = field(default_factory=dict)
    """Software and driver."""
    products: tuple[ProductTime, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    copy_bytes_per_s: Rate | None = None
    """Bytes read and written by a copy inside device memory."""
    pass_bytes_per_s: Rate | None = None
    """Bytes read and written by an element-wise sum of two tensors."""
    adamw_parameters_per_s: Rate | None = None
    """fp32 parameters that one device's AdamW steps."""
    launch_seconds: Seconds | None = None
    """Host time to launch one small kernel."""
    collectives: tuple[CollectiveTime, ...] = ()
    host_links: tuple[HostLink, ...] = ()
    interference: tuple[Interference, ...] = ()
    corrections: tuple[Correction, ...] = ()
    """Runs that were fed back, each once."""

    def __hash__(self) -> int:
        """Of what tells measurements apart: a search looks the same profile up thousands of times."""
        return hash((self.date, self.device, self.devices, self.nodes, self.corrections))
