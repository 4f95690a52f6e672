"""Load of the coordinator: many agents with simulated ranks report over real connections, and one of them goes silent.

`python benchmarks/coordinator_load.py --agents 500 --ranks 8` prints one JSON object, and writes it with `--out FILE`:
the coordinator's processor time per second, and how long it takes to notice a silent agent and a stopped rank.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.connections.proof import Challenge
from meshwright.durable.writes import write_durable
from meshwright.events.messages import ProgressMessage
from meshwright.launch.control import DIGEST_HEADER, NONCE_HEADER, PROOF_HEADER, PROOF_PATH, ControlServer, listen
from meshwright.launch.coordinator import SILENT_SECONDS, Coordinator
from meshwright.launch.hosts import checked_report
from meshwright.launch.local import POLL_SECONDS
from meshwright.launch.outcome import RankState
from meshwright.launch.reports import Report
from meshwright.policies.restart import RestartPolicy
from meshwright.policies.supervision import Rules
from meshwright.spec.fields import to_plain

TOKEN, HEARTBEAT = "a token of this benchmark", 3.0
"""Token of the agents; seconds between two reports of an agent."""


async def answer_of(reader: asyncio.StreamReader) -> Any:
    """The JSON value of the next answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
    return json.loads(await reader.readexactly(length))


async def agent(address: tuple[str, int], number: int, ranks: int, seconds: float, silent_after: float | None) -> None:
    """One agent: waits, begins the attempt, and reports its ranks' progress every three seconds."""
    reader, writer = await asyncio.open_connection(*address)
    challenge = Challenge(TOKEN)
    writer.write(f"GET {PROOF_PATH} HTTP/1.1\r\n{NONCE_HEADER}: {challenge.nonce}\r\n\r\n".encode())
    session = challenge.session(**await answer_of(reader))
    report, step, began = Report(f"host{number:04d}/1", port=1), 0, time.monotonic()
    await asyncio.sleep(HEARTBEAT * number % HEARTBEAT)
    while (elapsed := time.monotonic() - began) < seconds and (silent_after is None or elapsed < silent_after):
        body = json.dumps(to_plain(report)).encode()
        digest = hashlib.sha256(body).hexdigest()
        proof = session.sign(b"POST", b"/report", digest.encode())
        head = f"POST /report HTTP/1.1\r\n{DIGEST_HEADER}: {digest}\r\n{PROOF_HEADER}: {proof}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        directive = await answer_of(reader)
        if directive["order"] == "run":
            step += 1
            states = tuple(
                RankState(
                    directive["first_rank"] + local, None, None, step, ProgressMessage("train", step, 5), 40 * step
                )
                for local in range(ranks)
            )
            report = replace(report, port=0, attempt=directive["attempt"], ended=False, ranks=states)
        await asyncio.sleep(directive["heartbeat"])
    writer.close()


def agents(address: tuple[str, int], count: int, ranks: int, seconds: float, silent_after: float) -> None:
    """All agents; the last one goes silent."""

    async def play() -> None:
        await asyncio.gather(
            *(
                agent(address, number, ranks, seconds, silent_after if number == count - 1 else None)
                for number in range(count)
            )
        )

    asyncio.run(play())


def measure(count: int, ranks: int, seconds: float) -> dict[str, Any]:
    """Figures of a coordinator in this process, with its agents in another."""
    silent_after, warm_up = seconds - SILENT_SECONDS - 4, 8.0
    with tempfile.TemporaryDirectory() as folder:
        assignment = Path(folder) / "assignment.json"
        rules = Rules(count, 8, RestartPolicy(3))
        coordinator = Coordinator(Path(folder), rules, ranks, lambda state: assignment)
        listener = listen(("127.0.0.1", 0))
        handlers = {"POST /report": lambda value: to_plain(coordinator.receive(checked_report(value)))}
        server = ControlServer(listener, TOKEN, handlers)
        address = listener.getsockname()
        process = multiprocessing.get_context("spawn").Process(
            target=agents, args=(address, count, ranks, seconds, silent_after)
        )
        process.start()
        running_since: float | None = None
        last_tick = 0.0
        marks: list[tuple[float, float]] = []
        detected: float | None = None
        while process.is_alive():
            server.serve(POLL_SECONDS)
            if (now := time.monotonic()) - last_tick < POLL_SECONDS:
                continue
            last_tick = now
            coordinator.tick()
            if running_since is None and coordinator.state.status == "running":
                running_since = now
            if running_since is not None and warm_up < now - running_since and coordinator.state.status == "running":
                marks.append((now, cpu_seconds()))
            if running_since is not None and coordinator.state.status != "running":
                detected = now
                break
        last_mark = marks[-1][0] if marks else 0.0
        process.terminate()
        process.join()
        server.close()
        coordinator.close()
    core_share = (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0]) if len(marks) > 1 else None
    return {
        "agents": count,
        "ranks": count * ranks,
        "heartbeat_seconds": HEARTBEAT,
        "core_share": core_share,
        "measured_seconds": marks[-1][0] - marks[0][0] if marks else None,
        "silent_agent_detected": detected is not None,
        "seconds_until_last_mark": last_mark - (running_since or last_mark),
        "cause": coordinator.state.incidents[-1].cause if coordinator.state.incidents else None,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "cores": os.cpu_count(),
    }


def cpu_seconds() -> float:
    """Processor time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=8, help="ranks of an agent")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures = json.dumps(measure(options.agents, options.ranks, options.seconds), indent=1)
    print(figures)
    if options.out:
        write_durable(options.out, figures + "\n")


if __name__ == "__main__":
    main()
