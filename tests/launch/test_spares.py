"""When an agent starts spare processes."""

from __future__ import annotations

import pytest

from meshwright.config.load import load_run
from meshwright.launch.agent import starts_spares


@pytest.mark.parametrize(
    ("arguments", "starts"),
    [
        (["cluster.gpu=cpu"], True),
        (["cluster.gpu=cpu", "train.keep_cores=true"], False),
        (["cluster.gpu=H100", "train.keep_cores=true"], True),
        (["cluster.gpu=cpu", "supervision.restarts=0"], False),
    ],
)
def test_cpu_ranks_that_keep_their_cores_have_no_spares(arguments: list[str], starts: bool) -> None:
    assert starts_spares(load_run(None, ["model=llama-nano", *arguments])) == starts
