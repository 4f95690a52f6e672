"""Defects of GPUs, reported by a fake NVML on one of two training hosts. A spare host waits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from meshwright.chaos.host_faults import REPLACED_SECONDS, TWO_HOSTS, training_host
from meshwright.chaos.hosts import host_name
from meshwright.chaos.process_faults import CONTINUES, middle
from meshwright.chaos.scenario import Scenario, Stage
from meshwright.durable.writes import write_durable

FOLDER = Path(__file__).parent / "nvml"
"""Folder that has the fake package `pynvml`."""
HEALTH_SECONDS = 10.0
"""Most seconds between a GPU's defect and the decision about its host."""


def fake_gpus(stage: Stage) -> dict[str, str]:
    """Return environment variables of a job with which the fake NVML shows one healthy GPU on each host."""
    for host in range(3):
        _describe(stage, host)
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "FAKE_NVML": str(stage.folder / "nvml-{host}.json")}


def _describe(stage: Stage, host: int, *xids: int) -> None:
    """Let a host have one healthy GPU, which reports `xids`."""
    file = stage.folder / f"nvml-{host_name(host)}.json"
    write_durable(file, json.dumps({"gpus": [{}], "events": [[0, xid] for xid in xids]}))


def report_xid(xid: int, printed: str, *, fails: bool) -> Callable[[Stage], None]:
    """Return a play in which a GPU of a training host reports an XID. The job must print that the host `printed`.

    `fails`: whether the attempt fails; otherwise the host is replaced between two steps.
    """

    def play(stage: Stage) -> None:
        job = stage.start(fake_gpus(stage))
        job.until_step(middle(stage))
        host = training_host(stage)
        if fails:
            stage.expect_incident("failure", host=host_name(host))
        stage.mark()
        _describe(stage, host, xid)
        job.wait()
        agent = f"{host_name(host)}/{job.processes[host].pid}"
        stage.expect(f"host {agent} {printed}" in job.output, f"no line says that the host {printed}")
        stage.expect(agent not in job.states[-1][1]["members"], "the defective host trains")
        stage.expect(fails or stage.first_incident() is None, "replacing the host is recorded as a failure")
        stage.expect(fails or not stage.repeated_steps(), "steps are trained twice")

    return play


HEALTH_FAULTS = (
    Scenario(
        name="lost-gpu",
        promise=f"When a GPU falls off the bus (XID 79) its host is excluded at once, a spare host replaces it, and {CONTINUES}.",
        play=report_xid(79, "is not healthy", fails=True),
        hosts=3,
        overrides=(*TWO_HOSTS, "supervision.health=true"),
        detect_within=HEALTH_SECONDS,
        recover_within=REPLACED_SECONDS,
    ),
    Scenario(
        name="drain-host",
        promise="When a GPU reports an uncorrected memory error (XID 48) the ranks save after the running step, a spare host replaces "
        f"its host, no step is trained twice, and {CONTINUES}.",
        play=report_xid(48, "is replaced after the running step", fails=False),
        hosts=3,
        overrides=(*TWO_HOSTS, "supervision.health=true"),
        detect_within=HEALTH_SECONDS,
        recover_within=REPLACED_SECONDS,
    ),
)
