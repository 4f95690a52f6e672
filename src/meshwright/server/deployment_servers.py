"""Starts the servers of a deployment on this host, one process for each instance, and a router, and stops them."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshwright.config.deployment_file import deployment_yaml
from meshwright.durable.writes import write_durable
from meshwright.events.parent import COMMAND_LINE, PARENT
from meshwright.spec.deployment import Deployment, Role
from meshwright.spec.errors import CommunicationFailure, MeshwrightError
from meshwright.spec.host_limits import usable_cores

START_SECONDS = 600.0
"""Longest time that a server may take to load its model and warm up."""
END_SECONDS = 30.0
"""Longest time that a server may take to end."""
ROUTER_ARGUMENTS = ("--port", "0", "--silent-seconds", "600", "--requests", "65536")
"""Arguments of the router: in a load test it waits for slow servers, and refuses no request."""
LAST_LINES = 20
"""Lines of a failed server's output in the error."""


@dataclass(frozen=True)
class RunningInstance:
    """A server that has started and takes requests."""

    role: Role
    number: int
    """Number within its role, from 0."""
    url: str

    @property
    def name(self) -> str:
        """The role and the number."""
        return f"{self.role} {self.number}"


@dataclass(frozen=True)
class RunningDeployment:
    """All servers, and the address that clients use."""

    url: str
    """URL of the router."""
    instances: Sequence[RunningInstance]
    check: Callable[[], None] = lambda: None
    """Raises CommunicationFailure, with the end of its output, if a server or the router has ended."""


@contextmanager
def deployment_servers(
    folder: Path, deployment: Deployment, *, gpu: bool, file: Path | None = None
) -> Iterator[RunningDeployment]:
    """Start all servers of the model in `folder` and a router, wait until they take requests, and stop them at the end.

    Each server gets the next devices of this host if `gpu`. `file` has the deployment, if it was read from one.

    Raises MeshwrightError with the output of a process that does not start.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-") as temporary:
        plan = file or Path(temporary) / "deployment.yaml"
        if file is None:
            write_durable(plan, deployment_yaml(deployment))
        servers: list[_Server] = []
        processes: list[_Process] = []

        def check() -> None:
            for process in processes:
                process.check()

        try:
            for role in ("prefill", "decode", "both"):
                started = sum(server.devices for server in servers)
                arguments = [str(folder), "--plan", str(plan), "--port", "0"]
                for server in _start(arguments, deployment, role, Path(temporary), gpu, started):
                    servers.append(server)
                    processes.append(server)
            deadline = time.monotonic() + START_SECONDS
            instances = [RunningInstance(s.role, s.number, s.address(deadline)) for s in servers]
            router = _Process(
                "router", ["route", *(instance.url for instance in instances), *ROUTER_ARGUMENTS], os.environ
            )
            processes.append(router)
            yield RunningDeployment(router.address(deadline), instances, check)
        finally:
            for process in reversed(processes):
                process.end()
            for process in processes:
                process.close()


def _arguments(role: Role, deployment: Deployment, folder: Path) -> list[list[str]]:
    """The arguments of the servers of a role: prefill engines listen at sockets in `folder`, which the decode engines know."""
    count = sum(instance.count for instance in deployment.instances if instance.role == role)
    prefills = sum(instance.count for instance in deployment.instances if instance.role == "prefill")
    addresses = [f"unix:{folder}/prefill-{number}" for number in range(prefills)]
    if role == "prefill":
        return [["--role", role, "--transfer-address", address] for address in addresses]
    if role == "decode":
        return [["--role", role, "--prefill-engines", ",".join(addresses)]] * count
    return [["--role", role]] * count


def _start(
    arguments: Sequence[str], deployment: Deployment, role: Role, sockets: Path, gpu: bool, first_device: int
) -> Iterator[_Server]:
    """The servers of a role; each has the next devices of this host, or its share of the processor.

    `arguments` are the arguments of all; `sockets` is the folder for those of prefill engines.
    """
    sizes = (instance.tensor * instance.expert for instance in deployment.instances if instance.role == role)
    devices = next(sizes, 1)
    for number, own_arguments in enumerate(_arguments(role, deployment, sockets)):
        environment = dict(os.environ)
        if gpu:
            visible = range(first_device + number * devices, first_device + (number + 1) * devices)
            own = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = own.split(",") if own else [str(index) for index in range(visible.stop)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[visible.start : visible.stop])
        else:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // deployment.devices)))
        yield _Server(role, number, devices, [*arguments, *own_arguments], environment)


class _Process:
    """A process that prints its address; a thread reads its output."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMAND_LINE, *arguments],
            env={**environment, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        self._lines: list[str] = []
        self._addresses: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def address(self, deadline: float) -> str:
        """Return the server's URL once it takes requests. Raises MeshwrightError if it ends before or takes too long."""
        try:
            address = self._addresses.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            address = None
        if address is None:
            ending = "\n".join(self._lines[-LAST_LINES:])
            error = MeshwrightError(f"the {self._name} did not start:\n{ending}")
            error.exit_code = self._process.poll() or error.exit_code
            raise error
        return address

    def check(self) -> None:
        """Raise CommunicationFailure if it has ended."""
        if (code := self._process.poll()) is not None:
            ending = "\n".join(["", *self._lines[-LAST_LINES:]])
            raise CommunicationFailure(
                f"the {self._name} ended during the test, with code {code}{ending and ':'}{ending}"
            )

    def end(self) -> None:
        """Send SIGTERM to the process."""
        self._process.terminate()

    def close(self) -> None:
        """Wait for the end of the process after `end`; kill it after `END_SECONDS`."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                self._lines.append(line.rstrip("\n"))
                if line.startswith(("serving ", "routing to ")) and " at " in line:
                    self._addresses.put(line.rpartition(" at ")[2].strip())
        self._addresses.put(None)


class _Server(_Process):
    """The process of one instance."""

    def __init__(
        self, role: Role, number: int, devices: int, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        super().__init__(f"server of role {role}", ["serve", *arguments, "--no-log-requests"], environment)
        self.role = role
        self.number = number
        self.devices = devices
