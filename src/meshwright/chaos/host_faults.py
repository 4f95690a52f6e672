"""Faults of hosts, agents, the coordinator and links between hosts. Two hosts train; a spare host may wait."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable

from meshwright.chaos.hosts import Links, host_name, namespace_obstacle
from meshwright.chaos.process_faults import CONTINUES, RESTART_SECONDS, after, middle
from meshwright.chaos.processes import children, command, processes_with, send
from meshwright.chaos.scenario import Scenario, Stage

LOST_SECONDS = 10.0
"""Most seconds between the loss of a host and its detection."""
REPLACED_SECONDS = 25.0
"""Most seconds between the loss of a host and the next step."""
FAILOVER_SECONDS = 20.0
"""Most seconds between the loss of the coordinator's host and the next step."""
HEALED_SECONDS = 5.0
"""Most seconds between the end of a network partition and the next step."""
FLAP_SECONDS = 3.0
"""Seconds without a link that are too short for the host to count as lost."""
PARTITION_SECONDS = 20.0
"""Seconds without a link after which the host counts as lost."""
FLAP_HANG_SECONDS = 10.0
"""Limit of a hang, in seconds, in the scenario with a short interruption.

TCP doubles its wait after each retransmission, so ranks may exchange nothing for up to 6.4 s. That is longer than the
usual limit on a CPU.
"""
EXCHANGES = 100
"""Most exchanges between hosts, one after the other, until a restarted run has trained a step."""
TWO_HOSTS = ("cluster.nodes=2",)


def training_host(stage: Stage) -> int:
    """Return a host of the running attempt that is not the coordinator's. Agents are named HOST/PID."""
    stage.job.poll()
    members = {int(name.rpartition("/")[2]) for name in stage.job.states[-1][1]["members"]}
    hosts = [host for host, agent in enumerate(stage.job.processes) if host and agent.pid in members]
    stage.require(bool(hosts), "only the coordinator's host trains")
    return hosts[0]


def kill_agent(stage: Stage) -> None:
    """Kill the agent of the second host, and start it again as a scheduler would."""
    stage.expect_incident("failure", host=host_name(1))
    agent = stage.job.processes[1]
    ranks = list(stage.job.ranks(1).values())
    stage.signal(agent.pid, signal.SIGKILL)
    stage.job.forget(agent)
    stage.pause(1.0)
    ranks_left = [pid for pid in ranks if command(pid)]
    stage.expect(not ranks_left, f"{len(ranks_left)} ranks of the killed agent still run")
    stage.launch(1)


def kill_coordinator(stage: Stage) -> None:
    """Kill the coordinator's process. Another process becomes coordinator."""
    stage.signal(coordinator_of(stage), signal.SIGKILL)
    stage.job.until_printed("the coordinator answers again", seconds=60)


def lose_host(stage: Stage) -> None:
    """End all processes of a host at once, and cut its link if it has one."""
    assert stage.hosts is not None
    host = training_host(stage)
    agent = stage.job.processes[host]
    stage.mark()
    stage.expect_incident("failure", host=host_name(host))
    if namespace_obstacle() is None:
        stage.hosts.set_link(host, False)
    for pid in [agent.pid, *children(agent.pid)]:
        send(pid, signal.SIGKILL)
    stage.job.forget(agent)


def lose_coordinator(stage: Stage) -> None:
    """A play that ends all processes of the first host at once; the first host trains and has the coordinator.

    Its link is cut too, if it has one.
    """
    job = stage.start(hosts=2)
    assert stage.hosts is not None
    job.until(lambda: bool(job.states), "the first attempt")
    stage.launch(2)  # the other two hosts train already, so this one is a spare
    job.until_step(middle(stage))
    agent = job.processes[0]
    coordinator = coordinator_of(stage)
    stage.mark()
    stage.expect_incident("failure", host=host_name(0))
    if namespace_obstacle() is None:
        stage.hosts.set_link(0, False)
    for pid in [agent.pid, *children(agent.pid), coordinator]:
        send(pid, signal.SIGKILL)
    job.forget(agent)
    job.wait()


def coordinator_of(stage: Stage) -> int:
    """Return the process id of the coordinator, which is on the first host."""
    found = [pid for pid in children(stage.job.processes[0].pid) if "coordinate" in command(pid)]
    stage.require(len(found) == 1, f"there are {len(found)} coordinators")
    return found[0]


def lose_host_and_checkpoints(stage: Stage) -> None:
    """Lose a host, and remove all checkpoints before the run resumes. Its state is then only in the memory of hosts."""
    lose_host(stage)
    stage.job.until_printed("has not answered", seconds=60)
    for checkpoint in (stage.run / "checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)
    stage.job.until_printed("from partner memory", seconds=60)


def lose_store(stage: Stage) -> None:
    """Kill rank 0, whose process holds the store of the attempt. The ranks of the other host lose their store."""
    stage.expect_incident("killed", 0, host_name(0))
    stage.signal(stage.job.ranks(0)[0], signal.SIGKILL)


def cut_link(seconds: float | None, *, silently: bool = False) -> Callable[[Stage], None]:
    """Return a disturbance that cuts the link of a host for some seconds; with None, until the other hosts have
    finished.

    `silently`: the link stays up, but the switch drops everything that the host sends or should receive.
    """

    def disturb(stage: Stage) -> None:
        assert stage.hosts is not None
        host = training_host(stage)
        agent = stage.job.processes[host]
        connect = stage.hosts.set_reachable if silently else stage.hosts.set_link
        stage.mark()
        connect(host, False)
        if seconds is None or seconds > LOST_SECONDS:
            stage.expect_incident("failure", host=host_name(host))
        if seconds is not None:
            stage.pause(seconds)
            connect(host, True)
            return
        stage.job.forget(agent)
        stage.job.wait()
        send(agent.pid, signal.SIGKILL)
        for pid in processes_with(stage.token):
            send(pid, signal.SIGKILL)

    return disturb


HOST_FAULTS = (
    Scenario(
        name="kill-agent",
        promise=f"After SIGKILL of a host's agent its ranks end; once it is started again {CONTINUES}.",
        play=after(middle, kill_agent),
        hosts=2,
        overrides=TWO_HOSTS,
        detect_within=LOST_SECONDS,
        recover_within=REPLACED_SECONDS,
    ),
    Scenario(
        name="kill-coordinator",
        promise="After SIGKILL of the coordinator training goes on; another one takes its place, and the losses are the same.",
        play=after(middle, kill_coordinator),
        hosts=2,
        overrides=TWO_HOSTS,
        restarts=False,
    ),
    Scenario(
        name="lose-host",
        promise=f"A spare host replaces a lost one, and {CONTINUES}.",
        play=after(middle, lose_host),
        hosts=3,
        overrides=TWO_HOSTS,
        detect_within=LOST_SECONDS,
        recover_within=REPLACED_SECONDS,
    ),
    Scenario(
        name="lose-coordinator",
        promise="When the first host is lost, which trains and coordinates, another host coordinates, a spare one trains, and "
        f"{CONTINUES}.",
        play=lose_coordinator,
        hosts=3,
        overrides=TWO_HOSTS,
        detect_within=FAILOVER_SECONDS,
        recover_within=FAILOVER_SECONDS,
    ),
    Scenario(
        name="lose-host-partner",
        promise=f"With checkpoint.partner: host a lost host costs no step that its partner has, also without storage, and {CONTINUES}.",
        play=after(middle, lose_host_and_checkpoints),
        hosts=3,
        overrides=(*TWO_HOSTS, "checkpoint.partner=host"),
        detect_within=LOST_SECONDS,
        recover_within=REPLACED_SECONDS,
    ),
    *(
        Scenario(
            name=name,
            promise=f"Over {links} a lost host costs no step that its partner has, also without storage, and {CONTINUES}.",
            play=after(middle, lose_host_and_checkpoints),
            hosts=3,
            overrides=(*TWO_HOSTS, "cluster.gpus_per_node=1", "checkpoint.partner=host"),
            detect_within=LOST_SECONDS + links.seconds * EXCHANGES,
            recover_within=REPLACED_SECONDS + links.seconds * EXCHANGES,
            links=links,
            unavailable=namespace_obstacle,
        )
        for name, links in (("far-hosts", Links(seconds=0.03)), ("lossy-links", Links(loss=0.01)))
    ),
    Scenario(
        name="store-loss",
        promise=f"When the store of the ranks is lost with rank 0, the next attempt has a new one, and {CONTINUES}.",
        play=after(middle, lose_store),
        hosts=2,
        overrides=TWO_HOSTS,
        detect_within=1.0,
        recover_within=RESTART_SECONDS,
    ),
    Scenario(
        name="cut-link",
        promise=f"A spare host replaces one whose link is cut for good, which commits nothing more, and {CONTINUES}.",
        play=after(middle, cut_link(None)),
        hosts=3,
        overrides=TWO_HOSTS,
        detect_within=LOST_SECONDS,
        recover_within=REPLACED_SECONDS,
        unavailable=namespace_obstacle,
    ),
    Scenario(
        name="flap-link",
        promise=f"A link that is down for {FLAP_SECONDS:g} s only delays training: there is no restart, and the losses are the same "
        f"(with supervision.hang_seconds={FLAP_HANG_SECONDS:g}).",
        play=after(middle, cut_link(FLAP_SECONDS)),
        hosts=2,
        overrides=(*TWO_HOSTS, f"supervision.hang_seconds={FLAP_HANG_SECONDS:g}"),
        restarts=False,
        unavailable=namespace_obstacle,
    ),
    Scenario(
        name="partition",
        promise=f"When a host is cut off for {PARTITION_SECONDS:g} s, one side only trains; {HEALED_SECONDS:g} s after it comes back "
        f"{CONTINUES}.",
        play=after(middle, cut_link(PARTITION_SECONDS, silently=True)),
        hosts=2,
        overrides=TWO_HOSTS,
        detect_within=LOST_SECONDS,
        recover_within=PARTITION_SECONDS + HEALED_SECONDS,
        unavailable=namespace_obstacle,
    ),
)
