"""The lease of a run's folder: a file that names the start (launch) of the run that owns the folder.

Every start writes `RUN/lease.json` with the previous epoch + 1. The file stays when the job ends, so that no epoch is used
twice. A process may be suspended (by SIGSTOP, or with its machine) while another start takes the lease. When it
continues, it reads the other start's lease and commits nothing.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from meshwright.durable.writes import write_durable
from meshwright.spec.errors import BadInput
from meshwright.spec.failures import missing_path_error
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.run import Lease

LEASE = "lease.json"
log = logging.getLogger("meshwright")


class LeaseLost(BadInput):
    """The lease of a run's folder is not this job's: another start took it, or the file is missing or damaged."""


def take_lease(folder: Path, newest_commit: Callable[[], tuple[str, int] | None] = lambda: None) -> Lease:
    """Write and return this process's lease of a run's folder. The caller holds the folder's lock.

    The run keeps its id, and the epoch grows by one. Without a readable lease, both follow from `newest_commit()`: the run
    id and epoch of the newest checkpoint, or None. A new run gets a random id and epoch 1.
    """
    previous = read_lease(folder)
    last = (previous.run_id, previous.epoch) if previous else newest_commit()
    run_id, epoch = last or (secrets.token_hex(8), 0)
    pid = os.getpid()
    lease = Lease(
        run_id=run_id,
        epoch=epoch + 1,
        host=socket.gethostname(),
        boot_id=_boot_id(),
        pid=pid,
        process_start=_process_start(pid) or 0,
    )
    _write(folder, lease)
    return lease


def read_lease(folder: Path) -> Lease | None:
    """Return the lease in a run's folder; None if it is missing or damaged."""
    try:
        lease = from_plain(Lease, json.loads((folder / LEASE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
        log.warning("%s is damaged: %s", folder / LEASE, error)
        return None
    has_texts = isinstance(lease.run_id, str) and isinstance(lease.host, str) and isinstance(lease.boot_id, str)
    return (
        lease
        if has_texts and all(type(value) is int for value in (lease.epoch, lease.pid, lease.process_start))
        else None
    )


def check_lease(folder: Path, lease: Lease) -> None:
    """Raise LeaseLost unless the folder's lease is `lease`. Raises OutOfResources if the folder no longer exists."""
    current = read_lease(folder)
    if current == lease:
        return
    if not folder.is_dir():
        raise missing_path_error(folder)
    if current is None:
        raise LeaseLost(f"{folder / LEASE} is missing or damaged; without it this job commits nothing")
    raise LeaseLost(
        f"{folder} was taken over by process {current.pid} on {current.host} (epoch {current.epoch}; this job has epoch {lease.epoch}); "
        "this job commits nothing more"
    )


def release_lease(folder: Path) -> None:
    """Mark this process's lease as ended.

    On a file system without locks, the next start checks whether the owner of the lease is alive.
    """
    lease = read_lease(folder)
    if lease is not None and lease.pid == os.getpid() and owner_is_alive(lease):
        _write(folder, replace(lease, process_start=0))


def owner_is_alive(lease: Lease) -> bool:
    """Return whether the process that took the lease runs on this host. False for another host or an earlier boot."""
    same_boot = (lease.host, lease.boot_id) == (socket.gethostname(), _boot_id())
    return same_boot and lease.process_start != 0 and _process_start(lease.pid) == lease.process_start


def _write(folder: Path, lease: Lease) -> None:
    write_durable(folder / LEASE, json.dumps(to_plain(lease)) + "\n")


def _boot_id() -> str:
    """Return the kernel's id of the host's current boot; empty if the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _process_start(pid: int) -> int | None:
    """Return the start time of a process in kernel ticks since boot; None without such a process, or without /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(status.rpartition(")")[2].split()[19])
