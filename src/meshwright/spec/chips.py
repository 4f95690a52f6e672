"""Datasheet values of devices: memory, peak FLOP/s, and bandwidths of their links."""

from __future__ import annotations

from dataclasses import dataclass, replace

GiB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """A type of device with its rates and its memory. Bandwidths are in bytes/s, of one device and in one direction."""

    name: str
    generation: str
    """GPU generation, as in the tables of constants (costs/constants.yaml)."""
    memory_bytes: int
    peak_flops: dict[str, float]
    """Dense peak in FLOP/s by number format."""
    hbm: float = 1e12
    """Bandwidth of its own memory."""
    link: float = 50e9
    """Bandwidth to its neighbours inside a node."""
    nic: float = 12.5e9
    """Bandwidth to other nodes in the vendor's reference machine."""
    per_node: int = 8
    """Number of devices of a host."""
    domain: int = 8
    """Number of devices that reach each other at the bandwidth `link`."""
    host: float = 25e9
    """Bandwidth to the memory of its host."""
    multiprocessors: int = 0
    """Number of multiprocessors, each of which computes one tile of a matmul at a time.

    With 0, partly filled waves of tiles are ignored.
    """
    sustained: float = 0.88
    """Largest share of its peak that matmuls sustain. It is below 1 if the power limit lowers the clocks under load.

    The best measured matmuls reach 0.77 on an H200 and 0.86 on an A100. An H20 has the power of an H100 and a seventh
    of its peak.
    """
    best_bf16_flops: float | None = None
    """FLOP/s of the fastest bf16 matmul measured, under the chip's power limit."""

    @property
    def half_peak(self) -> float:
        """Return the peak in bf16; in fp16 on chips without bf16; in fp32 on chips without both."""
        return next(self.peak_flops[name] for name in ("bf16", "fp16", "fp32") if name in self.peak_flops)


def _table(*chips: Chip) -> dict[str, Chip]:
    return {chip.name: chip for chip in chips}


_AMPERE = {"bf16": 312e12, "int8": 624e12, "fp32": 19.5e12}
_HOPPER = {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12, "fp32": 67e12}
_B200 = {"bf16": 2250e12, "fp8": 4500e12, "int8": 4500e12, "mxfp8": 4500e12, "nvfp4": 9000e12, "fp32": 75e12}
_GB200 = {"bf16": 2500e12, "fp8": 5000e12, "int8": 5000e12, "mxfp8": 5000e12, "nvfp4": 10000e12, "fp32": 80e12}
_B300 = {"bf16": 2250e12, "fp8": 4500e12, "mxfp8": 4500e12, "nvfp4": 14000e12, "fp32": 75e12}
_GB300 = {"bf16": 2500e12, "fp8": 5000e12, "mxfp8": 5000e12, "nvfp4": 15000e12, "fp32": 80e12}
_GA102 = {"bf16": 71e12, "int8": 284e12, "fp32": 35.6e12}
_AD102 = {"bf16": 165.2e12, "fp8": 330.3e12, "int8": 660.6e12, "fp32": 82.6e12}
_GB202 = {"bf16": 209.5e12, "fp8": 419e12, "int8": 838e12, "fp32": 104.8e12}
_RTX6000_ADA = {"bf16": 364.2e12, "fp8": 728.5e12, "int8": 728.5e12, "fp32": 91.1e12}
_L40S = {"bf16": 362e12, "fp8": 733e12, "int8": 733e12, "fp32": 91.6e12}
_L40 = {"bf16": 181e12, "fp8": 362e12, "int8": 362e12, "fp32": 90.5e12}
_L4 = {"bf16": 121e12, "fp8": 242.5e12, "int8": 242.5e12, "fp32": 30.3e12}
_H20 = {"bf16": 148e12, "fp8": 296e12, "int8": 296e12, "fp32": 44e12}
_A6000 = {"bf16": 154.8e12, "int8": 309.7e12, "fp32": 38.7e12}
_V100 = {"fp16": 125e12, "fp32": 15.7e12}
_PCIE3 = 12.5e9
"""Bytes/s of 16 lanes of PCIe 3 in one direction, for links and host links of cards without NVLink.

The line rate is 15.8 GB/s.
"""
_PCIE4 = 25e9
"""The same for PCIe 4; the line rate is 31.5 GB/s."""
_PCIE5 = 50e9
"""The same for PCIe 5; the line rate is 63 GB/s."""
_HOPPER_HOST = 55e9
"""Bytes/s of copies between one H200 and pinned host memory, over 16 lanes of PCIe 5.

Measured: 54.7 to 55.4 GB/s on three of four hosts (benchmarks/data).
"""
_ETHERNET_10 = 1.25e9
"""Network bytes/s of a card that is not sold in clusters: 10 Gb/s, a guess."""
_CLOUD_100 = 100e9 / 8 / 8
"""Network bytes/s of a card in a cloud's machine with 100 Gb/s for eight cards."""
_CLOUD_400 = 400e9 / 8 / 8
"""Network bytes/s of a card in a cloud's machine with 400 Gb/s for eight cards."""
_GB202_PRO = {"bf16": 503.8e12, "fp8": 1007e12, "int8": 1007e12, "nvfp4": 2015e12, "fp32": 126e12}
_CDNA4 = {"bf16": 2516e12, "fp8": 5033e12, "int8": 5033e12, "mxfp8": 5033e12, "mxfp4": 10066e12, "fp32": 157e12}
_CDNA3 = {"bf16": 1307e12, "fp8": 2615e12, "int8": 2615e12, "fp32": 163e12}
_GB200_GPU = Chip(
    name="GB200",
    generation="blackwell",
    memory_bytes=185 * GiB,
    peak_flops=_GB200,
    hbm=8e12,
    link=900e9,
    nic=50e9,
    per_node=4,
    domain=64,
    host=225e9,
    multiprocessors=148,
    best_bf16_flops=1822e12,
)
_GB300_GPU = Chip(
    name="GB300",
    generation="blackwell",
    memory_bytes=277 * GiB,
    peak_flops=_GB300,
    hbm=8e12,
    link=900e9,
    nic=100e9,
    per_node=4,
    domain=64,
    host=225e9,
    multiprocessors=148,
    best_bf16_flops=1822e12,
)

CHIPS = _table(
    Chip("V100", "volta", 32 * GiB, _V100, 0.9e12, 150e9, 12.5e9, host=_PCIE3, multiprocessors=80),
    Chip("V100-16GB", "volta", 16 * GiB, _V100, 0.9e12, 150e9, 12.5e9, host=_PCIE3, multiprocessors=80),
    Chip(
        name="T4",
        generation="turing",
        memory_bytes=15 * GiB,
        peak_flops={"fp16": 65e12, "fp32": 8.1e12},
        hbm=0.32e12,
        link=_PCIE3,
        nic=_CLOUD_100,
        host=_PCIE3,
        multiprocessors=40,
    ),
    Chip("A100", "ampere", 80 * GiB, _AMPERE, 2.04e12, 300e9, 25e9, multiprocessors=108, best_bf16_flops=271e12),
    Chip("A100-40GB", "ampere", 40 * GiB, _AMPERE, 1.555e12, 300e9, 25e9, multiprocessors=108, best_bf16_flops=271e12),
    Chip("H800", "hopper", 80 * GiB, _HOPPER, 3.35e12, 200e9, 50e9, host=_HOPPER_HOST, multiprocessors=132),
    Chip(
        name="H100",
        generation="hopper",
        memory_bytes=80 * GiB,
        peak_flops=_HOPPER,
        hbm=3.35e12,
        link=450e9,
        nic=50e9,
        host=_HOPPER_HOST,
        multiprocessors=132,
        best_bf16_flops=794.5e12,
    ),
    Chip("H100-96GB", "hopper", 96 * GiB, _HOPPER, 2.4e12, 450e9, 50e9, host=_HOPPER_HOST, multiprocessors=132),
    Chip(
        name="H200",
        generation="hopper",
        memory_bytes=140 * GiB,
        peak_flops=_HOPPER,
        hbm=4.8e12,
        link=450e9,
        nic=50e9,
        host=_HOPPER_HOST,
        multiprocessors=132,
        best_bf16_flops=794.5e12,
    ),
    Chip(
        name="B200",
        generation="blackwell",
        memory_bytes=179 * GiB,
        peak_flops=_B200,
        hbm=8e12,
        link=900e9,
        nic=50e9,
        host=50e9,
        multiprocessors=148,
        best_bf16_flops=1745e12,
    ),
    Chip(
        name="B300",
        generation="blackwell",
        memory_bytes=268 * GiB,
        peak_flops=_B300,
        hbm=8e12,
        link=900e9,
        nic=100e9,
        host=50e9,
        multiprocessors=148,
        best_bf16_flops=1745e12,
    ),
    _GB200_GPU,
    _GB300_GPU,
    replace(_GB200_GPU, name="GB200-NVL72", domain=72),
    replace(_GB300_GPU, name="GB300-NVL72", domain=72),
    Chip(
        name="GH200",
        generation="hopper",
        memory_bytes=95 * GiB,
        peak_flops=_HOPPER,
        hbm=4e12,
        link=450e9,
        nic=50e9,
        per_node=1,
        domain=1,
        host=450e9,
        multiprocessors=132,
        best_bf16_flops=794.5e12,
    ),
    Chip("H20", "hopper-h20", 96 * GiB, _H20, 4e12, 450e9, 50e9, host=_PCIE5, multiprocessors=78, sustained=0.97),
    Chip("RTX3090", "ampere-rtx", 24 * GiB, _GA102, 0.936e12, _PCIE4, _ETHERNET_10, 1, 1, multiprocessors=82),
    Chip(
        name="A10",
        generation="ampere-rtx",
        memory_bytes=22 * GiB,
        peak_flops={"bf16": 125e12, "int8": 250e12, "fp32": 31.2e12},
        hbm=0.6e12,
        link=_PCIE4,
        nic=_CLOUD_100,
        multiprocessors=72,
    ),
    Chip(
        name="A10G",
        generation="ampere-rtx",
        memory_bytes=22 * GiB,
        peak_flops={"bf16": 70e12, "fp32": 31.5e12},
        hbm=0.6e12,
        link=_PCIE4,
        nic=_CLOUD_100,
        multiprocessors=80,
    ),
    Chip("A6000", "ampere-rtx", 48 * GiB, _A6000, 0.768e12, _PCIE4, _ETHERNET_10, 1, 1, multiprocessors=84),
    Chip("RTX4090", "ada", 24 * GiB, _AD102, 1.008e12, _PCIE4, _ETHERNET_10, 1, 1, multiprocessors=128),
    Chip("RTX6000-Ada", "ada", 48 * GiB, _RTX6000_ADA, 0.96e12, _PCIE4, _ETHERNET_10, 1, 1, multiprocessors=142),
    Chip("L4", "ada", 22 * GiB, _L4, 0.3e12, _PCIE4, _CLOUD_100, multiprocessors=58),
    Chip("L40", "ada", 45 * GiB, _L40, 0.864e12, _PCIE4, _CLOUD_400, multiprocessors=142),
    Chip("L40S", "ada", 45 * GiB, _L40S, 0.864e12, _PCIE4, _CLOUD_400, multiprocessors=142),
    Chip(
        name="RTX5090",
        generation="blackwell-rtx",
        memory_bytes=32 * GiB,
        peak_flops=_GB202,
        hbm=1.792e12,
        link=_PCIE5,
        nic=_ETHERNET_10,
        per_node=1,
        domain=1,
        host=_PCIE5,
        multiprocessors=170,
    ),
    Chip(
        name="MI300X",
        generation="cdna3",
        memory_bytes=192 * GiB,
        peak_flops=_CDNA3,
        hbm=5.3e12,
        link=448e9,
        nic=50e9,
        host=50e9,
        multiprocessors=304,
        best_bf16_flops=668e12,
    ),
    Chip(
        name="RTXPRO6000",
        generation="blackwell-rtx",
        memory_bytes=95 * GiB,
        peak_flops=_GB202_PRO,
        hbm=1.597e12,
        link=_PCIE5,
        nic=_CLOUD_400,
        host=_PCIE5,
        multiprocessors=188,
    ),
    Chip(
        name="MI325X",
        generation="cdna3",
        memory_bytes=255 * GiB,
        peak_flops=_CDNA3,
        hbm=6e12,
        link=448e9,
        nic=50e9,
        host=50e9,
        multiprocessors=304,
        best_bf16_flops=668e12,
    ),
    Chip(
        name="MI355X",
        generation="cdna4",
        memory_bytes=287 * GiB,
        peak_flops=_CDNA4,
        hbm=8e12,
        link=538e9,
        nic=50e9,
        host=50e9,
        multiprocessors=256,
    ),
    Chip("Ascend910", "ascend", 32 * GiB, {"fp16": 256e12, "bf16": 256e12}, 1.2e12, 30e9, 12.5e9),
    Chip("Ascend910B", "ascend", 64 * GiB, {"fp16": 313e12, "bf16": 313e12, "fp32": 75e12}, 1.6e12, 196e9, 25e9),
)
"""Sources: NVIDIA's, AMD's and Huawei's datasheets, without sparsity; memory as the driver reports it, in whole GiB.

Host links: PCIe 3, 4 or 5 with 16 lanes; NVLink-C2C, shared by two GPUs, in GB200 and GB300.
GB200 and GB300 name one GPU of the NVL72 rack; its domain counts the 64 that a power-of-two mesh uses. GB200-NVL72 and GB300-NVL72 are
the same GPUs for jobs of 72, 36 or 18, whose domain is the whole rack. GH200 is one superchip a host. RTXPRO6000 is the server edition.
GeForce cards: peaks of matmuls that are summed in fp32, half of what is advertised for sums in fp16; RTX3090 without
its optional NVLink. V100 and T4 have no bf16; B300 and GB300 have few int8 units, which are left out. Generations name
devices whose shares of these rates may be alike, so graphics cards have their own.
Fastest matmuls: the search over shapes of Stas Bekman's Machine Learning Engineering, 2025; A100-40GB, H200, B300 and
GB300 are taken to be as fast as the chip with the same tensor cores, as GH200 and MI325X are.
Not from an opened datasheet: MI325X and MI355X (compute units and memory: AMD's ROCm documentation, GPU specifications; 6 TB/s and 1,307
TFLOP/s: Vultr's documentation of 2026-03-11, which cites AMD's product page; 8 TB/s, 1,400 W and 20.1 PFLOP/s in fp4 with sparsity:
tomshardware.com, June 2025), RTXPRO6000 (188 multiprocessors, 96 GB, 600 W: reports of March 2025) and GH200 (rates of an H100).
"""

VARIANT_WORDS = frozenset({"LAPTOP", "MOBILE", "TI", "SUPER", "D", "MIG", "3E"})
"""Words in a driver's device name that denote another device than the chip in the same name."""
_DRIVER_NAMES = {
    "A100-40GB": "A100 40GB",
    "V100-16GB": "V100 16GB",
    "RTX3090": "RTX 3090",
    "RTX4090": "RTX 4090",
    "RTX5090": "RTX 5090",
    "RTX6000-Ada": "RTX 6000 ADA",
    "RTXPRO6000": "RTX PRO 6000 BLACKWELL",
}
"""Names in the driver's spelling, of chips whose name in the table is not one of the driver's words."""


def chip_from_device_name(name: str) -> str | None:
    """Return the chip of the table for a driver's device name ("NVIDIA H100 80GB HBM3" → "H100").

    The result is None if it is not known.
    """
    spellings = {chip.upper(): chip for chip in CHIPS}
    if name.upper() in spellings:
        return spellings[name.upper()]
    name_parts = set(name.upper().replace("-", " ").split())
    if "H100" in name_parts and any(word.startswith(("96GB", "94GB")) for word in name_parts):
        return "H100-96GB"
    parts_by_chip = {chip: set(_DRIVER_NAMES.get(chip, chip.upper()).split()) for chip in CHIPS}
    matches = [
        chip
        for chip, spelled in parts_by_chip.items()
        if spelled <= name_parts and not name_parts & VARIANT_WORDS - spelled
    ]
    return max(matches, key=lambda chip: len(parts_by_chip[chip]), default=None)


def formats_on(gpu: str | None) -> tuple[str, ...]:
    """Return the values of `plan.compute` that a device supports; an empty tuple if the device is not known."""
    if gpu == "cpu":
        return ("fp32", "bf16", "fp64")
    return tuple(name for name in ("bf16", "fp16", "fp32") if gpu in CHIPS and name in CHIPS[gpu].peak_flops)
