"""Prices and power of devices, with source and date.

The cluster's keys `price_per_gpu_hour` and `watts_per_gpu` replace them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Price:
    """Price of one device for one hour on demand, with its share of the host."""

    dollars: float
    """US dollars."""
    source: str
    date: str
    """Day, month or year in which the price was read, ISO 8601."""


_LAMBDA = "Lambda's list, instances with the most devices"
_LAMBDA_READ = "Lambda's list as techbytes.app read it, one device"
_SPHERON = "Spheron's list"
_NEOCLOUDS = "cliffcenter.com, AMD inference economics"

PRICES = {
    "V100-16GB": Price(0.55, _LAMBDA, "2025"),
    "A100": Price(1.79, _LAMBDA, "2025"),
    "A100-40GB": Price(1.48, _LAMBDA_READ, "2026-05-07"),
    "A10": Price(0.86, _LAMBDA_READ, "2026-05-07"),
    "A6000": Price(0.80, _LAMBDA, "2025"),
    "GH200": Price(1.49, _LAMBDA, "2025"),
    "H100": Price(2.99, f"{_LAMBDA}; the median of 37 providers is 2.95 (aimultiple.com, GPU index)", "2026-05"),
    "H200": Price(4.54, _SPHERON, "2026-03-17"),
    "B200": Price(6.03, _SPHERON, "2026-03-17"),
    "GB200": Price(4.54, f"{_SPHERON}: 9.08 for a superchip of two", "2026-03-17"),
    "GB200-NVL72": Price(4.54, f"{_SPHERON}: 9.08 for a superchip of two", "2026-03-17"),
    "MI300X": Price(1.99, f"{_NEOCLOUDS}: the median of providers", "2026-05-18"),
    "MI325X": Price(1.95, f"{_NEOCLOUDS}: TensorWave", "2026-05-18"),
}
"""Chip → its price.

For other chips no dated price on demand was found, so the planner shows money only if the cluster states a price.
"""

WATTS = {
    "V100": 300,
    "V100-16GB": 300,
    "T4": 70,
    "A100": 400,
    "A100-40GB": 400,
    "H800": 700,
    "H100": 700,
    "H100-96GB": 700,
    "H200": 700,
    "GH200": 700,
    "H20": 400,
    "B200": 1000,
    "B300": 1400,
    "GB200": 1200,
    "GB200-NVL72": 1200,
    "GB300": 1400,
    "GB300-NVL72": 1400,
    "RTX3090": 350,
    "A10": 150,
    "A10G": 300,
    "A6000": 300,
    "RTX4090": 450,
    "RTX6000-Ada": 300,
    "L4": 72,
    "L40": 300,
    "L40S": 350,
    "RTX5090": 575,
    "RTXPRO6000": 600,
    "MI300X": 750,
    "MI325X": 1000,
    "MI355X": 1400,
    "Ascend910": 310,
    "Ascend910B": 400,
}
"""Power limit of one device in watts, from the vendor's datasheet.

Ascend910B has no public datasheet, so its value is unverified.
"""
SYSTEM_POWER = 1.8
"""Power of a whole system relative to the limits of its devices. Cooling of the building is not included.

A DGX H100 draws 10.2 kW for 8 × 700 W, a DGX B200 14.3 kW for 8 × 1,000 W.
"""
