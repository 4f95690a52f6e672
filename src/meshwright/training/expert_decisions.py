"""Experts present on ranks in each step of a run, decided on a host thread from the loads of earlier steps.

The loads of step s are summed over ranks with its other figures, so every rank has the same. A thread decides from the window that ends
with them, while the device runs step s + 1; step s + 2 uses the decision. The delay is fixed, so a run is reproducible. The window and the
decisions that no step has used yet are part of the run's state: a resumed run decides as the uninterrupted one.

Where owners follow the loads (`training.expert_owners`), the same window decides them, and a step after a move begins without copies.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.checkpoint.ranks import RankGroup
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.present_experts import PresentExperts, Tables
from meshwright.policies.expert_costs import ExpertCosts
from meshwright.policies.expert_owners import even_owners
from meshwright.policies.expert_placement import PlacementProblem, copied_everywhere, place_experts
from meshwright.policies.expert_routing import owned
from meshwright.policies.load_window import LoadWindow
from meshwright.simulator.expert_placement_costs import placement_costs
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import ExpertPlan, Plan
from meshwright.spec.run import RunSpec
from meshwright.training.background_thread import BackgroundThread
from meshwright.training.expert_moves import ExpertMoves
from meshwright.training.expert_owners import ExpertOwners

DELAY = 2
"""Steps between the loads that a decision is made from and the step that uses it."""
ELEMENTS = 20_000
"""Layers × ranks × experts that are decided in a step, which takes about 20 ms; above this, layers take turns."""


@dataclass(frozen=True)
class Decision:
    """Experts present on each rank in all layers, `(layers, ranks, experts)`, and the tables of this rank's layers."""

    present: np.ndarray
    tables: Mapping[int, Tables]


class ExpertDecisions:
    """Decisions for a model's MoE layers, of which this rank has the layers of `presents`; `shape` as below.

    All ranks decide for all layers, of which `first` is the first; `costs` are equal on all ranks, None with policy none. `rank` is this
    rank's index in the group that has a layer's experts. `owners` are those that follow the loads, if any.
    """

    def __init__(
        self,
        plan: ExpertPlan,
        presents: Mapping[int, PresentExperts],
        shape: tuple[int, int, int],
        first: int,
        rank: int,
        costs: ExpertCosts | None,
        owners: ExpertOwners | None = None,
    ) -> None:
        self.owners = owners
        self._plan = plan
        self._presents = presents
        self._first = first
        self._rank = rank
        self._costs = costs
        self.shape = shape
        """Layers with experts, ranks of a group, experts."""
        layers, ranks, experts = shape
        self._even = even_owners(layers, experts, ranks)
        self._thread = BackgroundThread("expert decisions")
        self._step = 0
        self._counts: dict[int, np.ndarray] = {}
        self._decided: dict[int, Future[Decision]] = {}
        """Decisions by step; the last ones are kept, as a checkpoint of an earlier step may still need them."""
        self._due = min(layers, max(1, ELEMENTS // (ranks * experts)))
        """Layers that are decided in a step."""
        self._initial = self._decision(owned(self._even, ranks), {}, range(layers))
        self._latest = self._initial
        self._moved = 0
        """Step before which owners last moved."""
        self._states_before_move: dict[int, dict[str, Any]] = {}
        """State of the steps before that move, which a checkpoint may still need."""

    @classmethod
    def open(
        cls, run: RunSpec, plan: Plan, mesh: Mesh, presents: Mapping[int, PresentExperts], moves: ExpertMoves | None
    ) -> ExpertDecisions | None:
        """The decisions of a rank, with `moves` also about owners; None if none are to be made. Collective."""
        experts = plan.experts
        group = mesh.experts
        if experts is None or group is None or (experts.policy in ("none", "fixed") and moves is None):
            return None
        per_node = _ranks_per_node(mesh)
        costs = None
        if experts.policy != "none":
            costs = RankGroup(mesh.world.control).run_on_first(
                "costs of experts", lambda: placement_costs(run.model, run.train, plan, run.cluster, per_node)
            )
        first, layers = routed_layers(run.model)
        shape = (layers, group.size(), run.model.experts)
        owners = None
        if moves is not None:
            owners = ExpertOwners(
                shape,
                every=experts.placement_every,
                copied=copied_everywhere(experts.policy, experts.slots, costs, group.size()),
                ranks_per_node=per_node,
                first=first,
                move=moves.move,
                device=mesh.device,
            )
        return cls(experts, presents, shape, first, group.rank(), costs, owners)

    def begin_step(self, step: int) -> bool:
        """Make the experts of the decision for `step` present; without a decision, only those that ranks own.

        Returns whether owners have moved. That is collective over a stage.
        """
        moved = self.owners is not None and self.owners.due(step) and self._move_owners(self.owners, step)
        self._step = step
        decision = self._decided[step].result() if step in self._decided else self._initial
        for layer, experts in self._presents.items():
            experts.use(decision.tables[layer])
        return moved

    def _move_owners(self, owners: ExpertOwners, step: int) -> bool:
        """Balance the owners by the loads of the window before `step`, for which the host waits; returns whether they moved."""
        self._thread.wait()
        window = [counts for number, counts in self._counts.items() if step - self._plan.load_window <= number < step]
        states = {number: self.state(number) for number in range(step - DELAY, step)}
        order = owners.balance(np.sum(window, axis=0).sum(1)) if window else None
        if order is None:
            return False
        self._moved = step
        self._states_before_move = states
        self._counts = {
            number: np.take_along_axis(counts, order[:, None], axis=2) for number, counts in self._counts.items()
        }
        self._decided.clear()
        self._latest = self._initial
        return True

    def rank_loads(self, loads: Tensor) -> Tensor:
        """Return `loads` `(blocks, experts)` at this rank's place in `(layers, ranks, experts)`, flat, to be summed over ranks."""
        by_rank = loads.new_zeros(self.shape)
        by_rank[:, self._rank] = loads[-self.shape[0] :]
        return by_rank.flatten()

    def add(self, sums: Tensor) -> None:
        """Begin to decide for a later step from the sums over all ranks of `rank_loads` of the current one."""
        host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=sums.is_cuda)
        host.copy_(sums, non_blocking=True)
        ready = torch.cuda.current_stream().record_event() if sums.is_cuda else None
        self._decided = {step: decided for step, decided in self._decided.items() if step > self._step - 2 * DELAY}
        self._decided[self._step + DELAY] = self._thread.submit(self._decide, self._step, host, ready)

    def by_number(self, loads: Tensor) -> Tensor:
        """Return `loads` `(layers, experts)`, given by position, in the order of the experts' original numbers."""
        return loads if self.owners is None else self.owners.by_number(loads)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state that a resume after `step` needs, as plain values; waits for the decisions."""
        if step < self._moved and step in self._states_before_move:
            return self._states_before_move[step]
        decided = {
            number: future.result().present for number, future in self._decided.items() if step < number <= step + DELAY
        }
        window = [
            self._counts[number] for number in sorted(self._counts) if step - self._plan.load_window < number <= step
        ]
        return {
            "experts": {
                "shape": list(self.shape),
                "slots": self._plan.slots,
                "counts": [_encode(counts.astype(np.int32)) for counts in window],
                "decided": {str(number): _encode(np.packbits(present)) for number, present in decided.items()},
                **({} if self.owners is None else {"numbers": _encode(self.owners.numbers.astype(np.int32))}),
            }
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state; start without loads if the state has other ranks or slots, or no copies."""
        self._thread.wait()
        self._counts.clear()
        self._decided.clear()
        self._latest = self._initial
        self._moved = 0
        saved = state.get("experts", {})
        step = state["step"]
        size = int(np.prod(self.shape))
        if self.owners is not None:
            layers, _, experts = self.shape
            numbers = np.tile(np.arange(experts), (layers, 1))
            if "numbers" in saved and saved["shape"][::2] == [layers, experts]:
                numbers = (
                    np.frombuffer(_decode(saved["numbers"]), dtype=np.int32).reshape(layers, experts).astype(np.int64)
                )
            self.owners.restore(numbers)
        if (saved.get("shape"), saved.get("slots")) != (list(self.shape), self._plan.slots):
            return
        first = step - len(saved["counts"]) + 1
        for number, text in enumerate(saved["counts"], first):
            self._counts[number] = np.frombuffer(_decode(text), dtype=np.int32).reshape(self.shape).astype(np.int64)
        for number, text in sorted(
            saved["decided"].items(), key=lambda item: int(item[0])
        ):  # the newest becomes the latest
            bits = np.unpackbits(np.frombuffer(_decode(text), dtype=np.uint8), count=size)
            present = bits.reshape(self.shape).astype(bool)
            self._latest = self._decision(present, {}, range(self.shape[0]))
            self._decided[int(number)] = decided = Future()
            decided.set_result(self._latest)

    def _decide(self, step: int, host: Tensor, ready: Any) -> Decision:
        if ready is not None:
            ready.synchronize()
        self._counts[step] = host.numpy().reshape(self.shape).astype(np.int64)
        oldest = step - self._plan.load_window - 2 * DELAY  # a checkpoint of an earlier step may still need its state
        self._counts = {number: counts for number, counts in self._counts.items() if number > oldest}
        if self._costs is None:
            return self._initial
        due = (step * self._due + np.arange(self._due)) % self.shape[0]
        window = LoadWindow(self._plan.load_window)
        for number in sorted(self._counts):
            window.add(self._counts[number][due])
        problem = PlacementProblem(window.sums(), self._even[due], self._plan.slots, self._costs, len(window))
        present = self._latest.present.copy()
        present[due] = place_experts(problem)
        self._latest = self._decision(present, self._latest.tables, due.tolist())
        return self._latest

    def _decision(self, present: np.ndarray, tables: Mapping[int, Tables], changed: Iterable[int]) -> Decision:
        """The decision `present`, with new tables for the `changed` ones of all layers."""
        layers = [self._first + index for index in changed]
        new = {
            layer: self._presents[layer].tables(present[layer - self._first])
            for layer in layers
            if layer in self._presents
        }
        return Decision(present, {**tables, **new})


def routed_layers(spec: ModelSpec) -> tuple[int, int]:
    """The first block with experts, and the number of such blocks; prediction modules follow the layers."""
    blocks = range(spec.layers + spec.prediction_depth)
    routed = [block for block in blocks if spec.routed(block)]
    return routed[0], len(routed)


def _ranks_per_node(mesh: Mesh) -> int:
    """Ranks of one node in each group that has a layer's experts; all of a group if nodes have different numbers."""
    group = next(ranks for ranks in mesh.layout.expert_groups() if mesh.rank in ranks)
    nodes = [mesh.layout.node(rank) for rank in group]
    count = nodes.count(nodes[0])
    even = all(nodes[start : start + count] == [nodes[start]] * count for start in range(0, len(nodes), count))
    return count if even and len(nodes) % count == 0 else len(nodes)


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(values.tobytes())).decode()


def _decode(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
