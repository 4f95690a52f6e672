"""A Slurm cluster of emulated hosts from Debian's packages (slurmctld, slurmd, slurm-client, munge), without services."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.chaos.hosts import Hosts, address, host_name, namespace_obstacle

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
SECONDS = 30.0
"""Longest time in which the nodes of the cluster become idle."""
CONFIGURATION = """\
ClusterName=emulated
SlurmctldHost={controller}({controller_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
KillWait=10
ReturnToService=2
SlurmdTimeout=60
SchedulerParameters=batch_sched_delay=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def slurm_obstacle() -> str | None:
    """Why no Slurm can run here; None if it can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return namespace_obstacle() or (f"there is no program {missing[0]}" if missing else None)


class Slurm:
    """A controller on host 0 and a node on each host."""

    def __init__(self, hosts: Hosts, count: int, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "state").mkdir(parents=True)
        folder.chmod(0o755)  # munge wants no folder of its socket to be written by others
        nodes = [
            f"NodeName={host_name(host)} NodeAddr={address(host)} NodeHostname={host_name(host)} CPUs={os.cpu_count()} State=UNKNOWN"
            for host in range(count)
        ]
        text = CONFIGURATION.format(
            controller=host_name(0), controller_address=address(0), folder=folder, nodes="\n".join(nodes)
        )
        self._configuration = folder / "slurm.conf"
        self._configuration.write_text(text)
        key = folder / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(secrets.token_bytes(64))
        munge = [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "seed", "log")]
        try:
            self._start(
                ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *munge]
            )
            self._start([*hosts.prefix(0), "slurmctld", "-D"])
            for host in range(count):
                (folder / f"spool-{host_name(host)}").mkdir()
                self._start([*hosts.prefix(host), "slurmd", "-D", "-N", host_name(host)])
            self._wait_until_idle(count)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        arguments: Sequence[str],
        folder: Path | None = None,
        env: Mapping[str, str] | None = None,
        seconds: float = 60.0,
    ) -> str:
        """What a command of Slurm prints on host 0, within a time."""
        command = [*self._hosts.prefix(0), *(["env", "-C", str(folder)] if folder else []), *arguments]
        answer = subprocess.run(
            command, env=self._environment(env), capture_output=True, text=True, timeout=seconds, check=False
        )
        assert answer.returncode == 0, f"{arguments}: {answer.stderr}{answer.stdout}"
        return answer.stdout

    def close(self) -> None:
        """End all daemons, and the jobs that they run."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        return {**os.environ, "PATH": path, "SLURM_CONF": str(self._configuration), **(more or {})}

    def _start(self, command: Sequence[str]) -> None:
        with (self._folder / "daemons.log").open("ab") as log:
            started = subprocess.Popen(
                command,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(started)

    def _wait_until_idle(self, count: int) -> None:
        deadline = time.monotonic() + SECONDS
        states = ""
        while time.monotonic() < deadline:
            try:
                states = self.run(["sinfo", "--noheader", "--Node", "--format=%T"])
                if states.split() == ["idle"] * count:
                    return
            except AssertionError as error:
                states = str(error)
            time.sleep(0.3)
        logs = (self._folder / "daemons.log").read_text(errors="replace")[-2000:]
        raise OSError(f"the nodes are not idle after {SECONDS:g} s: {states}\n{logs}")
