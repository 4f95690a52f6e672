"""Resume of a run: all ranks load the newest step that is complete, from host memory or from storage."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from meshwright.checkpoint.format.inventory import take_inventory
from meshwright.checkpoint.memory.tier import MemoryTier, find_snapshot
from meshwright.checkpoint.mirror.copies import describe_copies
from meshwright.checkpoint.models.adapters import BASE, check_base
from meshwright.checkpoint.ranks import RankGroup
from meshwright.spec.errors import Damaged
from meshwright.training.run_state import CURSORS

if TYPE_CHECKING:
    from meshwright.training.session import TrainingSession

Tier = MemoryTier | Literal["storage"]
"""Where a checkpoint is: in a tier of host memory, or in storage."""

log = logging.getLogger("meshwright")


def resume(session: TrainingSession, at_most: int | None = None) -> Tier | None:
    """Load the newest good state and return where it was; None if the run begins. Collective.

    With `at_most` the newest good state of this step or an earlier one is loaded, if there is one; otherwise the newest of any step. Raises
    Damaged if the run had a checkpoint and none is good, because the run must not silently start from scratch.
    """
    tier = load_newest(session, at_most)
    if tier is None and at_most is not None:
        tier = load_newest(session)
        if tier is not None and session.world.leads:
            log.warning(
                "no checkpoint of step %d or before is good; the run goes on after step %d", at_most, session.step
            )
    if tier is None:
        looking = f"looking for checkpoints in {session.store.folder}"
        RankGroup(session.world.control).run_on_first(looking, lambda: _check_begin(session))
    return tier


def check_none_damaged(session: TrainingSession, at_most: int) -> None:
    """Raise Damaged on all ranks if the run has checkpoints up to step `at_most` but none of them could be loaded. Collective."""

    def check() -> None:
        if (lost := take_inventory(session.folder).up_to(at_most).lost()) is not None:
            raise lost

    RankGroup(session.world.control).run_on_first(f"looking for checkpoints in {session.store.folder}", check)


def load_newest(session: TrainingSession, at_most: int | None = None) -> Tier | None:
    """Load the newest good state whose step is not beyond `at_most`, and return where it was; None if there is none. Collective.

    If host memory and storage both have the step, host memory is read. On damage all ranks turn to the next older state together.
    """
    loaded = _from_memory(session, at_most)
    if loaded is None:
        newest = session.store.load_newest(session.state(), at_most)
        if newest is None:
            return None
        loaded = newest[1], "storage"
    state, tier = loaded
    _continue_from(session, state)
    log.info("resumed after step %d from %s", session.step, tier)
    return tier


def _from_memory(session: TrainingSession, at_most: int | None) -> tuple[dict[str, Any], Tier] | None:
    """Load the run's state from host memory. Returns it with its tier; None if there is none, if storage has a newer one, or on damage."""
    ranks = RankGroup(session.world.control)
    snapshot = find_snapshot(ranks, session.lease.run_id)
    if snapshot is None:
        return None
    stored = session.store.newest_step(at_most)
    try:
        if (at_most is not None and snapshot.step > at_most) or snapshot.step < (stored or 0):
            return None
        # Without a stored checkpoint, a failed load would overwrite initial weights that nothing could replace, so verify first.
        if stored is None:
            snapshot.verify(ranks)
        return snapshot.load(ranks, session.state(), session.recorder, session.world.device_group), snapshot.tier
    except Damaged as error:
        if ranks.is_first:
            log.warning("%s; %s", error, "the run begins again" if stored is None else "storage is used")
        return None
    finally:
        snapshot.close()


def _continue_from(session: TrainingSession, state: dict[str, Any]) -> None:
    if session.base is not None:
        check_base(state.get(BASE), session.base, str(session.folder), f"model.init {session.run.model.init}")
    session.step = state["step"]
    session.tokens = state["tokens"]
    session.steps_before = state.get("train_steps")
    session.numerics.restore(state)
    session.next_sample = state["next_sample"]
    if session.decisions is not None:
        session.decisions.restore(state)
    session.optimizer.set_steps(session.numerics.updates(session.step))
    accept = session.run.data.changed == "accept"
    session.data.restore_cursors(state.get(CURSORS, {}), state.get("data") or {}, accept=accept)
    session.loaded = state
    if session.rollouts is not None:
        session.rollouts.restore(state)


def _check_begin(session: TrainingSession) -> None:
    """Raise Damaged if the run had a checkpoint but none could be loaded."""
    mirror = session.run.checkpoint.mirror
    folder = session.folder
    lost = take_inventory(folder).lost(lambda: describe_copies(mirror, folder))
    if lost is not None:
        raise lost
