"""The short form of `make test-faults`: a few scenarios on a tiny model, all compared with the same undisturbed run."""

from __future__ import annotations

import pytest

from meshwright.chaos.suite import Suite, scenario_named
from tests.training.tiny import make_tiny, tiny_run

PATIENCE = 10.0
"""Factor for all limits in seconds: other tests run at the same time."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    file = make_tiny(tmp_path_factory.getbasetemp() / "tiny")
    return Suite(tiny_run(file), [str(file)], tmp_path_factory.mktemp("runs"), steps=36, patience=PATIENCE)


@pytest.mark.slow
@pytest.mark.xdist_group("scenarios")
@pytest.mark.parametrize("name", ["kill-rank0", "corrupt-newest"])
def test_the_promise_of_a_scenario_is_kept(suite: Suite, name: str) -> None:
    """The promise of a scenario is what the system does after its disturbance (`Scenario.promise`)."""
    verdict = suite.run(scenario_named(name))
    assert verdict.ok, verdict.observed


@pytest.mark.slow
@pytest.mark.xdist_group("scenarios")
def test_promises_are_kept_with_adapters(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A rank is killed; the newest checkpoint, of adapters alone, is corrupt: the run ends with the bits of an undisturbed one."""
    file, arguments = make_tiny(tmp_path_factory.getbasetemp() / "tiny"), "model.adapter={rank: 2, alpha: 4}"
    runs = tmp_path_factory.mktemp("adapted")
    adapted = Suite(tiny_run(file, arguments), [str(file), arguments], runs, steps=36, patience=PATIENCE)
    for name in ("kill-rank0", "corrupt-newest"):
        verdict = adapted.run(scenario_named(name))
        assert verdict.ok, (name, verdict.observed)
