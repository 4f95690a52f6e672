"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.slow import QUICK

VARIABLES_OF_USERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX"),
    *("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    *("TERMINAL_WIDTH", "GITHUB_ACTIONS"),  # read by Typer
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ |= {"COLUMNS": "80", "LINES": "24"}  # of the texts that commands print; tests of other widths set their own
for variable in list(os.environ):
    # No test begins as a rank of the job in which pytest may run, or prints colours for the terminal of its user.
    if variable in VARIABLES_OF_USERS or (variable.startswith(("SLURM_", "MESHWRIGHT_")) and variable != QUICK):
        del os.environ[variable]


LONG = ("distributed", "docs", "training", "tests", "cli", "planner", "kernels")
"""Folders whose tests take long, the longest first, so that no worker runs one of them alone at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Reject pytest 9.2, which ignores the groups of pytest-xdist 3.8.

    Without groups a file would be spread over the workers, each with its own pool of ranks.
    """
    if config.getoption("dist", "no") == "loadgroup" and pytest.version_tuple >= (9, 2):
        raise pytest.UsageError(
            f"pytest {pytest.__version__} keeps no groups of tests; expected the one of constraints.txt"
        )
    quick = config.getoption("markexpr") == "not slow"
    if quick:
        os.environ[QUICK] = "1"
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # the process that starts the workers of pytest-xdist imports no tests
    # `make test` takes the same examples each time; the longer suites search for new ones.
    settings.register_profile(
        "shared machine", deadline=None, derandomize=quick, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("shared machine")
    gc.disable()  # until all is imported: collections would take a fifth of that time
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read where Triton is imported first; `tests/kernels/test_triton.py`


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file stay in one worker, and so do all that share the pool of ranks or the parsed source."""

    def order(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=order)
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            group = "pool"
        else:
            group = str(item.path.parent if item.path.parent.name == "house" else item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but not among the million objects of the modules and tests, which stay."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def pool() -> Iterator:
    """Gloo workers, started at first use."""
    from tests.distributed.pool import Pool

    workers = Pool()
    yield workers
    workers.close()
