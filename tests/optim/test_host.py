"""The optimizer whose state waits in host memory gives the bits of the one whose state stays, however its parameters are cut."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.optim.fused import MOMENTS, Coefficients, StepInputs
from meshwright.optim.host import ALIGNED, MASTER, HostAdamW, lay_out

RATE, BETAS, EPSILON, DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1
SHAPES = {"a": (37, 11), "empty": (0, 5), "b": (3,), "c": (64, 16), "d": (129,), "e": (5, 7, 9)}
NO_DECAY = {"b", "d"}
STEPS = 5

sizes = st.lists(st.integers(0, 1000), max_size=6).map(lambda found: {f"w{at}": n for at, n in enumerate(found)})


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, st.integers(1, 8).map(lambda n: n * ALIGNED))
def test_every_element_has_one_place(decayed: dict[str, int], plain: dict[str, int], most: int) -> None:
    plain = {f"p{name}": size for name, size in plain.items()}
    chunks = lay_out([(DECAY, decayed), (0.0, plain)], most)
    every = decayed | plain
    ends = [0, *(chunk.start + chunk.size for chunk in chunks)]
    assert [chunk.start for chunk in chunks] == ends[:-1] and all(0 < chunk.size <= most for chunk in chunks)
    for chunk in chunks:
        assert {segment.name in decayed for segment in chunk.segments} == {chunk.weight_decay > 0}
        inside = [(s.at, s.at + s.count) for s in chunk.segments]
        assert all(before[1] <= after[0] for before, after in pairwise(inside))
        assert inside[-1][1] <= chunk.size and all(s.at % ALIGNED == 0 == s.first % ALIGNED for s in chunk.segments)
    for name, size in every.items():
        mine = [(chunk.start + s.at, s) for chunk in chunks for s in chunk.segments if s.name == name]
        assert sum(s.count for _, s in mine) == size
        assert all(place - s.first == mine[0][0] for place, s in mine), "in one piece"
        assert [s.first for _, s in mine] == [sum(t.count for _, t in mine[:at]) for at in range(len(mine))]


def stepped(dtype: torch.dtype, skipped: int | None = None) -> tuple[dict[str, torch.Tensor], torch.optim.AdamW]:
    """torch's own optimizer after STEPS, of which `skipped` had no finite norm."""
    weights = started(dtype)
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


def started(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}


def gradients(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step + 1)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}


def away(dtype: torch.dtype, chunk: int, masters: bool) -> tuple[HostAdamW, dict[str, torch.Tensor]]:
    """The optimizer, and by parameter what of it is on the device: the part itself, or a rounded copy."""
    weights = started(dtype)
    here = {name: weight.to(torch.bfloat16) for name, weight in weights.items()} if masters else weights

    def release(name: str) -> Callable[[], torch.Tensor]:
        def let_go() -> torch.Tensor:
            weights[name].untyped_storage().resize_(0)
            return here[name]

        return let_go

    decays = {name: 0.0 if name in NO_DECAY else DECAY for name in weights}
    releases = {name: release(name) for name in weights} if masters else {}
    made = HostAdamW(weights, decays, releases, coefficients=Coefficients(BETAS, EPSILON), chunk=chunk)
    made.release_master_weights()
    return made, here


def differing(made: HostAdamW, here: dict[str, torch.Tensor], dtype: torch.dtype, skipped: int | None) -> set[str]:
    """What differs by a bit from torch's optimizer after the same steps."""
    weights, truth = stepped(dtype, skipped)
    found = set()
    for name, weight in weights.items():
        pairs = {moment: (made.state(moment, name), truth.state[weight].get(moment, 0 * weight)) for moment in MOMENTS}
        pairs["here"] = here[name], weight.to(here[name].dtype)
        if made.keeps_masters:
            pairs[MASTER] = made.state(MASTER, name), weight
        found |= {f"{kind} {name}" for kind, (mine, theirs) in pairs.items() if not torch.equal(mine, theirs)}
    return found


def run(made: HostAdamW, dtype: torch.dtype, skipped: int | None = None) -> None:
    for step in range(STEPS):
        skip = torch.tensor(float(step == skipped))
        made.step(gradients(step, dtype), StepInputs(RATE, torch.ones(()), skip))


@pytest.mark.parametrize("chunk", [ALIGNED, 5 * ALIGNED, 1 << 20])
@pytest.mark.parametrize(("dtype", "masters"), [(torch.float32, False), (torch.float32, True), (torch.float64, False)])
@pytest.mark.parametrize("skipped", [None, 2])
def test_same_bits_as_on_the_device(chunk: int, dtype: torch.dtype, masters: bool, skipped: int | None) -> None:
    made, here = away(dtype, chunk, masters)
    run(made, dtype, skipped)
    assert differing(made, here, dtype, skipped) == set()


def test_a_chunk_that_does_not_come_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, here = away(torch.float32, 4 * ALIGNED, True)
    send = HostAdamW._send
    monkeypatch.setattr(
        HostAdamW,
        "_send",
        lambda self, number, concurrent_span: send(self, number, concurrent_span) if number else None,
    )
    run(made, torch.float32)
    assert "exp_avg a" in differing(made, here, torch.float32, None)


def test_copies_are_told_to_whoever_draws_them() -> None:
    from contextlib import nullcontext

    inputs: list[tuple[str, str]] = []

    def concurrent_span(name: str, lane: str) -> Any:
        inputs.append((name, lane))
        return nullcontext()

    made, _ = away(torch.float32, 1 << 20, True)
    made.step(gradients(0, torch.float32), StepInputs(RATE, torch.ones(()), torch.zeros(())), concurrent_span)
    assert sorted(inputs) == [(f"optimizer {n}", lane) for n in range(2) for lane in ("fetch", "offload")]


def test_the_host_holds_all_of_it() -> None:
    elements = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for masters, kinds in ((False, 2), (True, 3)):
        made, _ = away(torch.float32, 1 << 20, masters)
        assert 4 * kinds * elements <= made.host_bytes <= 4 * kinds * (elements + len(SHAPES) * ALIGNED)
