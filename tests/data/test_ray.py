"""A Ray cluster prepares the same corpus, also when one of its workers is killed. Needs `pip install 'meshwright[ray]'`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.data import prepare as prepare_module
from meshwright.data.parts import CorpusPart, prepare_part
from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest, Preparation
from meshwright.spec.errors import BadInput
from tests.data.conftest import story
from tests.data.test_prepare import contents

OPTIONS: dict[str, Any] = {"held_out": 0.1, "shard_tokens": 20_000}


def test_without_ray_the_option_says_what_to_install(
    corpus: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=r"--ray needs ray .*pip install 'meshwright\[ray\]'"):
        prepare([str(corpus)], str(tokenizer_file), tmp_path / "out", ray="auto")
    with pytest.raises(BadInput, match=r"--ray needs ray .*pip install 'meshwright\[ray\]'"):
        part = Preparation((str(corpus),), str(tokenizer_file), tmp_path / "part")
        prepare_part(part, CorpusPart(1, 2), ray="auto")


def test_chats_are_not_for_ray(corpus: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--ray: is for text"):
        prepare([str(corpus)], str(tokenizer_file.parent), tmp_path / "out", ray="auto", chat=ChatRequest())


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster of four workers on this machine."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)
    yield "auto"
    ray.shutdown()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(2):
        with (folder / f"{number}.jsonl").open("w") as file:
            file.write("".join(json.dumps({"text": story(i)}) + "\n" for i in range(number, 8000, 2)))
    return folder


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "UNIT_BYTES", 40_000)


def workers_of_ray() -> list[int]:
    """Processes of this machine that run a unit in a Ray cluster now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::run_unit"):
            found.append(int(folder.name))
    return found


def test_a_cluster_whose_worker_is_killed_gives_the_same_corpus(
    texts: Path, tokenizer_file: Path, tmp_path: Path, cluster: str
) -> None:
    prepare([str(texts)], str(tokenizer_file), tmp_path / "here", **OPTIONS)
    killed: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 120
        while not killed and time.monotonic() < deadline:
            done = len(list((tmp_path / "out").glob("units/unit-*.json")))
            if done >= 3 and (running := workers_of_ray()):
                os.kill(running[0], signal.SIGKILL)
                killed.append(running[0])
            time.sleep(0.005)

    killer = threading.Thread(target=kill)
    killer.start()
    prepare([str(texts)], str(tokenizer_file), tmp_path / "out", ray=cluster, **OPTIONS)
    killer.join()
    assert killed and contents(tmp_path / "out") == contents(tmp_path / "here")


def test_a_mistake_in_a_unit_is_the_error_of_the_command(
    texts: Path, tokenizer_file: Path, tmp_path: Path, cluster: str
) -> None:
    from meshwright.data.cleaning import Cleaning

    (tmp_path / "filters.py").write_text("def keep(text): return text.count('Story 77.') / 0")
    cleaning = Cleaning(filters=(f"{tmp_path}/filters.py:keep",))
    with pytest.raises(BadInput, match=r"filters\.py:keep: .*jsonl \[\d+\]: ZeroDivisionError"):
        prepare([str(texts)], str(tokenizer_file), tmp_path / "out", ray=cluster, cleaning=cleaning)
