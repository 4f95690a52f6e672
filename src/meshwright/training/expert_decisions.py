"""Decides on a host thread which experts are present on which ranks in each step, from the loads of earlier steps.

The loads of step s are summed over ranks together with the step's other figures, so every rank has the same loads. While the device runs
step s + 1, a thread decides from the loads of step s and of some steps before it (the window). Step s + 2 uses the decision. The delay is
fixed, so a run is reproducible. The state of the run includes the window and the decisions that no step has used yet, so a resumed run
decides as an uninterrupted run does.

If owners follow the loads (`training.expert_owners`), they are decided from the same window. A step after a move begins without copies.
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
"""A decision made from the loads of step s is used in step s + DELAY."""
ELEMENTS = 20_000
"""How many layers × ranks × experts are decided per step, which takes about 20 ms. If there are more, layers take turns."""


@dataclass(frozen=True)
class Decision:
    """Which experts are present, `(layers, ranks, experts)`, and the tables for this rank's layers, by layer."""

    present: np.ndarray
    tables: Mapping[int, Tables]


class ExpertDecisions:
    """Makes the decisions for the MoE layers of a model.

    All ranks decide for all layers and come to the same decisions; this rank has only the layers in `presents`.

    - `shape`: numbers of layers with experts, of ranks in a group, and of experts.
    - `first`: the first layer with experts.
    - `rank`: this rank's index in the group that has a layer's experts.
    - `costs`: costs of copies and of compute, equal on all ranks; None with policy none.
    - `owners`: moves experts between their owners; None if owners do not change.
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
        """(layers with experts, ranks of a group, experts)."""
        layers, ranks, experts = shape
        self._even = even_owners(layers, experts, ranks)
        self._thread = BackgroundThread("expert decisions")
        self._step = 0
        self._counts: dict[int, np.ndarray] = {}
        self._decided: dict[int, Future[Decision]] = {}
        """Decisions by the step that uses them. The latest are kept after their use, because a checkpoint of an earlier step needs them."""
        self._due = min(layers, max(1, ELEMENTS // (ranks * experts)))
        """Number of layers that are decided per step."""
        self._initial = self._decision(owned(self._even, ranks), {}, range(layers))
        self._latest = self._initial
        self._moved = 0
        """Owners last moved before this step; 0 if they have not moved."""
        self._states_before_move: dict[int, dict[str, Any]] = {}
        """The states of the steps before the last move, which a checkpoint of these steps needs."""

    @classmethod
    def open(
        cls, run: RunSpec, plan: Plan, mesh: Mesh, presents: Mapping[int, PresentExperts], moves: ExpertMoves | None
    ) -> ExpertDecisions | None:
        """Return the decisions of a rank, with `moves` also about owners; None if the plan needs no decisions. Collective."""
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
        """Make the experts present that were decided for `step`. If nothing was decided, only owned experts are present.

        Returns whether owners have moved. A move is collective over a stage.
        """
        moved = self.owners is not None and self.owners.due(step) and self._move_owners(self.owners, step)
        self._step = step
        decision = self._decided[step].result() if step in self._decided else self._initial
        for layer, experts in self._presents.items():
            experts.use(decision.tables[layer])
        return moved

    def _move_owners(self, owners: ExpertOwners, step: int) -> bool:
        """Balance the owners by the loads of the window before `step`. The host waits for these loads. Returns whether owners moved."""
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
        """Put `loads` `(blocks, experts)` in this rank's place of a zero tensor `(layers, ranks, experts)`, and return it flat.

        The sum of these tensors over ranks has the loads of all ranks side by side.
        """
        by_rank = loads.new_zeros(self.shape)
        by_rank[:, self._rank] = loads[-self.shape[0] :]
        return by_rank.flatten()

    def add(self, sums: Tensor) -> None:
        """Start to decide for a later step. `sums` are the sums over all ranks of `rank_loads` of the current step."""
        host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=sums.is_cuda)
        host.copy_(sums, non_blocking=True)
        ready = torch.cuda.current_stream().record_event() if sums.is_cuda else None
        self._decided = {step: decided for step, decided in self._decided.items() if step > self._step - 2 * DELAY}
        self._decided[self._step + DELAY] = self._thread.submit(self._decide, self._step, host, ready)

    def by_number(self, loads: Tensor) -> Tensor:
        """Reorder `loads` `(layers, experts)` from the experts' positions to their original numbers."""
        return loads if self.owners is None else self.owners.by_number(loads)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state that a resume after `step` needs, as plain values. Waits for decisions in progress."""
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
        """Restore the state of a checkpoint. If it is for other ranks or slots, or has no copies, start without loads."""
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
        """Return the decision with these `present` experts; tables are computed for the `changed` layers and otherwise taken over."""
        layers = [self._first + index for index in changed]
        new = {
            layer: self._presents[layer].tables(present[layer - self._first])
            for layer in layers
            if layer in self._presents
        }
        return Decision(present, {**tables, **new})


def routed_layers(spec: ModelSpec) -> tuple[int, int]:
    """Return the first block with experts, and the number of such blocks. Blocks of prediction modules are counted after the layers."""
    blocks = range(spec.layers + spec.prediction_depth)
    routed = [block for block in blocks if spec.routed(block)]
    return routed[0], len(routed)


def _ranks_per_node(mesh: Mesh) -> int:
    """Return the number of ranks per node in a group that has a layer's experts; the group's size if nodes have different numbers."""
    group = next(ranks for ranks in mesh.layout.expert_groups() if mesh.rank in ranks)
    nodes = [mesh.layout.node(rank) for rank in group]
    count = nodes.count(nodes[0])
    even = all(nodes[start : start + count] == [nodes[start]] * count for start in range(0, len(nodes), count))
    return count if even and len(nodes) % count == 0 else len(nodes)


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(values.tobytes())).decode()


def _decode(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
