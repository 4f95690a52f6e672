from __future__ import annotations

import threading
from pathlib import Path

import pytest

from meshwright.data import stdlib
from meshwright.data.manifest import Manifest, verify
from meshwright.data.stdlib import ensure_stdlib, stdlib_folder
from meshwright.spec.errors import BadInput


def test_the_standard_library_is_prepared_once_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, original = [], stdlib.prepare
    monkeypatch.setattr(stdlib, "prepare", lambda *a, **k: (runs.append(made := original(*a, **k)), made)[1])
    folder = tmp_path / "stdlib"
    threads = [threading.Thread(target=ensure_stdlib, args=(folder, 300)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made.reused for made in runs) == [False, True]
    assert ensure_stdlib(folder, 300) == folder and len(runs) == 2
    train, held_out = Manifest.read(folder / "train"), Manifest.read(folder / "held_out")
    assert train.tokenizer.vocab_size == 300 and train.text_bytes > 5_000_000
    assert 0.002 < held_out.text_bytes / train.text_bytes < 0.1
    assert verify(folder) == []
    with pytest.raises(BadInput, match="prepared with tokenizer train:300, asked for train:301"):
        ensure_stdlib(folder, 301)


def test_the_folder_follows_the_cache_and_names_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert stdlib_folder(512).parent == Path("/cache/meshwright")
    assert stdlib_folder(512) != stdlib_folder(4096)
