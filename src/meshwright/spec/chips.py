"""Devices by their vendors' datasheets: memory, arithmetic peaks, and the links that leave them."""

from __future__ import annotations

from dataclasses import dataclass

GiB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One device type.

    Peaks are dense FLOP/s by number format; memory in bytes; bandwidths in bytes/s and one direction of one device:
    `hbm` its own memory, `link` to its neighbours inside a node, `nic` across nodes in the vendor's reference machine.
    `host` its memory to its host's. `per_node` devices share a host; `domain` devices see each other at link speed.
    """

    name: str
    generation: str
    memory_bytes: int
    peak_flops: dict[str, float]
    hbm: float = 1e12
    link: float = 50e9
    nic: float = 12.5e9
    per_node: int = 8
    domain: int = 8
    host: float = 25e9


def _table(*chips: Chip) -> dict[str, Chip]:
    return {chip.name: chip for chip in chips}


_AMPERE = {"bf16": 312e12, "fp32": 19.5e12}
_HOPPER = {"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12}
_B200 = {"bf16": 2250e12, "fp8": 4500e12, "mxfp8": 4500e12, "nvfp4": 9000e12, "fp32": 75e12}
_GB200 = {"bf16": 2500e12, "fp8": 5000e12, "mxfp8": 5000e12, "nvfp4": 10000e12, "fp32": 80e12}
_B300 = {"bf16": 2250e12, "fp8": 4500e12, "mxfp8": 4500e12, "nvfp4": 14000e12, "fp32": 75e12}
_GB300 = {"bf16": 2500e12, "fp8": 5000e12, "mxfp8": 5000e12, "nvfp4": 15000e12, "fp32": 80e12}
_CDNA3 = {"bf16": 1307e12, "fp8": 2615e12, "fp32": 163e12}

CHIPS = _table(
    Chip("V100", "volta", 32 * GiB, {"fp16": 125e12, "fp32": 15.7e12}, 0.9e12, 150e9, 12.5e9, host=12.5e9),
    Chip("A100", "ampere", 80 * GiB, _AMPERE, 2.04e12, 300e9, 25e9),
    Chip("A100-40GB", "ampere", 40 * GiB, _AMPERE, 1.555e12, 300e9, 25e9),
    Chip("H800", "hopper", 80 * GiB, _HOPPER, 3.35e12, 200e9, 50e9, host=50e9),
    Chip("H100", "hopper", 80 * GiB, _HOPPER, 3.35e12, 450e9, 50e9, host=50e9),
    Chip("H100-96GB", "hopper", 96 * GiB, _HOPPER, 2.4e12, 450e9, 50e9, host=50e9),
    Chip("H200", "hopper", 140 * GiB, _HOPPER, 4.8e12, 450e9, 50e9, host=50e9),
    Chip("B200", "blackwell", 179 * GiB, _B200, 8e12, 900e9, 50e9, host=50e9),
    Chip("B300", "blackwell", 268 * GiB, _B300, 8e12, 900e9, 100e9, host=50e9),
    Chip("GB200", "blackwell", 185 * GiB, _GB200, 8e12, 900e9, 50e9, 4, 64, host=225e9),
    Chip("GB300", "blackwell", 277 * GiB, _GB300, 8e12, 900e9, 100e9, 4, 64, host=225e9),
    Chip("MI300X", "cdna3", 192 * GiB, _CDNA3, 5.3e12, 448e9, 50e9, host=50e9),
    Chip("Ascend910", "ascend", 32 * GiB, {"fp16": 256e12, "bf16": 256e12}, 1.2e12, 30e9, 12.5e9),
    Chip("Ascend910B", "ascend", 64 * GiB, {"fp16": 313e12, "bf16": 313e12, "fp32": 75e12}, 1.6e12, 196e9, 25e9),
)
"""Sources: NVIDIA's, AMD's and Huawei's datasheets, without sparsity; memory as the driver reports it, in whole GiB.

Host links: PCIe 3, 4 or 5 with 16 lanes; NVLink-C2C, shared by two GPUs, in GB200 and GB300.
GB200 and GB300 name one GPU of the NVL72 rack; its domain counts the 64 that a power-of-two mesh uses.
"""


MULTIPROCESSORS = {
    "V100": 80, "A100": 108, "A100-40GB": 108, "H800": 132, "H100": 132, "H100-96GB": 132, "H200": 132, "B200": 148, "B300": 148,
    "GB200": 148, "GB300": 148, "MI300X": 304, "T4": 40, "L4": 58, "L40S": 142, "A10": 72, "RTX-A6000": 84, "RTX-3090": 82,
    "RTX-4090": 128, "RTX-5090": 170,
}  # fmt: skip
"""Processors of a device that each make one tile of a product's result at a time; chips that are not here have results of any size."""


BEST_PRODUCTS = {
    "A100": 271e12, "A100-40GB": 271e12, "H100": 794.5e12, "H200": 794.5e12, "B200": 1745e12, "B300": 1745e12, "GB200": 1822e12,
    "GB300": 1822e12, "MI300X": 668e12,
}  # fmt: skip
"""FLOP/s of the fastest bf16 product that was measured on a chip, under its power limit (the search over shapes of Stas Bekman's Machine
Learning Engineering, 2025). A100-40GB, H200, B300 and GB300 are taken to be as fast as the chip with the same tensor cores."""


def chip_from_device_name(name: str) -> str | None:
    """The table's name for what the driver calls the device ("NVIDIA H100 80GB HBM3" → "H100"), or None when unknown."""
    words = name.upper().replace("-", " ").split()
    if "A100" in words and "40GB" in words:
        return "A100-40GB"
    if "H100" in words and any(word.startswith(("96GB", "94GB")) for word in words):
        return "H100-96GB"
    return next((chip for chip in CHIPS if chip.upper() in words), None)
