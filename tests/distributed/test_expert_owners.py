"""Owners that follow the loads: moves are exact, a resumed run is bit-equal, training goes on as without moves."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.parallel.world import World
from meshwright.spec.layout import Box
from meshwright.spec.run import Assignment
from meshwright.training.expert_moves import row_transfers
from meshwright.training.session import TrainingSession, open_session
from tests.distributed.cases_training import _whole as whole
from tests.distributed.pool import Pool
from tests.distributed.test_experts import SHALLOW
from tests.distributed.test_training import merge_tensors, prepared, same_bits, trained
from tests.training.tiny import make_tiny, ranks


@pytest.mark.parametrize(
    "boxes",
    [
        [[Box((rank * 2, 0), (2, 3))] for rank in range(4)],
        [[Box((rank // 2 * 4, rank % 2), (4, 1))] for rank in range(4)],
        [[Box((0, 0), (3, 3))], [Box((3, 0), (3, 3))], [Box((6, 0), (2, 3))], []],
        [[Box((rank // 2 * 4, 0), (4, 3))] for rank in range(4)],
        [[Box((4, 0), (2, 3)), Box((0, 0), (2, 3), 2)], [Box((2, 0), (2, 3)), Box((6, 0), (2, 3), 2)]],
    ],
    ids=["experts", "columns", "rows", "copies", "two boxes"],
)
@pytest.mark.parametrize("seed", range(5))
def test_rows_end_where_the_order_says(boxes: list[list[Box]], seed: int) -> None:
    """The oracle moves the rows of the whole tensor. No rank sends what the receiver has."""
    order = np.random.default_rng(seed).permutation(8)
    whole = np.arange(24).reshape(8, 3)
    moved = _exchanged([_local(whole, own) for own in boxes], boxes, order.tolist())
    assert all(np.array_equal(part, _local(whole[order], own)) for part, own in zip(moved, boxes, strict=True))


def _local(whole: np.ndarray, boxes: Sequence[Box]) -> np.ndarray:
    """The local rows of a rank with these boxes."""
    parts = [
        whole[box.offsets[0] : box.offsets[0] + box.sizes[0], box.offsets[1] : box.offsets[1] + box.sizes[1]]
        for box in boxes
    ]
    return np.concatenate(parts) if parts else np.empty((0, 3), dtype=whole.dtype)


def _exchanged(parts: list[np.ndarray], boxes: list[list[Box]], order: list[int]) -> list[np.ndarray]:
    transfers = [row_transfers(boxes, order, rank) for rank in range(len(boxes))]
    moved = [part.copy() for part in parts]
    for source, sender in enumerate(transfers):
        for target, receiver in enumerate(transfers):
            moved[target][receiver.received[source]] = parts[source][sender.sent[target]]
    return moved


OWNERS = [*ranks(4), *SHALLOW, "model.experts=8", "train.steps=12", "checkpoint.every=4", "train.balance_loss=0"]
MOVES = ["plan.expert_placement=balanced", "plan.expert_placement_every=3", "plan.expert_load_window=2"]
FP64 = ["plan.compute=fp64", "train.clip_norm=null"]
LAYOUTS = {
    "expert ranks": [*OWNERS, "plan.expert=2", "supervision.check_state_every=1"],
    "copies": [*OWNERS, "plan.expert=4", "plan.expert_policy=hecate", "plan.expert_slots=1"],
    "tensor": [*OWNERS, "plan.shard=2", "plan.tensor=2", "plan.expert=1"],
    "a rank without router rows": [*OWNERS, "model.experts=6", "plan.expert=2"],
    "pipeline, average": [*OWNERS, "plan.shard=2", "plan.pipeline=2", "plan.expert=2", "train.ema_decay=0.9"],
}
QUICK = ["expert ranks", *(pytest.param(name, marks=pytest.mark.slow) for name in list(LAYOUTS)[1:])]


def moved(world: World, assignment: Assignment) -> tuple[np.ndarray, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Move experts once in a session whose state has drawn values; returns their numbers, the state before and after."""
    session = open_session(assignment, world)
    assert session.decisions is not None and session.decisions.owners is not None
    owners = session.decisions.owners
    for name, parts in sorted(session.state().items()):
        for box, elements in parts.pieces():
            values = torch.arange(elements.numel()).view_as(elements) + sum(map(ord, name)) + 1000 * box.offsets[0]
            elements.copy_(values.sin())
    before = {name: tensor.clone() for name, tensor in tensors_of(session).items()}
    loads = np.random.default_rng(0).geometric(0.01, owners.numbers.shape)
    assert owners.balance(loads) is not None
    return owners.numbers, before, tensors_of(session)


def tensors_of(session: TrainingSession) -> dict[str, torch.Tensor]:
    """The whole tensors of this rank's stages; of routers with biases these alone, which every rank has whole."""
    if session.run.model.router == "sigmoid":
        return {name: parts.local for name, parts in session.state().items() if name.endswith("choice_bias")}
    return whole(session)


@pytest.mark.parametrize("layout", QUICK)
def test_a_move_renumbers_all_state_bit_for_bit(pool: Pool, tmp_path: Path, layout: str) -> None:
    assignment = prepared(make_tiny(tmp_path / "data"), tmp_path, *LAYOUTS[layout], *MOVES).assignment
    for numbers, before, after in pool.run(moved, assignment.plan.ranks, assignment):
        assert (numbers != np.arange(numbers.shape[1])).any()
        assert same_bits(renumbered(after, numbers), before)
        assert any(not torch.equal(after[name], before[name]) for name in before if "router" in name)


@pytest.mark.slow
def test_a_move_renumbers_the_biases_of_routers(pool: Pool, tmp_path: Path) -> None:
    settings = [*LAYOUTS["expert ranks"], "model.router=sigmoid", "train.balance_bias=1e-3", *MOVES]
    assignment = prepared(make_tiny(tmp_path / "data"), tmp_path, *settings).assignment
    for numbers, before, after in pool.run(moved, assignment.plan.ranks, assignment):
        assert before and same_bits(renumbered(after, numbers), before)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_with_moves_equals_training_without_and_is_resumed_bit_for_bit(
    pool: Pool, tmp_path: Path, layout: str
) -> None:
    """In float64: sums over experts have another order after a move, so the last bits may differ."""
    tiny, settings = make_tiny(tmp_path / "data"), [*LAYOUTS[layout], *FP64]
    plain = trained(pool, tiny, tmp_path / "plain", *settings)
    whole_run = trained(pool, tiny, tmp_path / "whole", *settings, *MOVES)
    numbers = first_numbers(tmp_path / "whole")
    assert (numbers != np.arange(numbers.shape[1])).any(), "experts have moved"
    np.testing.assert_allclose(whole_run[0].losses, plain[0].losses, rtol=1e-12)
    tensors = renumbered(merge_tensors(whole_run), numbers)
    for name, tensor in merge_tensors(plain).items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
    assert whole_run[0].steps[-1]["expert_loads"] == plain[0].steps[-1]["expert_loads"]
    first = trained(pool, tiny, tmp_path / "parts", *settings, *MOVES, stop_at=5)
    second = trained(pool, tiny, tmp_path / "parts", *settings, *MOVES)
    assert first[0].losses + second[0].losses == whole_run[0].losses
    assert same_bits(merge_tensors(second), merge_tensors(whole_run))


def first_numbers(folder: Path) -> np.ndarray:
    """The experts' first numbers by position `(layers, experts)` in the newest checkpoint of a run."""
    newest = max(folder.glob("tiny/checkpoints/step-*"))
    saved = json.loads((newest / "state.json").read_text())["experts"]
    layers, _, experts = saved["shape"]
    values = zlib.decompress(base64.b64decode(saved["numbers"]))
    return np.frombuffer(values, dtype=np.int32).reshape(layers, experts).astype(np.int64)


def renumbered(tensors: dict[str, torch.Tensor], numbers: np.ndarray) -> dict[str, torch.Tensor]:
    """The tensors of a model as if no expert had moved."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        layer, _, rest = name.partition("layers.")[2].partition(".moe.")
        if rest and not rest.startswith("shared."):
            result[name] = tensor[torch.from_numpy(np.argsort(numbers[int(layer)]))]
    return result
