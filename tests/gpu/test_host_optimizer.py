"""GPU: optimizer state in host memory gives the same bits, copies in both directions at once, and frees device memory.

Takes a minute on one H200.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.gpu.runs import RUNS_LIMIT, Record, steps, trained
from tests.gpu.test_offload import RUN, peak, same_figures

from meshwright.config.load import load_resolved
from meshwright.kernels.pinned import PIN_BYTES
from meshwright.optim.chunks import ALIGNED
from meshwright.optim.fused import MOMENTS, Coefficients, UpdateInputs, count_updates, new_count, update
from meshwright.optim.host import HostAdamW
from meshwright.optim.packing import MASTER, ChunkPacking, pack, seed_of, unpack
from meshwright.spec.model import parameter_count
from meshwright.spec.plan import Moments
from meshwright.workload.buffers import STAGING_BUFFERS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]

SHAPES = {"a": (1000, 1001), "b": (37,), "c": (4096, 4096), "d": (129,), "e": (3, 5, 7)}
BETAS, EPSILON = (0.9, 0.95), 1e-8


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator("cuda").manual_seed(seed)
    return {name: torch.randn(shape, generator=draw, device="cuda") for name, shape in SHAPES.items()}


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize(
    ("chunk", "fraction", "staging"),
    [(None, 1.0, 0), (1 << 20, 1.0, 0), (1 << 20, 0.5, 0), (1 << 20, 1.0, 11 * (10 << 20)), (1 << 20, 0.5, 1 << 30)],
)
def test_same_bits_as_on_the_device(masters: bool, chunk: int | None, fraction: float, staging: int) -> None:
    """Over many steps one behind another, none waited for, of which one is skipped."""
    truth, host_weights = random_tensors(0), random_tensors(0)
    weights = {name: weight.to(torch.bfloat16) for name, weight in host_weights.items()} if masters else host_weights
    moments = {moment: {name: torch.zeros_like(weight) for name, weight in truth.items()} for moment in MOMENTS}
    update_counts = [new_count(torch.device("cuda")) for _ in truth]
    release = {name: (lambda copy=copy: copy) for name, copy in weights.items()} if masters else {}
    optimizer = HostAdamW(
        host_weights,
        dict.fromkeys(host_weights, 0.1),
        release,
        chunk=chunk,
        coefficients=Coefficients(BETAS, EPSILON),
        fraction=fraction,
        staging=staging,
    )
    optimizer.deferred = True
    optimizer.release_master_weights()
    if masters:
        for weight in host_weights.values():
            weight.fill_(torch.nan)  # nothing reads what has left
    for step in range(12):
        gradients = random_tensors(step + 1)
        skipped = step == 5
        factor, skip = (torch.full((), value, device="cuda") for value in (0.3, float(skipped)))
        inputs = UpdateInputs(1e-3, factor, skip)
        optimizer.step(gradients, inputs)
        with count_updates(update_counts, skip):
            moment_lists = (list(moments[moment].values()) for moment in MOMENTS)
            update(
                list(truth.values()),
                list(gradients.values()),
                *moment_lists,
                update_counts,
                coefficients=Coefficients(BETAS, EPSILON),
                weight_decay=0.1,
                inputs=inputs,
            )
    for name, weight in truth.items():
        for moment in MOMENTS:
            assert torch.equal(optimizer.state(moment, name), moments[moment][name].cpu()), (moment, name)
        assert torch.equal(weights[name], weight.to(weights[name].dtype)), name
        assert not masters or torch.equal(optimizer.state(MASTER, name), weight.cpu()), name


class SecondBuffersOnly:
    """`SnapshotCopies` without copies, for an update that must not wait for host memory."""

    groups = ()

    def wait(self, parameters: Iterable[str], *, host: bool = True) -> None:
        assert not host


@pytest.mark.parametrize("chunk", [None, 1 << 20])
def test_steps_beside_snapshots_leave_the_state_to_them(chunk: int | None) -> None:
    """The second buffers are locked in several parts; every other step is beside a snapshot."""

    def build_optimizer() -> HostAdamW:
        master_weights = random_tensors(0) | {"large": torch.ones(PIN_BYTES // 8 + 12345, device="cuda")}
        device_weights = {name: weight.to(torch.bfloat16) for name, weight in master_weights.items()}
        release = {name: (lambda copy=copy: copy) for name, copy in device_weights.items()}
        optimizer = HostAdamW(
            master_weights,
            dict.fromkeys(master_weights, 0.1),
            release,
            chunk=chunk,
            coefficients=Coefficients(BETAS, EPSILON),
        )
        optimizer.release_master_weights()
        return optimizer

    optimizer, reference = build_optimizer(), build_optimizer()
    names = [*SHAPES, "large"]
    optimizer.allocate_second_buffers()
    first = {(state, name): optimizer.part(state, name) for state in (*MOMENTS, MASTER) for name in names}
    norm = torch.ones((), device="cuda")
    for step in range(7):
        gradients = random_tensors(step + 1) | {
            "large": torch.full((PIN_BYTES // 8 + 12345,), 0.1 * step, device="cuda")
        }
        snapshot = optimizer.host_state()
        first_state = {key: optimizer.state(*key) for key in first}
        for stepping, copies in ((optimizer, SecondBuffersOnly() if step % 2 else None), (reference, None)):
            stepping.step(
                {name: value.clone() for name, value in gradients.items()},
                UpdateInputs(1e-3, norm, 0 * norm),
                None,
                copies,
            )
        if step % 2:
            torch.cuda.synchronize()
            for key, memory in first.items():
                current = snapshot.current(memory.view(-1).view(torch.uint8))
                assert torch.equal(current, first_state[key].view(-1).view(torch.uint8)), (step, key)
    assert all(torch.equal(optimizer.state(*key), reference.state(*key)) for key in first)


def without_ties(part: torch.Tensor) -> torch.Tensor:
    """Values whose lower half is a tie that rounds down become the next ones below in magnitude, as `packing.put_master` says."""
    bits = part.view(torch.int32)
    return torch.where((bits & 0x1FFFF) == 0x8000, bits - 1, bits).view(torch.float32)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_narrow_moments_have_the_bits_of_the_reference(masters: bool, moments: Moments) -> None:
    """Each update by the kernels of the device, between packing by the plain reference on the host."""
    names, packing = list(SHAPES), ChunkPacking(masters, moments)
    parts, truth = random_tensors(0), random_tensors(0)
    on_device = {name: part.to(torch.bfloat16) for name, part in parts.items()}
    release = {name: (lambda copy=copy: copy) for name, copy in on_device.items()} if masters else {}
    coefficients = Coefficients(BETAS, EPSILON)
    optimizer = HostAdamW(
        parts, dict.fromkeys(parts, 0.1), release, moments=moments, chunk=1 << 20, coefficients=coefficients
    )
    optimizer.release_master_weights()
    if masters and not packing.tie_bits:  # int8 moments leave no bit for ties
        truth = {name: without_ties(part) for name, part in truth.items()}
    counts = [new_count(torch.device("cuda"))]
    held = {name: {state: torch.zeros_like(truth[name]) for state in MOMENTS} for name in names}
    for step in range(3):
        inputs = UpdateInputs(1e-3, *(torch.full((), value, device="cuda") for value in (0.3, 0.0)))
        gradients = random_tensors(step + 1)
        optimizer.step({name: gradient.clone() for name, gradient in gradients.items()}, inputs)
        with count_updates(counts, inputs.skip):
            for name in names:
                update(
                    [truth[name]],
                    [gradients[name]],
                    [held[name][MOMENTS[0]]],
                    [held[name][MOMENTS[1]]],
                    counts,
                    coefficients=coefficients,
                    weight_decay=0.1,
                    inputs=inputs,
                )
                start, size = (
                    optimizer.part(MOMENTS[0], name).storage_offset(),
                    -(-truth[name].numel() // ALIGNED) * ALIGNED,
                )
                states = {state: torch.zeros(size) for state in (*MOMENTS, MASTER)}
                for state, value in (*held[name].items(), (MASTER, truth[name])):
                    states[state][: truth[name].numel()] = value.cpu().view(-1)
                fields, rounded = (
                    packing.fields(torch.zeros(packing.bytes(size), dtype=torch.uint8), size),
                    torch.zeros(size, dtype=torch.bfloat16),
                )
                pack(packing, states, fields, rounded if masters else None, seed_of(counts[0]).cpu(), start)
                outputs = {state: torch.empty(size) for state in packing.states}
                unpack(packing, fields, rounded if masters else None, outputs)
                for state, value in outputs.items():
                    target = truth[name] if state == MASTER else held[name][state]
                    target.copy_(value[: target.numel()].view(target.shape))
    for name in names:
        assert all(torch.equal(optimizer.state(state, name), held[name][state].cpu()) for state in MOMENTS), name
        assert not masters or torch.equal(optimizer.state(MASTER, name), truth[name].cpu()), name


def test_chunks_are_copied_in_both_directions_at_the_same_time() -> None:
    weights = {"weight": torch.zeros(24 * 10 * (1 << 20), device="cuda")}
    optimizer = HostAdamW(weights, {"weight": 0.1}, {}, coefficients=Coefficients(BETAS, EPSILON))
    start, spans = torch.cuda.Event(enable_timing=True), []

    @contextmanager
    def concurrent_span(name: str, lane: str) -> Iterator[None]:
        span_start, span_end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        span_start.record()
        yield
        span_end.record()
        spans.append((lane, span_start, span_end))

    gradient, norm = torch.ones_like(weights["weight"]), torch.ones((), device="cuda")
    for _ in range(2):  # the first loads kernels
        optimizer.step({"weight": gradient}, UpdateInputs(1e-3, norm, 0 * norm))
    torch.cuda.synchronize()
    start.record()
    optimizer.step({"weight": gradient}, UpdateInputs(1e-3, norm, 0 * norm), concurrent_span)
    torch.cuda.synchronize()
    intervals = {
        direction: [
            (start.elapsed_time(span_start), start.elapsed_time(span_end))
            for lane, span_start, span_end in spans
            if lane == direction
        ]
        for direction in ("fetch", "offload")
    }
    assert [len(spans_of_lane) for spans_of_lane in intervals.values()] == [24, 24]
    overlaps = [
        any(fetch[0] < offload[1] and offload[0] < fetch[1] for fetch in intervals["fetch"])
        for offload in intervals["offload"]
    ]
    # All but those that leave when everything has come.
    assert sum(overlaps) >= 24 - STAGING_BUFFERS - 1, intervals


def ran(folder: Path, name: str, *overrides: str) -> list[Record]:
    return steps(trained(folder, RUN, name, 1, overrides))


def test_device_memory_is_freed_and_losses_are_equal(tmp_path: Path) -> None:
    on_device, offloaded = (
        ran(tmp_path, offload, "plan.schedule=1f1b", f"plan.offload={offload}", *words)
        for offload, *words in (("none",), ("optimizer", "plan.offload_fraction=1", "plan.offload_staging=0"))
    )
    assert same_figures(offloaded, on_device)
    count = parameter_count(load_resolved(tmp_path / "optimizer" / "config.yaml").model)
    # Master weights and moments go, weights in bf16 and the chunks come.
    freed_bytes = 10 * count - STAGING_BUFFERS * 10 * (1 << 23)
    assert freed_bytes > 0 and peak(on_device) - peak(offloaded) == pytest.approx(freed_bytes, rel=0.1)


def test_a_run_goes_on_without(tmp_path: Path) -> None:
    """Saved with the optimizer away, read with it on the device: the loss goes on as it would have."""
    # One order of sums, and a checkpoint of step 3 however fast the steps are.
    common = ["checkpoint.every=3", "checkpoint.mode=sync", "plan.schedule=1f1b"]
    offloaded = ran(tmp_path, "run", *common, "plan.offload=optimizer", "plan.offload_fraction=1")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    continued = ran(tmp_path, "run", *common, "plan.offload=none")
    assert [step["step"] for step in continued] == [step["step"] for step in offloaded] == list(range(1, 7))
    assert same_figures(continued, offloaded)
