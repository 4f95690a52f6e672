"""The optimizer with its state in host memory gives the same bits as on the device, for any division into chunks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.slow import quick_first

from meshwright.optim.chunks import ALIGNED, OptimizerChunk, groups_in_order, plan_chunks
from meshwright.optim.fused import MOMENTS, Coefficients, UpdateInputs
from meshwright.optim.host import HostAdamW, _chunks_on_device
from meshwright.optim.packing import MASTER, ChunkPacking, pack, seed_of, unpack
from meshwright.spec.plan import Moments

RATE, BETAS, EPSILON, DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1
SHAPES = {"a": (37, 11), "empty": (0, 5), "b": (3,), "c": (64, 16), "d": (129,), "e": (5, 7, 9)}
NO_DECAY = {"b", "d"}
STEPS = 5

sizes = st.lists(st.integers(0, 1000), max_size=6).map(
    lambda sizes: {f"w{index}": size for index, size in enumerate(sizes)}
)


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, st.integers(1, 8).map(lambda n: n * ALIGNED))
def test_chunks_contain_every_element_once(decayed: dict[str, int], plain: dict[str, int], most: int) -> None:
    plain = {f"p{name}": size for name, size in plain.items()}
    chunks = plan_chunks([(DECAY, decayed), (0.0, plain)], most)
    every = decayed | plain
    ends = [0, *(chunk.start + chunk.size for chunk in chunks)]
    assert [chunk.start for chunk in chunks] == ends[:-1] and all(0 < chunk.size <= most for chunk in chunks)
    for chunk in chunks:
        assert {segment.name in decayed for segment in chunk.segments} == {chunk.weight_decay > 0}
        inside = [(s.offset, s.offset + s.count) for s in chunk.segments]
        assert all(before[1] <= after[0] for before, after in pairwise(inside))
        assert inside[-1][1] <= chunk.size and all(s.offset % ALIGNED == 0 == s.first % ALIGNED for s in chunk.segments)
    for name, size in every.items():
        segments = [(chunk.start + s.offset, s) for chunk in chunks for s in chunk.segments if s.name == name]
        assert sum(s.count for _, s in segments) == size
        assert all(position - s.first == segments[0][0] for position, s in segments), "one contiguous range"
        assert [s.first for _, s in segments] == [
            sum(t.count for _, t in segments[:index]) for index in range(len(segments))
        ]


def torch_optimizer_after_steps(
    dtype: torch.dtype, skipped: int | None = None
) -> tuple[dict[str, torch.Tensor], torch.optim.AdamW]:
    """Weights and torch's own optimizer after STEPS steps without the step `skipped`."""
    weights = initial_weights(dtype)
    groups = [
        {"params": [w for name, w in weights.items() if name not in NO_DECAY], "weight_decay": DECAY},
        {"params": [w for name, w in weights.items() if name in NO_DECAY], "weight_decay": 0.0},
    ]
    truth = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON, fused=True)
    for step in range(STEPS):
        for name, gradient in gradients(step, dtype).items():
            weights[name].grad = gradient
        if step != skipped:
            truth.step()
    return weights, truth


def initial_weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def gradients(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def offloaded_optimizer(
    dtype: torch.dtype, chunk: int, masters: bool, moments: Moments = "fp32", fraction: float = 1.0, staging: int = 0
) -> tuple[HostAdamW, dict[str, torch.Tensor]]:
    """The optimizer, and the weights on the device by parameter: the part itself, or a rounded copy."""
    weights = initial_weights(dtype)
    on_device = {name: weight.to(torch.bfloat16) for name, weight in weights.items()} if masters else weights

    def release(name: str) -> Callable[[], torch.Tensor]:
        def free_master() -> torch.Tensor:
            weights[name].untyped_storage().resize_(0)
            return on_device[name]

        return free_master

    decays = {name: 0.0 if name in NO_DECAY else DECAY for name in weights}
    releases = {name: release(name) for name in weights} if masters else {}
    optimizer = HostAdamW(
        weights,
        decays,
        releases,
        coefficients=Coefficients(BETAS, EPSILON),
        moments=moments,
        fraction=fraction,
        staging=staging,
        chunk=chunk,
    )
    optimizer.release_master_weights()
    return optimizer, on_device


def state_with_differences(
    optimizer: HostAdamW, on_device: dict[str, torch.Tensor], dtype: torch.dtype, skipped: int | None
) -> set[str]:
    """Names of the state and weights that are not bit-identical to those of torch's optimizer after the same steps."""
    weights, truth = torch_optimizer_after_steps(dtype, skipped)
    names = set()
    for name, weight in weights.items():
        pairs = {
            moment: (optimizer.state(moment, name), truth.state[weight].get(moment, 0 * weight)) for moment in MOMENTS
        }
        pairs["on_device"] = on_device[name], weight.to(on_device[name].dtype)
        if optimizer.has_master_weights:
            pairs[MASTER] = optimizer.state(MASTER, name), weight
        names |= {
            f"{state_name} {name}" for state_name, (ours, theirs) in pairs.items() if not torch.equal(ours, theirs)
        }
    return names


def run(optimizer: HostAdamW, dtype: torch.dtype, skipped: int | None = None) -> None:
    for step in range(STEPS):
        skip = torch.tensor(float(step == skipped))
        optimizer.step(gradients(step, dtype), UpdateInputs(RATE, torch.ones(()), skip))


@pytest.mark.parametrize("chunk", [ALIGNED, 5 * ALIGNED, 1 << 20])
@pytest.mark.parametrize(("dtype", "masters"), [(torch.float32, False), (torch.float32, True), (torch.float64, False)])
@pytest.mark.parametrize("skipped", [None, 2])
def test_same_bits_as_on_the_device(chunk: int, dtype: torch.dtype, masters: bool, skipped: int | None) -> None:
    optimizer, on_device = offloaded_optimizer(dtype, chunk, masters)
    run(optimizer, dtype, skipped)
    assert state_with_differences(optimizer, on_device, dtype, skipped) == set()


def test_a_chunk_that_is_not_copied_back_makes_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, on_device = offloaded_optimizer(torch.float32, 4 * ALIGNED, True)
    send = HostAdamW._send

    def lose(optimizer: HostAdamW) -> None:
        optimizer._sent += 1

    monkeypatch.setattr(
        HostAdamW,
        "_send",
        lambda self, chunk: send(self, chunk) if chunk.number else lose(self),
    )
    run(optimizer, torch.float32)
    assert "exp_avg a" in state_with_differences(optimizer, on_device, torch.float32, None)


def test_every_copy_has_a_span() -> None:
    from contextlib import nullcontext

    inputs: list[tuple[str, str]] = []

    def concurrent_span(name: str, lane: str) -> Any:
        inputs.append((name, lane))
        return nullcontext()

    optimizer, _ = offloaded_optimizer(torch.float32, 1 << 20, True)
    for span in (None, concurrent_span):  # the first chunks of the second step were fetched at the end of the first
        optimizer.step(gradients(0, torch.float32), UpdateInputs(RATE, torch.ones(()), torch.zeros(())), span)
    assert sorted(inputs) == [(f"optimizer {n}", lane) for n in range(5) for lane in ("fetch", "offload")]


@pytest.mark.parametrize(("moments", "per_moment"), [("fp32", 4), ("bf16", 2), ("int8", 1 + 1 / 256)])
def test_host_bytes_cover_all_state(moments: Moments, per_moment: float) -> None:
    """Two moments, and 16 bits of each master weight."""
    elements = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for masters in (False, True):
        optimizer, _ = offloaded_optimizer(torch.float32, 1 << 20, masters, moments)
        bytes_per_element = 2 * per_moment + 2 * masters
        most = bytes_per_element * (elements + len(SHAPES) * ALIGNED)
        assert bytes_per_element * elements <= optimizer.host_bytes <= most


UPDATES = 100
SOME, ALL = 8 * ALIGNED * 10, 1 << 20
"""Bytes of staging for eight of ten chunks, and for each."""
FORMS: list[tuple[Moments, float, int]] = [
    ("fp32", 1.0, SOME),
    ("fp32", 1.0, ALL),
    ("fp32", 0.4, 0),
    ("bf16", 1.0, ALL),
    ("int8", 0.4, SOME),
    ("fp32", 0.6, ALL),
]


def noisy_gradients(step: int) -> tuple[dict[str, torch.Tensor], UpdateInputs]:
    """Accumulated gradients of two micro-batches, with clipping that binds in most steps, and every seventh step skipped."""
    draw = torch.Generator().manual_seed(100 + step)
    sums = {
        name: torch.randn(shape, generator=draw) + torch.randn(shape, generator=draw) for name, shape in SHAPES.items()
    }
    norm = torch.stack([gradient.square().sum() for gradient in sums.values()]).sum().sqrt()
    factor = (60.0 / norm).clamp(max=1.0)
    return sums, UpdateInputs(RATE, factor, torch.tensor(float(step % 7 == 3)))


def clipped_reference(moments: Moments) -> tuple[dict[str, torch.Tensor], torch.optim.AdamW]:
    """torch's AdamW after all updates; narrow moments are packed and unpacked after each by the functions of the format."""
    weights = initial_weights(torch.float32)
    decays = {name: 0.0 if name in NO_DECAY else DECAY for name in weights}
    groups = [{"params": [weight], "weight_decay": decays[name]} for name, weight in weights.items()]
    truth = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON, fused=True)
    starts = {s.name: c.start + s.offset for c in chunks_of(weights, decays) for s in c.segments if not s.first}
    packing, updates = ChunkPacking(True, moments), 0
    for step in range(UPDATES):
        gradients, inputs = noisy_gradients(step)
        if inputs.skip:
            continue
        updates += 1
        for name, weight in weights.items():
            weight.grad = gradients[name] * inputs.factor
        truth.step()
        for name, weight in weights.items() if moments != "fp32" else ():
            if weight.numel():
                round_state(packing, weight, truth.state[weight], starts[name], updates)
    return weights, truth


def round_state(
    packing: ChunkPacking, weight: torch.Tensor, state: dict[str, torch.Tensor], start: int, updates: int
) -> None:
    size = -(-weight.numel() // ALIGNED) * ALIGNED
    padded = {name: torch.zeros(size) for name in packing.states}
    tensors = {name: weight if name == MASTER else state[name] for name in packing.states}
    for name, values in tensors.items():
        padded[name][: weight.numel()] = values.view(-1)
    fields, rounded = (
        packing.fields(torch.zeros(packing.bytes(size), dtype=torch.uint8), size),
        torch.zeros(size).bfloat16(),
    )
    pack(packing, padded, fields, rounded, seed_of(torch.tensor(float(updates))), start)
    unpack(packing, fields, rounded, padded)
    for name, values in tensors.items():
        values.view(-1).copy_(padded[name][: weight.numel()])


def chunks_of(weights: dict[str, torch.Tensor], decays: dict[str, float]) -> list[OptimizerChunk]:
    return plan_chunks(groups_in_order({name: weight.numel() for name, weight in weights.items()}, decays), ALIGNED)


@pytest.mark.parametrize("tenths", range(11))
def test_the_share_in_device_memory_loses_no_chunk_to_rounding(tenths: int) -> None:
    chunks = [OptimizerChunk(start, 10, 0.0, ()) for start in range(0, 100, 10)]
    assert _chunks_on_device(chunks, tenths / 10) == 10 - tenths


@pytest.mark.parametrize(("moments", "fraction", "staging"), quick_first(2, FORMS, unpack=True))
def test_a_hundred_clipped_steps_with_a_restart(moments: Moments, fraction: float, staging: int) -> None:
    """Updates are completed by parameter, and read now and then. The restart carries fp32 values to other places."""
    weights, truth = clipped_reference(moments)
    optimizer, on_device = offloaded_optimizer(torch.float32, ALIGNED, True, moments, fraction, staging)
    clipped = 0
    for step in range(UPDATES):
        if step == 60:
            state = {(kind, name): optimizer.state(kind, name) for kind in (*MOMENTS, MASTER) for name in SHAPES}
            optimizer, on_device = offloaded_optimizer(torch.float32, ALIGNED, True, moments, 1 - fraction)
            for key, values in state.items():
                optimizer.write(optimizer.part(*key), values)
            optimizer.set_steps(sum(step % 7 != 3 for step in range(60)))
        optimizer.deferred = step % 3 != 0
        gradients, inputs = noisy_gradients(step)
        clipped += int(inputs.factor < 1)
        for _ in range(step % 4):
            optimizer.launch_copies()
        optimizer.step(gradients, inputs)
        for name in SHAPES if step % 2 else ():
            optimizer.complete_updates([name])
            if step % 10 == 5:  # between two units' updates, which this completes
                optimizer.write(optimizer.part(MOMENTS[0], "c"), optimizer.state(MOMENTS[0], "c"))
    assert clipped > UPDATES / 4
    for name, weight in weights.items():
        for moment in MOMENTS:
            assert torch.equal(optimizer.state(moment, name), truth.state[weight].get(moment, 0 * weight)), (
                moment,
                name,
            )
        assert torch.equal(optimizer.state(MASTER, name), weight) and torch.equal(on_device[name], weight.bfloat16())


def test_a_deferred_update_is_launched_for_what_is_asked() -> None:
    optimizer, on_device = offloaded_optimizer(torch.float32, 2 * ALIGNED, True)
    optimizer.deferred = True
    before = {name: weight.clone() for name, weight in on_device.items()}
    optimizer.step(gradients(0, torch.float32), UpdateInputs(RATE, torch.ones(()), torch.zeros(())))
    assert all(torch.equal(weight, before[name]) for name, weight in on_device.items())
    assert optimizer.complete_updates(["a", "b"]) and not optimizer.complete_updates(["a", "empty"])
    changed = {name for name, weight in on_device.items() if not torch.equal(weight, before[name])}
    assert changed == {"a", "b"}
    assert optimizer.state(MASTER, "e").shape == SHAPES["e"] and not optimizer.complete_updates(), "reading completes"
    assert not torch.equal(on_device["e"], before["e"])
