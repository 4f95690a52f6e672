"""What a coordinator remembers of an attempt when the next one begins."""

from __future__ import annotations

import time
from pathlib import Path

from meshwright.launch.coordinator import Coordinator
from meshwright.launch.outcome import RankState
from meshwright.launch.reports import Report
from meshwright.policies.restart import RestartPolicy
from meshwright.policies.supervision import Rules


def test_a_report_that_begins_an_attempt_adds_no_ranks_of_the_attempt_before(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, Rules(1, 8, RestartPolicy(3)), 1, lambda state: tmp_path)

    def until(status: str) -> None:
        while coordinator.state.status != status:
            coordinator.tick()
            time.sleep(0.001)

    coordinator.receive(Report("host", port=1))
    until("running")
    killed = (RankState(0, code=-9),)
    coordinator.receive(Report("host", attempt=1, ranks=killed))
    until("gathering")
    coordinator.receive(Report("host", port=2, attempt=1, ranks=killed))
    until("running")
    assert coordinator.state.attempt == 2
    coordinator.receive(Report("host", attempt=2, ranks=(RankState(0, code=0),)))
    until("finished")
    assert coordinator.code == 0
    coordinator.close()
