"""The program that runs a job on a Ray cluster (`ray_agents`)."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.launch.scheduler_job import SchedulerJob, comment

GPU = "GPU"
"""Ray's name of GPUs."""
CPU = "CPU"
"""Ray's name of processor cores."""


def ray_script(job: SchedulerJob) -> str:
    """The program in Python. It is started on one node, in a folder that all nodes share."""
    return "\n".join([*_lines(job), ""])


def _lines(job: SchedulerJob) -> Iterator[str]:
    devices = job.run.cluster.gpus_per_node
    resources = {CPU: devices} if job.gpu_vendor is None else {CPU: devices, GPU: devices}
    yield comment(job.summary)
    yield "# Save it beside the run file, in a folder that all nodes of the Ray cluster share. On one of them: python FILE"
    yield "# Or from elsewhere: ray job submit -- python FOLDER/FILE"
    yield "import sys"
    yield "from pathlib import Path"
    yield ""
    yield "from meshwright.launch.ray_agents import RayJob, run_on_ray"
    yield ""
    yield "job = RayJob("
    yield f"    arguments={job.agent_arguments(job.arguments)!r},"
    yield f"    hosts={job.hosts},"
    yield f"    resources={resources!r},"
    yield f"    restarts={job.run.supervision.restarts},"
    yield f"    stop_seconds={job.stop_seconds},"
    yield ")"
    yield 'if __name__ == "__main__":'
    yield "    sys.exit(run_on_ray(job, Path(__file__).resolve().parent))"
