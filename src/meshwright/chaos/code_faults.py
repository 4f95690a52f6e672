"""Faults inside processes: wrong values in a step, a flipped bit of a weight, wrong matmuls in the self-test, a wrong
clock.

Nothing outside of a process could cause these at a chosen step. Therefore the job's module path begins with a folder
that has a file `sitecustomize.py`, which Python runs when it starts. The product itself has no code for these faults.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from meshwright.chaos.host_faults import REPLACED_SECONDS, training_host
from meshwright.chaos.hosts import host_name
from meshwright.chaos.process_faults import CONTINUES, middle
from meshwright.chaos.scenario import Scenario, Stage
from meshwright.spec.rank_environment import ATTEMPT_VARIABLE, HOST_VARIABLE

VARIABLE = "MESHWRIGHT_CHAOS_CODE"
"""Environment variable that tells the injected code which faults to cause, separated by semicolons.

`FAULT:RANK:STEP` or `FAULT:RANK:STEP:ATTEMPTS` disturbs a rank in one step, once in each of the first ATTEMPTS attempts
(by default only in the first attempt):

- `nan`, `spike` and `bit` change a weight: to NaN, to a huge value, by one bit
- `gradient` sets a reduced gradient to NaN
- `crash` kills the rank

Two other forms are `clock:FILE`, which changes the wall clock by the seconds in the file, and `matmul:FILE`, which
makes the matmuls of the self-test wrong on the host that the file names.
"""
JUMP_SECONDS = 86400
"""Seconds by which the wall clock is wrong: first one day ahead, then one day behind."""
CODE = f'''
import importlib.abc, importlib.machinery, os, signal, sys, time

faults = [text.split(":") for text in os.environ["{VARIABLE}"].split(";")]


def due(step):
    rank, attempt = os.environ.get("RANK"), int(os.environ.get("{ATTEMPT_VARIABLE}", 1))
    for fault, *values in faults:
        if values[:2] == [rank, str(step)] and attempt <= int((*values, 1)[2]):
            faults.remove([fault, *values])
            return fault
    return None


def patch_self_test(module):
    import torch

    file = faults[0][1]

    def multiply(a, b):
        matmul = torch.mm(a, b)
        if os.path.exists(file) and open(file).read() == os.environ.get("{HOST_VARIABLE}", os.uname().nodename):
            matmul[17, 5] += 1
        return matmul

    module.wrong_matmul.__defaults__ = (multiply,)


def patch_step(module):
    import torch

    train_step, gradient_norm = module.train_step, module.gradient_norm

    def disturbed_norm(gradients, *args):
        gradients[-1].view(-1)[0] = float("nan")
        return gradient_norm(gradients, *args)

    def disturbed_step(engine, *args, **kwargs):
        fault = due(engine.executor.on_action.__self__.read().step)
        if fault is None:
            return train_step(engine, *args, **kwargs)
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "gradient":
            module.gradient_norm = disturbed_norm
            figures = train_step(engine, *args, **kwargs)
            module.gradient_norm = gradient_norm
            return figures
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
        if name != target_module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


if faults[0][0] == "clock":
    seconds, file = time.time, faults[0][1]
    time.time = lambda: seconds() + (float(open(file).read() or 0) if os.path.exists(file) else 0.0)
else:
    target_module, patch = (
        ("meshwright.training.self_test", patch_self_test)
        if faults[0][0] == "matmul"
        else ("meshwright.training.train_step", patch_step)
    )
    sys.meta_path.insert(0, Loader())
'''


def with_code(folder: Path, faults: str) -> dict[str, str]:
    """Write the injected code below `folder`. Return environment variables with which a job's processes run it."""
    folder = folder / "code"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(CODE, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, VARIABLE: faults}


def disturb_values(fault: str, printed: str) -> Callable[[Stage], None]:
    """Return a play that disturbs the values of a step on the last rank. The job must print a line with `printed`."""

    def play(stage: Stage) -> None:
        step = middle(stage)
        if fault == "bit":
            stage.expect_incident("corruption", stage.template.ranks - 1)
        job = stage.start(with_code(stage.folder, f"{fault}:{stage.template.ranks - 1}:{step}"))
        job.until_step(step - 1)
        stage.mark()
        job.wait()
        stage.expect(printed in job.output, f"no line says {printed!r}")

    return play


def make_host_wrong(stage: Stage) -> None:
    """Make the matmuls of a training host wrong, and end its rank with SIGBUS, as a defective processor would."""
    file = stage.folder / "wrong-host"
    job = stage.start(with_code(stage.folder, f"matmul:{file}"))
    job.until_step(middle(stage))
    host = training_host(stage)
    file.write_text(host_name(host))
    stage.expect_incident("killed", host=host_name(host))
    stage.signal(next(iter(job.ranks(host).values())), signal.SIGBUS)
    job.wait()
    stage.expect(
        f"{host_name(host)}/{job.processes[host].pid} failed the self-test" in job.output, "no host is excluded"
    )
    members = job.states[-1][1]["members"]
    stage.expect(not any(name.startswith(host_name(host)) for name in members), "the excluded host trains")


def jump_clock(stage: Stage) -> None:
    """Set the wall clock of all processes of the job a day ahead of the real time, then a day behind it."""
    file = Path(stage.folder / "clock")
    job = stage.start(with_code(stage.folder, f"clock:{file}"))
    job.until_step(middle(stage))
    stage.mark()
    for seconds in (JUMP_SECONDS, -JUMP_SECONDS):
        file.write_text(str(seconds), encoding="ascii")
        job.until_step(job.last_step + stage.template.every)
    job.wait()


CODE_FAULTS = (
    Scenario(
        name="bad-host",
        promise=f"A host whose matmuls are wrong after a failure is excluded, a spare host replaces it, and {CONTINUES}.",
        play=make_host_wrong,
        hosts=3,
        overrides=("cluster.nodes=2",),
        detect_within=1.0,
        recover_within=REPLACED_SECONDS,
    ),
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
