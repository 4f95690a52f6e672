"""The optimizer sweep: its runs are valid run files, and its summary takes the best median."""

from __future__ import annotations

import pytest
from benchmarks.optimizers import CONFIGURATIONS, comparisons, jobs_of, overrides_of, summary

from meshwright.config.load import load_run


def test_every_job_is_a_run_with_the_same_held_out_sequences() -> None:
    jobs = jobs_of(CONFIGURATIONS, 3)
    assert len(jobs) == len({tuple(overrides_of(job, 120, 4, 128)) for job in jobs}) == 5 * 3 * len(CONFIGURATIONS)
    assert [job.factor for job in jobs] == sorted((job.factor for job in jobs), reverse=True)
    for job in jobs[:: len(jobs) // 6]:
        run = load_run(None, overrides_of(job, 120, 4, 128))
        assert (run.train.optimizer.name, run.train.learning_rate, run.seed) == (
            job.optimizer,
            job.learning_rate,
            job.seed,
        )
        assert run.data.validation_tokens == 128 * 128 and run.train.global_batch == 4 * job.factor


def test_the_best_rate_has_the_lowest_median_and_a_diverged_run_is_infinite() -> None:
    def result(name: str, rate: float, seed: int, loss: float | None) -> dict[str, object]:
        return {"configuration": name, "learning_rate": rate, "seed": seed, "loss": loss}

    results = [result("adamw 1x", 0.1, seed, loss) for seed, loss in enumerate((1.0, 5.0, 9.0))]
    results += [result("adamw 1x", 0.2, seed, loss) for seed, loss in enumerate((1.0, None, None))]
    results += [result("muon 1x", 0.1, seed, 4.0) for seed in range(3)]
    best = summary(results)
    assert best["adamw 1x"]["learning_rate"] == 0.1
    assert best["adamw 1x"]["loss"] == 5.0
    assert best["adamw 1x"]["medians"] == {"0.1": 5.0, "0.2": None}
    assert comparisons(best) == pytest.approx({"muon 1x / adamw 1x": 0.8})
