"""Effective training time of a short run with many failures, scaled to rarer failures. `make test-faults`.

    python benchmarks/effective_time.py [--failures N] [--every STEPS] [--seed S] [--rate 400mbit] [--least SHARE]
        [--out FILE] [--runs DIR]

Four CPU ranks train on two emulated hosts. At random steps a random rank is killed or stopped: 85% crashes and 15% hangs.
Each failure costs detection, restart and repeated steps, as observed from outside. The mean over the failures of a class
gives the effective training time at another failure rate; the formula is printed with its numbers. Exit code 0 if the
losses equal those of an undisturbed run and both scaled figures reach the least ones.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from faults import make_run, write_record
from meshwright.chaos.hosts import Links
from meshwright.chaos.job import ChaosJob
from meshwright.chaos.scenario import Stage, Template
from meshwright.chaos.suite import undo_on_sigterm
from meshwright.observe.metrics import read_metrics
from meshwright.policies.effective_time import MeasuredFailure, scale_measured

HOSTS, RANKS_PER_HOST = 2, 2
SHARES = {"crash": 0.85, "hang": 0.15}
SIGNALS = {"crash": signal.SIGKILL, "hang": signal.SIGSTOP}
REQUIRED = {1800.0: 0.96, 10800.0: 0.99}
"""Least effective training time by mean seconds between failures."""
LONGEST_SECONDS = 900.0


def draw_failures(count: int, random_numbers: random.Random) -> list[str]:
    """The class of each failure, in random order."""
    hangs = round(count * SHARES["hang"])
    classes = ["hang"] * hangs + ["crash"] * (count - hangs)
    random_numbers.shuffle(classes)
    return classes


def make_stage(file: Path, folder: Path, steps: int, every: int, links: Links) -> Stage:
    """A run on two hosts that writes checkpoints beside training."""
    words = (
        str(file),
        f"cluster.nodes={HOSTS}",
        f"cluster.gpus_per_node={RANKS_PER_HOST}",
        f"train.steps={steps}",
        f"checkpoint.every={every}",
        "checkpoint.keep=3",
        "checkpoint.mode=async",
    )
    return Stage(Template(words, file.stem, steps, HOSTS * RANKS_PER_HOST, every), folder, hosts=HOSTS, links=links)


def fail(stage: Stage, name: str, random_numbers: random.Random, step_seconds: float) -> tuple[MeasuredFailure, int]:
    """Signal a random rank, and wait until the run has passed its last step; returns the times and the step of its resume."""
    job, host = stage.job, random_numbers.randrange(HOSTS)
    ranks = job.ranks(host)
    stage.signal(ranks[random_numbers.choice(sorted(ranks))], SIGNALS[name])
    assert stage.injected is not None, "a signal marks the injection"
    injected, failed_at, before, attempt = stage.injected, job.last_step, len(job.steps), job.attempt
    job.until(lambda: _attempt_began(job, attempt) is not None, f"the attempt after {attempt}")
    began = _attempt_began(job, attempt)
    assert began is not None, "it has begun"

    def new_steps() -> list[tuple[float, int]]:
        return [(moment, step) for moment, step in job.steps[before:] if moment > began]

    job.until(lambda: any(step > failed_at for _, step in new_steps()), f"the step after {failed_at}")
    detected = stage.detected_seconds()
    assert detected is not None, "a new attempt follows a decision"
    first, resumed_at = new_steps()[0][0], new_steps()[0][1] - 1
    regained = next(moment for moment, step in new_steps() if step > failed_at)
    restarted = max(0.0, first - injected - detected - step_seconds)
    return MeasuredFailure(name, detected, restarted, regained - first), resumed_at


def _attempt_began(job: ChaosJob, attempt: int) -> float | None:
    """When an attempt after `attempt` began, None before."""
    begun = (moment for moment, state in job.states if state["status"] == "running" and state["attempt"] > attempt)
    return next(begun, None)


def run_with_failures(
    stage: Stage, classes: list[str], random_numbers: random.Random, step_seconds: float
) -> list[MeasuredFailure]:
    """Train to the end with failures, each at a random step of the second interval after the checkpoint resumed from."""
    every, resumed_at, failures = stage.template.every, 0, []
    job = stage.start()
    for number, name in enumerate(classes, 1):
        job.until_step(resumed_at + every + random_numbers.randint(1, every - 1))
        failure, resumed_at = fail(stage, name, random_numbers, step_seconds)
        failures.append(failure)
        print(
            f"failure {number} of {len(classes)}, {name}: detected after {failure.detected_seconds:.2f} s, restarted in "
            f"{failure.restarted_seconds:.2f} s, steps repeated in {failure.lost_seconds:.2f} s",
            flush=True,
        )
    code = job.wait(LONGEST_SECONDS)
    if code:
        raise SystemExit(f"the run ended with code {code}:\n{job.output[-2000:]}")
    return failures


def checkpoint_cost(run: Path) -> float:
    """Mean seconds that one checkpoint cost training, from the lines that report it."""
    texts = [line["text"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "event"]
    return statistics.mean(float(match[1]) for text in texts if (match := re.search(r"cost training ([\d.]+) s", text)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--failures", type=int, default=13)
    parser.add_argument("--every", type=int, default=200, help="steps between two checkpoints")
    parser.add_argument("--seed", type=int, default=30)
    parser.add_argument("--rate", help="limit of the links of the hosts, e.g. 400mbit")
    parser.add_argument("--least", type=float, default=REQUIRED[1800.0], help="share at one failure in 30 minutes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=Path)
    arguments = parser.parse_args()
    undo_on_sigterm()
    required, links = {**REQUIRED, 1800.0: arguments.least}, Links(arguments.rate)
    random_numbers = random.Random(arguments.seed)
    classes = draw_failures(arguments.failures, random_numbers)
    steps = (arguments.failures + 3) * arguments.every
    with tempfile.TemporaryDirectory() as folder:
        file, runs = make_run(Path(folder) / "tiny"), arguments.runs or Path(folder) / "runs"
        stages = {
            name: make_stage(file, runs / name, steps, arguments.every, links) for name in ("undisturbed", "disturbed")
        }
        for stage in stages.values():
            stage.folder.mkdir(parents=True)
        try:
            if code := stages["undisturbed"].start().wait(LONGEST_SECONDS):
                raise SystemExit(f"the undisturbed run ended with code {code}")
            lines = read_metrics(stages["undisturbed"].run / "metrics.jsonl")
            step_seconds = statistics.median(line["step_seconds"] for line in lines if line["kind"] == "step")
            failures = run_with_failures(stages["disturbed"], classes, random_numbers, step_seconds)
        finally:
            for stage in stages.values():
                stage.close()
        cost, same = (
            checkpoint_cost(stages["undisturbed"].run),
            stages["disturbed"].losses() == stages["undisturbed"].losses(),
        )
    interval = arguments.every * step_seconds
    scaled = {mttf: scale_measured(failures, SHARES, mttf, cost / interval) for mttf in required}
    hangs = classes.count("hang")
    print(
        f"{len(classes) - hangs} crashes and {hangs} hangs; losses {'equal' if same else 'DIFFER FROM'} the undisturbed run's"
    )
    print(f"a checkpoint every {interval:.1f} s costs {cost:.3f} s; terms: detected + restarted + repeated steps")
    for mttf, figure in scaled.items():
        print(f"one failure in {mttf / 60:g} minutes: {figure.formula}, at least {required[mttf]}")
    write_record(
        arguments.out,
        seed=arguments.seed,
        steps=steps,
        every=arguments.every,
        links=asdict(links),
        step_seconds=step_seconds,
        checkpoint_cost_seconds=cost,
        same_losses=same,
        failures=[asdict(failure) for failure in failures],
        scaled=[{"mttf_seconds": mttf, **asdict(figure)} for mttf, figure in scaled.items()],
    )
    sys.exit(0 if same and all(scaled[mttf].effective >= least for mttf, least in required.items()) else 1)


if __name__ == "__main__":
    main()
