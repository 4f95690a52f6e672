"""One rank that measures its machine with the others: `meshwright profile` (room `profile` holds what is measured).

`python -m meshwright.train.profiling JOB ANSWER` is one rank of a local launch; under torchrun and its kin `meshwright profile` calls
`measured_by` itself.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from meshwright.observe.environment import environment
from meshwright.parallel.world import join
from meshwright.profile.measure import measure
from meshwright.profile.team import Team
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import Interrupted
from meshwright.spec.fields import from_plain
from meshwright.spec.place import Place
from meshwright.spec.profile import MachineProfile, to_json
from meshwright.train.stop import STOP_SIGNALS
from meshwright.train.worker import die_with_parent, end_process, guarded, log_to

TIMEOUT_SECONDS = 300
SAID = ("meshwright", "commit", "python", "torch", "cuda", "rocm", "cudnn", "nccl", "driver", "system")
"""What of the environment a profile keeps."""


@dataclass(frozen=True, kw_only=True)
class ProfileJob:
    """What every rank is told: the cluster it is part of, and how long to measure (none: the room's own default)."""

    cluster: ClusterSpec
    seconds: float | None = None


def measured_by(job: ProfileJob, place: Place) -> MachineProfile:
    """Be one rank of the job, from joining to leaving; one rank alone joins nothing."""
    if place.ranks == 1:
        device = torch.device("cpu") if job.cluster.is_cpu else torch.device("cuda", 0)
        return measure(Team(device), job.cluster, _versions(), job.seconds)
    world = join(place, job.cluster, timeout_seconds=TIMEOUT_SECONDS)
    versions = _versions() if world.leads else {}
    answer = measure(Team(world.device, world), job.cluster, versions, job.seconds)
    world.leave()
    return answer


def _versions() -> dict[str, str]:
    return {name: str(value) for name, value in environment().items() if name in SAID}


def main() -> None:
    """Entry of a locally launched rank; rank 0 writes the answer."""
    die_with_parent()
    question, destination = map(Path, sys.argv[1:])
    place = Place.from_environment()
    log_to(question.parent, place.rank)
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def work() -> None:
        profile = measured_by(from_plain(ProfileJob, json.loads(question.read_text(encoding="utf-8"))), place)
        if place.rank == 0:
            destination.write_text(to_json(profile), encoding="utf-8")

    end_process(guarded(work, question.parent, place.rank))


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise Interrupted("interrupted")


if __name__ == "__main__":
    main()
