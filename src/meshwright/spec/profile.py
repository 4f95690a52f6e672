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
    """Time of one matmul, (m, k) times (k, n).
    If the format allows it, the mean of a linear layer's three matmuls (forward and both gradients)."""

    format: Format
    """Number format of the inputs."""
    m: Count
    k: Count
    n: Count
    seconds: Seconds
    """Time on a device that has been computing for a while, as in a training step."""
    burst_seconds: Seconds
    """Time on a device that was idle before."""


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """Time of causal attention by the kernel that training uses."""

    format: Format
    seq: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    tokens: Count
    """Tokens of all sequences together."""
    forward_seconds: Seconds
    backward_seconds: Seconds
    window: Count | None = None
    """Tokens that each token attends to, itself included; none is all tokens before it."""

    @property
    def span(self) -> float:
        """Mean number of tokens that each token attends to."""
        return mean_span(self.window, self.seq, causal=True)


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """Time of one collective in all parallel groups at once, as in a training job."""

    op: Operation
    ranks: Count
    """Ranks of one group."""
    nodes: Count
    """Nodes that one group spans."""
    bytes: Count
    """Size of the message.
    All-gather: the result. Reduce-scatter: the input. All-reduce: the tensor. All-to-all: what each rank sends."""
    seconds: Seconds

    @property
    def crosses(self) -> Literal["device", "node"]:
        """The slowest link on the path."""
        return "node" if self.nodes > 1 else "device"


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """Copies between a device's memory and pinned host memory, in bytes/s of one device."""

    devices: Count
    """Devices of the host that copied at the same time."""
    to_host: Rate
    to_device: Rate


@dataclass(frozen=True, kw_only=True)
class Interference:
    """Time of matmuls that overlap with a collective or a copy to the host."""

    op: Literal["all_gather", "reduce_scatter", "to_host"]
    ranks: Count
    nodes: Count
    bytes: Count
    compute_seconds: Seconds
    """The matmuls alone."""
    other_seconds: Seconds
    """The collective or copy alone."""
    together_seconds: Seconds
    """The matmuls, overlapped with the collective or copy, which ends before they do."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Predicted and measured step time of a finished run, and their ratio."""

    run: str
    """Name of the run."""
    date: str
    predicted_seconds: Seconds
    """Step time predicted by this profile without corrections."""
    measured_seconds: Seconds
    """Median step time of the run after warm-up."""
    factor: Rate
    """Measured device time over the device time of the profile."""


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """Measured rates of a machine. Empty or none: not measured, so the cost model uses its own figure."""

    version: Annotated[int, Bound(at_least=FORMAT, at_most=FORMAT)] = FORMAT
    """Version of the file's format."""
    date: str
    """Day and time of the measurement, UTC, ISO 8601."""
    gpu: str
    """Chip name as in `cluster.gpu`; `cpu` for ranks on the processor."""
    device: str
    """Device name reported by the driver or the system."""
    devices: Count
    """Ranks on a host."""
    nodes: Count
    """Hosts, or the nodes that one host emulated."""
    cores: Count
    """Processor cores of a host."""
    memory_bytes: Count
    """Memory of one device; of the host for `cpu`."""
    link_bytes_per_s: Rate | None = None
    """Nominal bytes/s from one device to its neighbours; measured collectives are a share of it. None: not known."""
    port_bytes_per_s: Rate | None = None
    """Nominal bytes/s across nodes."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of software and driver."""
    products: tuple[MatmulTime, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    copy_bytes_per_s: Rate | None = None
    """Bytes read and written by a copy inside device memory."""
    pass_bytes_per_s: Rate | None = None
    """Bytes read and written by an element-wise sum of two tensors."""
    adamw_parameters_per_s: Rate | None = None
    """fp32 parameters per second that AdamW updates on one device."""
    launch_seconds: Seconds | None = None
    """Host time to launch one small kernel."""
    collectives: tuple[CollectiveTime, ...] = ()
    host_links: tuple[HostLink, ...] = ()
    interference: tuple[Interference, ...] = ()
    corrections: tuple[Correction, ...] = ()
    """Finished runs used to correct the profile, each once."""
    engine: tuple[EngineProfile, ...] = ()
    """Steps of the inference engine, by model and number formats."""

    def __hash__(self) -> int:
        """Hash of the fields that identify a measurement: a search looks up the same profile thousands of times."""
        return hash((self.date, self.device, self.devices, self.nodes, self.corrections))
