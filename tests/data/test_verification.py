"""A corpus that changes under a run is found: sizes when a source begins an epoch, contents when a shard is first used."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from meshwright.data.loader import Loader, Windows
from meshwright.data.source import DataSource, open_data
from meshwright.data.verification import ShardVerifier
from meshwright.spec.errors import Damaged
from meshwright.spec.job import DataSpec


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "data")) / "train"


def exchange_tokens(path: Path) -> None:
    """Other tokens of the same vocabulary: the size stays."""
    content = bytearray(path.read_bytes())
    content[100:120], content[200:220] = content[200:220], content[100:120]
    path.write_bytes(content)


def opened(path: Path, verifier: ShardVerifier | None = None) -> DataSource:
    return open_data(DataSpec(mix={str(path): 1.0}), seq_len=32, seed=0, verifier=verifier)


def finished(verifier: ShardVerifier) -> ShardVerifier:
    if (thread := verifier._thread) is not None:
        thread.join()
    return verifier


def test_exchanged_tokens_are_found_in_the_background(copy: Path) -> None:
    verifier = ShardVerifier(0, 1)
    source = opened(copy, verifier)
    source.begin_step(range(source.windows))
    finished(verifier).check()
    exchange_tokens(copy / "shard-00001.bin")
    verifier = ShardVerifier(0, 1)
    source = opened(copy, verifier)
    damage = r"shard-00001.bin: expected content with digest \w+ .*data.damaged: skip"
    loader = Loader(Windows(source, global_batch=8, data_rank=0, data_ranks=1, micro_batch=1))
    with loader, pytest.raises(Damaged, match=damage):
        for _ in range(1000):
            next(loader)
            finished(verifier)
    (copy / "shard-00001.bin").unlink()
    assert open_data(DataSpec(mix={str(copy): 1.0}, damaged="skip"), seq_len=32, seed=0).windows < source.windows


def test_only_shards_in_use_are_verified(copy: Path) -> None:
    source = opened(copy)
    used = source.sources[str(copy)].stream.files_of(source.order.draws([0]).window, 32)
    unused = next(number for number in range(3) if number not in used)
    exchange_tokens(copy / f"shard-0000{unused}.bin")
    verifier = ShardVerifier(0, 1)
    source = opened(copy, verifier)
    source.begin_step(range(1))
    finished(verifier).check()
    source.begin_step(range(source.windows))  # the order follows the folder's name: twenty windows may miss a shard
    with pytest.raises(Damaged, match=f"shard-0000{unused}.bin"):
        finished(verifier).check()


def test_ranks_share_the_work_and_leave_no_shard_out(copy: Path) -> None:
    count = len(list(copy.glob("*.bin")))
    for damaged in range(count):
        shutil.copy(copy / f"shard-0000{damaged}.bin", copy / "good")
        exchange_tokens(copy / f"shard-0000{damaged}.bin")
        failed = []
        for rank in range(2):
            verifier = ShardVerifier(rank, 2)
            source = opened(copy, verifier)
            source.begin_step(range(source.windows))
            try:
                finished(verifier).check()
            except Damaged:
                failed.append(rank)
        assert failed == [damaged % 2]
        os.replace(copy / "good", copy / f"shard-0000{damaged}.bin")


def test_sizes_are_compared_at_every_epoch(copy: Path) -> None:
    source = opened(copy)
    source.begin_step(range(8))
    os.truncate(copy / "shard-00000.bin", 100)
    source.begin_step(range(8, 16))
    with pytest.raises(Damaged, match=r"shard-00000.bin: expected \d+ bytes as when it was opened, found 100"):
        source.begin_step(range(source.windows - 4, source.windows + 4))


def test_a_truncated_corpus_ends_the_loader_as_damaged(copy: Path) -> None:
    with Loader(Windows(opened(copy), global_batch=4, data_rank=0, data_ranks=1, micro_batch=1)) as loader:
        next(loader)
        for path in copy.glob("*.bin"):
            os.truncate(path, 0)
        with pytest.raises(Damaged, match=r"shard-0000\d.bin: (offset|expected)"):
            for _ in range(100):
                next(loader)
