"""Initial weights, computed from (seed, parameter name, element index) only.

Every element is computed by integer arithmetic (the SplitMix64 finaliser, Steele et al. 2014) and one fp32 multiplication. So any slice of
a parameter, on any device and in any layout, has exactly the values that the same elements have in the whole parameter.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from meshwright.spec.model import ModelSpec, ParameterSpec, parameters

_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Number of elements computed at a time: on a CPU few enough for its cache, on a GPU enough to take longer than the kernel launch."""
_ELEMENTS_PER_CALL = 1 << 24
"""Number of elements per call of `initial_values` when a whole model is initialised."""
_HALF = 0x0000FFFF0000FFFF
_WORD = 0xFFFFFFFF
_MEAN = 8 * (2**16 - 1) // 2
_DEVIATION = math.sqrt(8 * (2.0**32 - 1) / 12)


def initial_values(seed: int, parameter: ParameterSpec, start: int, count: int, device: torch.device | str) -> Tensor:
    """Return elements [start, start + count) of the flattened `parameter`, as fp32.

    The fill "normal" adds eight independent 16-bit uniform numbers (Irwin-Hall distribution), shifted and scaled so that the mean is 0 and
    the standard deviation exactly `parameter.std`. The largest values are 4.9 deviations from the mean.
    """
    if parameter.fill != "normal":
        return torch.full((count,), 1.0 if parameter.fill == "ones" else 0.0, device=device)
    values = torch.empty(count, device=device)
    chunk = _CHUNK.get(values.device.type, 1 << 18)
    for first in range(0, count, chunk):
        part = values[first : first + chunk]
        part.copy_(_sums(seed, parameter.name, start + first, part.numel(), device).sub_(_MEAN))
    return values.mul_(torch.tensor(parameter.std / _DEVIATION, dtype=torch.float32, device=device))


@torch.no_grad()
def initialise(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fill every parameter of an unsharded model that has memory."""
    for parameter in parameters(spec):
        flat = model.get_parameter(parameter.name).view(-1)
        for first in range(0, parameter.count, _ELEMENTS_PER_CALL):
            part = flat[first : first + _ELEMENTS_PER_CALL]
            part.copy_(initial_values(seed, parameter, first, part.numel(), flat.device))


def _sums(seed: int, name: str, start: int, count: int, device: torch.device | str) -> Tensor:
    """Return sums of eight 16-bit uniform numbers: the 16-bit parts of two 64-bit words per element, added in two 32-bit lanes."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    steps = torch.arange(start, start + count, dtype=torch.int64, device=device).mul_(_signed(0x9E3779B97F4A7C15))
    lanes = torch.zeros_like(steps)
    for key in (digest[:8], digest[8:]):
        word = _mix(steps + int.from_bytes(key, "little", signed=True))
        lanes += (word & _HALF) + ((word >> 16) & _HALF)
    return (lanes & _WORD) + (lanes >> 32)


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser in place to int64 values, as 64-bit words. Products wrap around; a mask makes the shifts logical."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= _signed(factor)
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def _signed(word: int) -> int:
    """Return the int64 with the same bits as the unsigned 64-bit `word`."""
    return word - (1 << 64) if word >> 63 else word
