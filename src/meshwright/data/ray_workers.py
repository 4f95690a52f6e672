"""Does the units of a job on a Ray cluster.

Ray repeats a task whose worker process dies. Texts and tokens do not pass through Ray's object store: workers read and
write files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.data.chunks import read_record
from meshwright.data.jobs import FAILURES, JOB, EncodeJob, error_of, failure
from meshwright.spec.errors import BadInput, OutOfResources

AHEAD = 2
"""Units per core of the cluster that are submitted to Ray at a time."""
CALLS_OF_A_WORKER = 32
"""Units after which a worker process is replaced. The encoder remembers every word that it has seen, so its memory grows."""
RETRIES = 3
"""Times that Ray repeats a unit whose worker died."""

_jobs: dict[tuple[str, int], EncodeJob] = {}
"""The job that this worker process has loaded. The key has the job's folder and the modification time of its file."""


def check_ray(chats: bool) -> None:
    """Raise BadInput if Ray is not installed, or if the inputs are `chats`, which Ray does not prepare."""
    if chats:
        raise BadInput("--ray: is for text; chats and preferences are prepared on one host")
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise BadInput(f"--ray needs ray ({error}): pip install 'meshwright[ray]'") from None


def run_on_ray(folder: Path, units: Sequence[int], address: str) -> Iterator[int]:
    """Do `units` of the job in `folder` on the cluster at `address`, and yield the number of each once it is done, in any order.

    Raises the error that a unit raises, OutOfResources if the workers that do a unit die again and again, and BadInput
    if no cluster answers or if this host does not see the results that the workers write.
    """
    import ray

    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=address, logging_level="warning", log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise BadInput(f"--ray {address}: no Ray cluster answers there: {error}") from error
    try:
        yield from _run(ray, folder.resolve(), units, address)
    finally:
        if started:
            ray.shutdown()


def _run(ray: Any, folder: Path, units: Sequence[int], address: str) -> Iterator[int]:
    """Submit the units to the cluster, a limited number at a time, and yield the number of each that is done."""
    task = ray.remote(max_calls=CALLS_OF_A_WORKER, max_retries=RETRIES, num_cpus=1)(run_unit)
    most_running = AHEAD * max(int(ray.cluster_resources().get("CPU", 1)), 1)
    waiting = deque(units)
    running = dict[Any, int]()
    try:
        while waiting or running:
            while waiting and len(running) < most_running:
                unit = waiting.popleft()
                running[task.remote(str(folder), unit)] = unit
            (done, *_), _ = ray.wait(list(running))
            unit = running.pop(done)
            try:
                answer = ray.get(done)
            except ray.exceptions.WorkerCrashedError as error:
                raise OutOfResources(
                    f"--ray {address}: {RETRIES + 1} workers died while they did unit {unit}: {error}"
                ) from error
            if answer is not None:
                raise error_of(answer)
            if read_record(folder, unit) is None:
                raise BadInput(
                    f"{folder}: a worker of the cluster wrote unit {unit} here, and this host does not see it; choose an --out on a file "
                    "system that all hosts share"
                )
            yield unit
    finally:
        for unfinished in running:
            with suppress(Exception):  # The cluster may have ended.
                ray.cancel(unfinished, force=True)


def run_unit(folder: str, unit: int) -> dict[str, Any] | None:
    """Do a unit in a worker of the cluster. Returns None, or the error as `jobs.failure` describes it."""
    try:
        key = (folder, (Path(folder) / JOB).stat().st_mtime_ns)
        if key not in _jobs:
            _jobs.clear()
            _jobs[key] = EncodeJob.read(Path(folder))
        _jobs[key].run(unit)
    except FAILURES as error:
        return failure(error)
    return None
