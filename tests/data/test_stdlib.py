from __future__ import annotations

import os
import pwd
import shutil
import sysconfig
import threading
from pathlib import Path

import pytest

from meshwright.data import inputs, stdlib
from meshwright.data.manifest import Manifest, verify
from meshwright.data.stdlib import ensure_stdlib, stdlib_folder
from meshwright.spec.errors import BadInput
from meshwright.spec.folders import compiler_cache

PARTS = ("asyncio", "concurrent", "email", "json", "logging", "unittest", "urllib", "xml")


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the real standard library in its place: the whole takes a slow core half a minute."""
    real, small = Path(sysconfig.get_path("stdlib")), tmp_path / "lib"
    for name in PARTS:
        shutil.copytree(real / name, small / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(inputs.sysconfig, "get_path", lambda name: str(small))


@pytest.mark.usefixtures("small_library")
def test_the_standard_library_is_prepared_once_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, original = [], stdlib.prepare
    monkeypatch.setattr(stdlib, "prepare", lambda *a, **k: (runs.append(result := original(*a, **k)), result)[1])
    folder = tmp_path / "stdlib"
    threads = [threading.Thread(target=ensure_stdlib, args=(folder, 400)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.reused for result in runs) == [False, True]
    assert ensure_stdlib(folder, 400) == folder and len(runs) == 2
    train, held_out = Manifest.read(folder / "train"), Manifest.read(folder / "held_out")
    assert train.tokenizer.vocab_size == 400 and train.skipped == 0
    assert 0.002 < held_out.text_bytes / train.text_bytes < 0.1
    assert verify(folder) == []
    with pytest.raises(BadInput, match="prepared with tokenizer train:400, asked for train:401"):
        ensure_stdlib(folder, 401)


def test_the_folder_follows_the_cache_and_names_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert stdlib_folder(512).parent == Path("/cache/meshwright")
    assert stdlib_folder(512) != stdlib_folder(4096)


def test_a_user_without_a_home_learns_which_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1_000_680_000)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as OpenShift's users, which have a number only
    with pytest.raises(BadInput, match="user 1000680000 of this host has no home folder; set XDG_CACHE_HOME"):
        stdlib_folder()
    assert compiler_cache() is None
