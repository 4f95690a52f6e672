"""Numerical policies: decisions from a step's record, and what a checkpoint keeps of them."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path

import pytest
import torch

from meshwright.parallel.token_exchange import PeerTokenExchange, check_received_rows
from meshwright.parallel.token_exchange_peers import PeerExchange
from meshwright.policies.numerics import MOST_ROLLBACKS, MOST_SKIPS
from meshwright.spec.errors import BadInput, NumericalFailure
from meshwright.spec.job import TrainSpec
from meshwright.training.numerics import NumericalPolicy, Rollback
from meshwright.training.train_step import skipping_replicas

RUN = Path("runs/nan")


def policy(**settings: str) -> NumericalPolicy:
    return NumericalPolicy(TrainSpec(steps=100, global_batch=8, **settings), RUN)  # pyrefly: ignore


def record(step: int, loss: float = 2.0, norm: float = 0.5, limit: float = math.inf) -> dict[str, float]:
    """The record of a step whose update is skipped on the device if its norm is above `limit`."""
    skips = int(skipping_replicas(torch.tensor([norm]), limit))
    return {"step": step, "loss": loss, "grad_norm": norm, "skipping_replicas": skips}


def test_the_device_skips_norms_above_the_limit_and_those_that_are_not_finite() -> None:
    skipped = [int(skipping_replicas(torch.tensor([norm]), 5.0)) for norm in (5.0, 5.1, math.inf, math.nan)]
    assert skipped == [0, 1, 1, 1] and skipping_replicas(torch.tensor([math.nan, 2.0, math.nan]), math.inf) == 2


@pytest.mark.parametrize(("action", "kept"), [("skip", False), ("rollback", False), ("rollback_skip", True)])
def test_a_run_goes_back_if_only_some_replicas_skipped_an_update(action: str, kept: bool) -> None:
    train = TrainSpec(steps=100, global_batch=8, on_nonfinite=action)  # pyrefly: ignore
    numerics = NumericalPolicy(train, RUN, replicas=4)
    with pytest.raises(Rollback, match="1 of 4 replicas of the model skipped the update") as request:
        numerics.check({"step": 7, "loss": 2.0, "grad_norm": math.nan, "skipping_replicas": 1})
    assert request.value.skips_samples == kept
    with pytest.raises(NumericalFailure, match="the update differs between replicas"):
        NumericalPolicy(TrainSpec(steps=100, global_batch=8), RUN, replicas=4).check(
            {"step": 7, "loss": 2.0, "grad_norm": math.nan, "skipping_replicas": 1}
        )


def after_good_steps(numerics: NumericalPolicy, steps: int) -> NumericalPolicy:
    for step in range(1, steps + 1):
        assert numerics.check(record(step)) is None
    return numerics


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, math.nan), (2.0, math.inf), (-math.inf, 0.5)], ids=["nan", "norm", "loss"]
)
def test_a_value_that_is_not_finite_ends_the_run(loss: float, norm: float) -> None:
    applied = "applied" if norm == 0.5 else "not applied"
    with pytest.raises(
        NumericalFailure, match=rf"step 3: .* not finite .* update was {applied}.*data show runs/nan --step 3"
    ):
        policy().check(record(3, loss, norm))


def test_a_failure_has_figures_that_can_be_read_and_says_that_a_repetition_fails() -> None:
    with pytest.raises(NumericalFailure) as failure:
        policy().check(record(3, math.nan, 123.45678901234567))
    assert "(loss nan, gradient norm 123.457)" in str(failure.value)
    assert "A run that is started again reads the same samples, and this step fails again." in str(failure.value)


@pytest.mark.parametrize(
    ("newest", "advice"),
    [(0, "begin again (--fresh)"), (40, "from the checkpoint of step 40 (name=… model.init=checkpoint:runs/nan)")],
)
def test_the_advice_after_a_failure_names_a_checkpoint_only_if_there_is_one(newest: int, advice: str) -> None:
    numerics = NumericalPolicy(TrainSpec(steps=100, global_batch=8), RUN, newest_checkpoint=lambda: newest)
    with pytest.raises(NumericalFailure) as failure:
        numerics.check(record(43, math.nan, math.nan))
    assert advice in str(failure.value) and ("rollback_skip" in str(failure.value)) is (newest > 0)


def test_skipping_counts_no_update_and_ends_after_many_in_a_row() -> None:
    numerics = after_good_steps(policy(on_nonfinite="skip"), 4)
    for step in range(5, 4 + MOST_SKIPS):
        assert "the update was skipped" in (numerics.check(record(step, math.nan, math.nan)) or "")
    assert (numerics.updates(4), numerics.updates(6), numerics.updates(3 + MOST_SKIPS)) == (4, 4, 4)
    with pytest.raises(NumericalFailure, match="10 steps in a row"):
        numerics.check(record(4 + MOST_SKIPS, math.nan, math.nan))


def test_a_loss_alone_that_is_not_finite_cannot_be_skipped() -> None:
    with pytest.raises(NumericalFailure, match="the update was applied"):
        policy(on_nonfinite="skip").check(record(3, math.nan, 0.5))


@pytest.mark.parametrize("action", ["rollback", "rollback_skip"])
def test_rollbacks_are_requested_and_bounded(action: str) -> None:
    numerics = policy(on_nonfinite=action)
    with pytest.raises(Rollback) as request:
        numerics.check(record(7, math.nan, math.nan))
    assert (request.value.step, request.value.skips_samples) == (7, action == "rollback_skip")
    for _ in range(MOST_ROLLBACKS):
        numerics.count_rollback(4, "x")
    numerics.count_rollback(6, "x")
    with pytest.raises(NumericalFailure, match="3 rollbacks to step 4 did not help"):
        numerics.count_rollback(4, "x")


def test_a_spike_is_skipped_by_its_norm_and_stays_out_of_the_history() -> None:
    numerics = after_good_steps(policy(on_spike="skip"), 30)
    assert numerics.norm_limit(31) == 5.0 and numerics.norm_limit(10) == math.inf
    for step in range(31, 36):
        assert "spike" in (numerics.check(record(step, 2.0, 5.5, numerics.norm_limit(step))) or "")
    assert numerics.check(record(36, 200.0, 0.5)) is None and numerics.skipped_steps == [31, 32, 33, 34, 35]
    assert numerics.norm_limit(60) == 5.0
    with pytest.raises(NumericalFailure, match="spike"):
        after_good_steps(policy(on_spike="stop"), 30).check(record(31, 200.0, 0.5))


def test_a_checkpoint_keeps_what_decisions_follow_from() -> None:
    numerics = after_good_steps(policy(on_spike="skip"), 30)
    numerics.check(record(31, 2.0, 100.0, numerics.norm_limit(31)))
    numerics.skip((312, 320))
    assert numerics.state(30).keys() == {"skip_samples", "history"}
    other = policy(on_spike="skip")
    other.restore(json.loads(json.dumps(numerics.state(31))))
    assert other.state(31) == numerics.state(31) and other.norm_limit(33) == numerics.norm_limit(33)
    assert other.skip_samples == ((312, 320),) and other.updates(31) == 30
    assert after_good_steps(policy(), 30).state(30) == {}, "nothing is kept where nothing is needed"


def test_rows_without_room_are_named_as_the_cause() -> None:
    peers = PeerExchange(0, 2, 1.25, False, open_window=lambda size: pytest.fail(f"a window of {size} bytes"))
    exchange = PeerTokenExchange("experts", peers)
    numerics = policy(on_nonfinite="skip")
    assert "skipped" in (numerics.check(record(3, math.nan, math.nan)) or "")
    peers._exceeded.fill_(1)
    with pytest.raises(BadInput, match=r"plan\.expert_receive_bound = 1\.25: .*at most to 2"):
        numerics.check(record(4, math.nan, math.nan))
    del exchange, peers
    gc.collect()
    check_received_rows()
