"""The report's picture of expert loads."""

from __future__ import annotations

import re

from meshwright.observe.expert_load_table import MOST_STEPS
from meshwright.observe.report_expert_loads import expert_loads_card


def record(step: int, loads: object) -> dict[str, object]:
    return {"kind": "step", "step": step, "expert_loads": loads}


def test_cells_have_the_load_over_the_layers_mean() -> None:
    """Two layers of two experts, added over two steps: loads 3 and 1 of a mean of 2, then equal ones."""
    card = expert_loads_card([{"step": 1}, record(2, [[3, 1], [5, 5]]), record(3, [[3, 1], [5, 5]])])
    cells = dict(re.findall(r'<path class="column (h\d)" d="([^"]*)"', card))
    assert {level: path.count("M") for level, path in cells.items()} == {"h1": 1, "h2": 2, "h4": 1}
    assert cells["h4"].startswith("M0,0H500") and cells["h1"].startswith("M500,0H1000")
    assert "In MoE layer 1 expert 0 has 1.50 × the mean load." in card
    assert "added over 2 recorded steps up to step\n 3." in card


def test_only_the_last_steps_count() -> None:
    early = [record(step, [[100, 0]]) for step in range(1, 6)]
    card = expert_loads_card([*early, *(record(step, [[1, 1]]) for step in range(6, 6 + MOST_STEPS))])
    assert "has 1.00 × the mean load" in card


def test_runs_without_usable_loads_have_no_card() -> None:
    for loads in (None, [], [[]], [[1], [1, 2]], "text", [["<script>"]]):
        assert expert_loads_card([record(1, loads)]) == ""
    assert expert_loads_card([]) == ""
    assert "1 recorded steps" in expert_loads_card([record(1, [[1, 1, 1]]), record(2, [[1, 1]])])
