"""A step's figures: utilisation only for a known chip, and a number that is not finite ends the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.spec.cluster import CHIPS, ClusterSpec
from meshwright.spec.model import flops_per_token
from meshwright.spec.plan import Plan
from meshwright.training.step_record import StepFigureReader, _Pending
from meshwright.training.train_step import StepFigures
from tests.training.tiny import make_tiny, prepared

CPU = torch.device("cpu")
ROUTING, Z_LOSS = (1.5, 2.5, 30.0), 60.0
"""Balance loss, load of the busiest expert, router z-loss; z-loss of the head."""


@pytest.fixture(scope="module")
def assignment(tmp_path_factory: pytest.TempPathFactory):
    tiny = make_tiny(tmp_path_factory.getbasetemp() / "tiny")
    return prepared(tiny, tmp_path_factory.mktemp("runs")).assignment


def figures(
    loss: float = 2.0, norm: float = 1.0, valid: float = 100, flag: float = 0, tokens: float = 7, skips: float = 0
) -> StepFigures:
    return StepFigures(torch.tensor([loss, norm, valid, tokens, flag, skips, *ROUTING, Z_LOSS], dtype=torch.float64))


def reader(assignment, gpu: str, compute: str = "bf16") -> StepFigureReader:
    run = replace(assignment.run, cluster=ClusterSpec(gpu=gpu, gpus_per_node=2))
    plan: Plan = replace(assignment.plan, precision=replace(assignment.plan.precision, compute=compute))
    return StepFigureReader(run, plan, CPU, tokens_before=1000)


@pytest.mark.parametrize("gpu", sorted(CHIPS))
def test_utilisation_is_model_flops_over_the_chips_peak(assignment, gpu: str) -> None:
    compute = next(name for name in ("bf16", "fp32") if name in CHIPS[gpu].peak_flops)
    (record,) = reader(assignment, gpu, compute).push(1, figures(), {})
    tokens_per_rank = record["tokens_per_second"] / 2
    assert record["tokens_per_second_per_gpu"] == pytest.approx(tokens_per_rank)
    for key, causal in (("mfu", True), ("mfu_full", False)):
        flops = flops_per_token(assignment.run.model, 16, causal=causal)
        assert record[key] == pytest.approx(tokens_per_rank * flops / CHIPS[gpu].peak_flops[compute])


@pytest.mark.parametrize(("gpu", "compute"), [("cpu", "fp32"), ("NVIDIA RTX 4090", "bf16"), ("V100", "bf16")])
def test_an_unknown_chip_or_format_has_no_utilisation(assignment, gpu: str, compute: str) -> None:
    (record,) = reader(assignment, gpu, compute).push(1, figures(), {})
    assert record["mfu"] is None and record["mfu_full"] is None and record["tokens_per_second"] > 0


def test_loads_of_experts_are_whole_numbers(assignment) -> None:
    loads = torch.tensor([[3.0, 5.0], [8.0, 0.0]], dtype=torch.float64)
    (record,) = reader(assignment, "cpu").push(2, replace(figures(), loads=loads), {})
    assert record["expert_loads"] == [[3, 5], [8, 0]]
    (record,) = reader(assignment, "cpu").push(2, replace(figures(), loads=torch.ones(60, 256)), {})
    assert "expert_loads" not in record, "every tenth step only"


def test_tokens_add_up_from_where_the_run_was(assignment) -> None:
    reading = reader(assignment, "cpu")
    records = [reading.push(step, figures(valid=100 + step, flag=step == 2), {"lr": 0.1})[0] for step in (1, 2)]
    assert [record["tokens"] for record in records] == [1101, 1203]
    assert [(record["step"], record["lr"], record["token_sum"]) for record in records] == [(1, 0.1, 7), (2, 0.1, 7)]
    assert (reading.flags.step, reading.flags.total) == (2, 1)


@pytest.mark.parametrize(
    ("weights", "keys"), [({}, set()), ({"z_loss": 1e-4}, {"z_loss"}), ({"router_z_loss": 1e-3}, {"router_z_loss"})]
)
def test_a_z_loss_is_reported_if_it_has_a_weight(assignment, weights: dict[str, float], keys: set[str]) -> None:
    weighted = replace(assignment, run=replace(assignment.run, train=replace(assignment.run.train, **weights)))
    (record,) = reader(weighted, "cpu").push(1, figures(), {})
    assert record.keys() & {"z_loss", "router_z_loss"} == keys
    assert record.get("z_loss", Z_LOSS) == Z_LOSS and record.get("router_z_loss", ROUTING[2]) == ROUTING[2]
    assert (record["loss"], record["balance_loss"], record["expert_load"]) == (2.0, *ROUTING[:2])


def test_a_pause_waits_for_launched_kernels(assignment) -> None:
    """On a device a step is read after the next one was launched; to pause before that would give it a negative time."""
    reading = reader(assignment, "cpu")
    reading._pending.append(_Pending(3, {}, figures().values, reading._clock.stamp()))
    with pytest.raises(RuntimeError, match="step 3"):
        reading.pause()
    (record,) = reading.drain()
    assert record["step_seconds"] > 0
    reading.pause()
