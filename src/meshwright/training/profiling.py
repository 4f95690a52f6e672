"""A rank of `meshwright profile`; the package `profile` has the measurements.

`python -m meshwright.training.profiling JOB ANSWER` is one rank of a local launch: JOB is a file with a `ProfileJob` as JSON,
ANSWER the file that rank 0 writes the profile to. Under torchrun and similar launchers `meshwright profile` calls
`run_profile_job` itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.config.load import load_plan, load_resolved
from meshwright.config.profile_file import to_json
from meshwright.observe.environment import environment
from meshwright.parallel.world import join
from meshwright.profile.measure import measure
from meshwright.profile.team import Team
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain
from meshwright.spec.profile import MachineProfile
from meshwright.spec.rank_environment import RankEnvironment
from meshwright.training.worker import answer_as_rank
from meshwright.workload.device_work import Work, step_work

TIMEOUT_SECONDS = 300
ENVIRONMENT_KEYS = ("meshwright", "commit", "python", "torch", "cuda", "rocm", "cudnn", "nccl", "driver", "system")
"""Fields of the environment that a profile stores."""


@dataclass(frozen=True, kw_only=True)
class ProfileJob:
    """Input of every rank. `seconds` is the time for the measurement; None: the default of `profile`."""

    cluster: ClusterSpec
    seconds: float | None = None
    run: str | None = None
    """Folder of a run whose shapes are measured; None: a selection of shapes for all models."""


def run_profile_job(job: ProfileJob, environment: RankEnvironment) -> MachineProfile:
    """Run one rank of the job, from joining the other ranks to leaving them. A single rank joins no group.

    A `Team` is the rank's device together with its world, the group of all ranks. The world is None for a single rank.
    """
    if environment.ranks == 1:
        device = torch.device("cpu") if job.cluster.is_cpu else torch.device("cuda", 0)
        return measure(Team(device), job.cluster, _versions(), job.seconds, _work(job))
    world = join(environment, job.cluster, timeout_seconds=TIMEOUT_SECONDS)
    versions = _versions() if world.leads else {}
    answer = measure(Team(world.device, world), job.cluster, versions, job.seconds, _work(job))
    world.leave()
    return answer


def _work(job: ProfileJob) -> Work | None:
    if job.run is None:
        return None
    folder = Path(job.run)
    run = load_resolved(folder / "config.yaml")
    plan = load_plan(folder / "plan.yaml", run.cluster)
    return step_work(run.model, run.train, plan)


def _versions() -> dict[str, str]:
    return {name: str(value) for name, value in environment().items() if name in ENVIRONMENT_KEYS}


def main() -> None:
    """Run a locally launched rank; rank 0 writes the answer."""

    def answer(job: str, environment: RankEnvironment) -> str:
        return to_json(run_profile_job(from_plain(ProfileJob, json.loads(job)), environment))

    answer_as_rank(answer)


if __name__ == "__main__":
    main()
