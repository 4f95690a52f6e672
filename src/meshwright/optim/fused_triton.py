"""The Triton kernel of `fused.update`. It is imported only with a CUDA device, because CPU builds of torch lack Triton.

One launch updates tensors of any number and size. A table on the device has the addresses of the tensors, and persistent programs process
the tensors' blocks. So many small tensors need only one launch and leave no multiprocessor idle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
WARPS = 8
PROGRAMS_PER_MULTIPROCESSOR = 8
"""As many programs as fit on a multiprocessor.

Twice as many programs with half the block size are slower: 5.27 instead of 4.63 ms for the parameters of one layer of Qwen3-30B-A3B on an
H200.
"""
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
"""Triton's dtype of each dtype that gradients may have."""
VECTOR = 16
"""Bytes of the widest load of one lane, which needs an aligned address."""


def fused_update(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    rates: Tensor,
    *,
    factor: Tensor,
    skip: Tensor,
    betas: tuple[float, float],
    epsilon: float,
    decay_factor: float,
) -> None:
    """Compute `fused.update`. All tensors are contiguous; all gradients have one dtype, all other tensors are fp32.

    `rates` `(2, tensors)` is from `fused.corrected_rates`. `decay_factor` is what weight decay multiplies a weight by.
    """
    device = rates.device
    blocks = [triton.cdiv(weight.numel(), BLOCK) for weight in weights]
    programs = min(
        sum(blocks), PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    )
    if not programs:
        return
    entries = []
    aligned = True
    blocks_before = 0
    for count, *tensors in zip(blocks, weights, gradients, first, second, strict=True):
        assert all(tensor.is_contiguous() for tensor in tensors)
        addresses = [tensor.data_ptr() for tensor in tensors]
        aligned = aligned and not any(address % VECTOR for address in addresses)
        entries.append([*addresses, tensors[0].numel(), -blocks_before % programs])
        blocks_before += count
    # From pinned memory the copy is asynchronous; torch keeps the source until the copy has ended.
    table = torch.tensor(entries, pin_memory=True).to(device, non_blocking=True)
    _adamw[(programs,)](
        table,
        rates,
        factor,
        skip,
        len(entries),
        *betas,
        *(1 - beta for beta in betas),
        epsilon,
        decay_factor,
        programs,
        TRITON_DTYPES[gradients[0].dtype],
        aligned,
        BLOCK,
        num_warps=WARPS,
    )


# One compiled variant for any number of tensors, because an update in groups during a snapshot must not wait for the compiler.
@triton.jit(do_not_specialize=["entries", "programs"])
def _adamw(
    table,
    rates,
    factor,
    skip,
    entries,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    epsilon,
    decay_factor,
    programs,
    gradient_dtype: tl.constexpr,
    aligned: tl.constexpr,
    block: tl.constexpr,
) -> None:
    scale = tl.load(factor)
    active_entries = tl.where(tl.load(skip) == 0, entries, 0)
    lanes = tl.arange(0, block)
    for number in range(active_entries):
        entry = table + number * 6
        weights = tl.load(entry)
        gradients = tl.load(entry + 1)
        first = tl.load(entry + 2)
        second = tl.load(entry + 3)
        if aligned:
            weights = tl.multiple_of(weights, 16)
            gradients = tl.multiple_of(gradients, 16)
            first = tl.multiple_of(first, 16)
            second = tl.multiple_of(second, 16)
        weights = weights.to(tl.pointer_type(tl.float32))
        gradients = gradients.to(tl.pointer_type(gradient_dtype))
        first = first.to(tl.pointer_type(tl.float32))
        second = second.to(tl.pointer_type(tl.float32))
        size = tl.load(entry + 4)
        rate = tl.load(rates + number)
        root = tl.load(rates + entries + number)
        start = (tl.program_id(0) + tl.load(entry + 5)) % programs * block
        for begin in range(start, size, programs * block):
            index = begin + lanes
            # Only whole blocks can be loaded without a mask, as vectors.
            if begin + block <= size:
                _update_lanes(
                    weights + index,
                    gradients + index,
                    first + index,
                    second + index,
                    None,
                    scale,
                    beta1,
                    beta2,
                    one_minus_beta1,
                    one_minus_beta2,
                    rate,
                    root,
                    epsilon,
                    decay_factor,
                )
            else:
                _update_lanes(
                    weights + index,
                    gradients + index,
                    first + index,
                    second + index,
                    index < size,
                    scale,
                    beta1,
                    beta2,
                    one_minus_beta1,
                    one_minus_beta2,
                    rate,
                    root,
                    epsilon,
                    decay_factor,
                )


@triton.jit
def _update_lanes(
    weights,
    gradients,
    first,
    second,
    inside,
    scale,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    rate,
    root,
    epsilon,
    decay_factor,
) -> None:
    weight, mean, square = updated(
        tl.load(weights, mask=inside),
        tl.load(gradients, mask=inside),
        tl.load(first, mask=inside),
        tl.load(second, mask=inside),
        scale,
        beta1,
        beta2,
        one_minus_beta1,
        one_minus_beta2,
        rate,
        root,
        epsilon,
        decay_factor,
    )
    tl.store(first, mean, mask=inside)
    tl.store(second, square, mask=inside)
    tl.store(weights, weight, mask=inside)


@triton.jit
def updated(
    weight,
    gradient,
    mean,
    square,
    scale,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    rate,
    root,
    epsilon,
    decay_factor,
) -> tl.tuple:
    """Return AdamW's weight and moments after an update. All kernels use this function, so that all give the same bits.

    Sums of products are written as fused multiply-adds. Otherwise the compiler may fuse either of two products, and chooses differently
    from kernel to kernel.
    """
    gradient = gradient.to(tl.float32) * scale
    mean = tl.fma(gradient, one_minus_beta1, beta1 * mean)
    square = tl.fma(gradient, one_minus_beta2 * gradient, beta2 * square)
    weight = tl.fma(weight, decay_factor, -(rate * mean / tl.fma(tl.sqrt(square), root, epsilon)))
    return weight, mean, square
