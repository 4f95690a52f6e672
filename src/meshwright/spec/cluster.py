"""What a run runs on, and what its chips can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshwright.spec.fields import Bound

Positive = Annotated[int, Bound(at_least=1)]
GiB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """A device by its vendor's datasheet: memory in bytes, dense peak in FLOP/s by number format."""

    name: str
    memory_bytes: int
    peak_flops: dict[str, float]


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("V100", 32 * GiB, {"fp32": 15.7e12}),
        Chip("A100", 80 * GiB, {"bf16": 312e12, "fp32": 19.5e12}),
        Chip("A100-40GB", 40 * GiB, {"bf16": 312e12, "fp32": 19.5e12}),
        Chip("H100", 80 * GiB, {"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12}),
        Chip("H800", 80 * GiB, {"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12}),
        Chip("H200", 140 * GiB, {"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12}),
        Chip("B200", 179 * GiB, {"bf16": 2250e12, "fp8": 4500e12, "fp32": 75e12}),
        Chip("MI300X", 192 * GiB, {"bf16": 1307e12, "fp8": 2615e12, "fp32": 163e12}),
    )
}
"""Sources: NVIDIA's and AMD's datasheets, without sparsity; memory as the driver reports it, in whole GiB."""


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Identical nodes of identical devices."""

    gpu: str = "cpu"
    """Chip name (`cpu` for ranks on this machine's processor)."""
    nodes: Positive = 1
    """Hosts."""
    gpus_per_node: Positive = 1
    """Ranks on each host, one per device."""
    memory_gib: Annotated[float, Bound(more_than=0)] | None = None
    """Memory of one device; none takes the chip's own, and on `cpu` a share of what the host has."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def is_cpu(self) -> bool:
        return self.gpu == "cpu"

    def peak_flops(self, precision: str) -> float | None:
        """Dense peak of one device in FLOP/s, or None when the chip or format is not in the table."""
        chip = CHIPS.get(self.gpu)
        return chip.peak_flops.get(precision) if chip else None

    def memory_bytes(self) -> int | None:
        """Memory of one device, or None when it is not known."""
        if self.memory_gib is not None:
            return int(self.memory_gib * GiB)
        chip = CHIPS.get(self.gpu)
        return chip.memory_bytes if chip else None


def chip_from_device_name(name: str) -> str | None:
    """The table's name for what the driver calls the device ("NVIDIA H100 80GB HBM3" → "H100"), or None when unknown."""
    words = name.upper().replace("-", " ").split()
    if "A100" in words and "40GB" in words:
        return "A100-40GB"
    return next((chip for chip in CHIPS if chip in words), None)
