"""A Ray cluster that does the units of a job. Ray restarts a task whose worker dies; text and tokens never enter its object store."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.data.chunks import read_record
from meshwright.data.jobs import FAILURES, JOB, EncodeJob, failure, raised
from meshwright.spec.errors import BadInput, OutOfResources

AHEAD = 2
"""Units for each core of the cluster that Ray has at once."""
CALLS_OF_A_WORKER = 32
"""Units after which a worker process ends, because the encoder keeps every word that it has seen."""
RETRIES = 3

_jobs: dict[tuple[str, int], EncodeJob] = {}
"""The job that this worker process has loaded, by its folder and the time of its file."""


def check_ray(chats: bool) -> None:
    """Raise BadInput if Ray is not installed, or cannot do this work."""
    if chats:
        raise BadInput("--ray: is for text; chats and preferences are prepared on one host")
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise BadInput(f"--ray needs ray ({error}): pip install 'meshwright[ray]'") from None


def run_on_ray(folder: Path, units: Sequence[int], address: str) -> Iterator[int]:
    """Do `units` of the job in `folder` on the cluster at `address`; the number of each once it is done, in any order.

    Raises what a unit raises; OutOfResources if its workers die again and again; BadInput if there is no cluster, or it does not see the
    folder.
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
    task = ray.remote(max_calls=CALLS_OF_A_WORKER, max_retries=RETRIES, num_cpus=1)(run_unit)
    most = AHEAD * max(int(ray.cluster_resources().get("CPU", 1)), 1)
    waiting = deque(units)
    running = dict[Any, int]()
    try:
        while waiting or running:
            while waiting and len(running) < most:
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
                raise raised(answer)
            if read_record(folder, unit) is None:
                raise BadInput(
                    f"{folder}: a worker of the cluster wrote unit {unit} here, and this host does not see it; choose an --out on a file "
                    "system that all hosts share"
                )
            yield unit
    finally:
        for left in running:
            with suppress(Exception):  # the cluster may be gone
                ray.cancel(left, force=True)


def run_unit(folder: str, unit: int) -> dict[str, Any] | None:
    """Do a unit in a worker of the cluster: None, or what it raised, as `jobs.failure` describes it."""
    try:
        key = (folder, (Path(folder) / JOB).stat().st_mtime_ns)
        if key not in _jobs:
            _jobs.clear()
            _jobs[key] = EncodeJob.read(Path(folder))
        _jobs[key].run(unit)
    except FAILURES as error:
        return failure(error)
    return None
