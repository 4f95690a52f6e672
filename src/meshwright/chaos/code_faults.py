"""Disturbances from inside the processes: values of a step, a bit of a weight, the clock.

Nothing outside a process can change these at a chosen step. A file `sitecustomize.py`, which Python reads at its start,
is put before the module path of the job; the product has no code for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from meshwright.chaos.process_faults import CONTINUES, middle
from meshwright.chaos.scenario import Scenario, Stage

VARIABLE = "MESHWRIGHT_CHAOS_CODE"
"""Environment variable with the fault that the injected code causes: `nan:RANK:STEP`, `spike:…`, `bit:…`, or `clock:FILE`."""
JUMP_SECONDS = 86400
CODE = f'''
import importlib.abc, importlib.machinery, os, sys, time

fault, *arguments = os.environ["{VARIABLE}"].split(":")


def patch(module):
    import torch

    train_step, calls = module.train_step, [0]

    def disturbed_step(engine, *args, **kwargs):
        calls[0] += 1
        if os.environ.get("RANK") != arguments[0] or calls[0] != int(arguments[1]):
            return train_step(engine, *args, **kwargs)
        vectors = [weight for weight in engine.model.parameters() if weight.dim() == 1]
        shards = [getattr(weight, "_local_tensor", weight).detach() for weight in vectors]
        weights = [shard for shard in shards if shard.numel()][-1]
        before = weights.clone()
        if fault == "nan":
            weights[0] = float("nan")
        elif fault == "spike":
            weights.mul_(1e4)
        else:
            weights[:1].view(torch.int32).bitwise_xor_(1 << 27)
        figures = train_step(engine, *args, **kwargs)
        if fault != "bit":
            weights.copy_(before)
        return figures

    module.train_step = disturbed_step


class Loader(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "meshwright.training.train_step":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


if fault == "clock":
    seconds = time.time
    time.time = lambda: seconds() + (float(open(arguments[0]).read() or 0) if os.path.exists(arguments[0]) else 0.0)
else:
    sys.meta_path.insert(0, Loader())
'''


def with_code(stage: Stage, fault: str) -> dict[str, str]:
    """Environment variables of a job whose processes run the injected code."""
    folder = stage.folder / "code"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(CODE, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, VARIABLE: fault}


def disturb_values(fault: str, printed: str) -> Callable[[Stage], None]:
    """Play: disturb the values of a step on the last rank; a line with `printed` has to report it."""

    def play(stage: Stage) -> None:
        step = middle(stage)
        job = stage.start(with_code(stage, f"{fault}:{stage.template.ranks - 1}:{step}"))
        job.until_step(step - 1)
        stage.mark()
        job.wait()
        stage.expect(printed in job.output, f"no line says {printed!r}")

    return play


def jump_clock(stage: Stage) -> None:
    """Let the wall clock of all processes of the job jump a day ahead, and back."""
    file = Path(stage.folder / "clock")
    job = stage.start(with_code(stage, f"clock:{file}"))
    job.until_step(middle(stage))
    stage.mark()
    for seconds in (JUMP_SECONDS, -JUMP_SECONDS):
        file.write_text(str(seconds))
        job.until_step(job.last_step + stage.template.every)
    job.wait()


CODE_FAULTS = (
    Scenario(
        name="nan",
        promise=f"With on_nonfinite: rollback a step whose loss is not finite is reported, and {CONTINUES}.",
        play=disturb_values("nan", "not finite"),
        overrides=("train.on_nonfinite=rollback",),
        detected_by="not finite",
        restarts=False,
    ),
    Scenario(
        name="spike",
        promise=f"With on_spike: rollback a loss that is far too large for one step is reported, and {CONTINUES}.",
        play=disturb_values("spike", ": spike"),
        overrides=("train.on_spike=rollback",),
        detected_by=": spike",
        restarts=False,
    ),
    Scenario(
        name="bitflip-weights",
        promise=f"With check_state_every: 1 a flipped bit of a weight is reported with its rank and tensor, and {CONTINUES}.",
        play=disturb_values("bit", "silent corruption: on rank"),
        overrides=("supervision.check_state_every=1",),
        detected_by="silent corruption",
        restarts=False,
    ),
    Scenario(
        name="clock-jump",
        promise="When the wall clock jumps a day ahead and two days back, there is no restart, and the losses are the same.",
        play=jump_clock,
        restarts=False,
    ),
)
