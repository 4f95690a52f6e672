"""Fixtures every room's tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


FIRST = ("pool", "workshop")
"""Fixtures that take long to make. Tests that share one run in one worker and in this order, so that `-n 2` makes each of them once."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def shared(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ())
        return next((place for place, name in enumerate(FIRST) if name in names), len(FIRST))

    items.sort(key=shared)
    for item in items:
        if shared(item) < len(FIRST):
            item.add_marker(pytest.mark.xdist_group(FIRST[shared(item)]))
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def pool() -> Iterator:
    """Gloo workers, started at first use."""
    from tests.distributed.pool import Pool

    workers = Pool()
    yield workers
    workers.close()
