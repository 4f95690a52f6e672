"""GPU: blocks copied out of the memory of another process, on one device or two, also after that process was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.kernels.checksum import digests
from meshwright.kernels.range_copies import copy_ranges
from meshwright.parallel import mapped_memory
from meshwright.parallel.mapped_memory import ExportedMemory, MappedMemory, NotMappable
from meshwright.serve.mapped_blocks import OwnBlocks
from meshwright.serve.prefix_blocks import PrefixBlocks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CUDA = torch.device("cuda", 0)
GROUPS = ((50, 1 << 20), (7, 3 * 65536 + 48))
"""Blocks of two groups, and bytes of one."""
OWNER = """
import json, sys, torch
from tests.gpu.test_mapped_memory import contents
from meshwright.serve.mapped_blocks import OwnBlocks
blocks = OwnBlocks(contents(sys.argv[1]))
print(json.dumps(blocks.offer()), flush=True)
sys.stdin.read()
"""
PREFILL = """
import sys
from pathlib import Path
from tests.server.helpers import running_server
with running_server(Path(sys.argv[1]), role="prefill", transfer_address=sys.argv[2]):
    print("ready", flush=True)
    sys.stdin.read()
"""


def contents(device: str) -> list[Tensor]:
    """The same bytes in every process."""
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw).to(device) for shape in GROUPS]


@contextmanager
def child(script: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_the_kernel_copies_ranges_of_many_sizes() -> None:
    draw = torch.Generator().manual_seed(0)
    words = [torch.randint(-(2**63), 2**63 - 1, (size,), generator=draw) for size in (2, 1026, 8192, 70000, 1 << 20)]
    sources = [each.to(CUDA) for each in words]
    copies = [torch.full((len(each) + 1,), -7, device=CUDA) for each in words]
    ranges = [(each.data_ptr(), copy.data_ptr(), each.nbytes) for each, copy in zip(sources, copies, strict=True)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = copy_ranges(torch.tensor([*ranges, (sources[0].data_ptr(), 0, sources[0].nbytes)]), CUDA)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(sums.cpu(), digests([*words, words[0]]))
    for copy, expected in zip(copies, words, strict=True):
        assert torch.equal(copy[:-1].cpu(), expected) and copy[-1] == -7


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_blocks_of_another_process(device: str) -> None:
    """The mapping also outlives its owner: a killed engine ends no other one."""
    if int(device[-1]) >= torch.cuda.device_count():
        pytest.skip("needs 2 GPUs")
    expected, targets = contents("cpu"), [torch.zeros(shape, dtype=torch.uint8, device=CUDA) for shape in GROUPS]
    own = OwnBlocks(targets)
    with child(OWNER, device) as owner:
        mapped = own.map(json.loads(line_of(owner)))
        tables, places = [[4, 6], [0, 3], [49, 0]], [[1, 0], [30, 2], [2, 5]]
        for _ in range(2):
            sums = own.copy(mapped, tables, places)
            for table, place, found in zip(tables, places, sums, strict=True):
                sources = [content[block] for content, block in zip(expected, table, strict=True)]
                assert found.tolist() == digests(sources).view(-1).tolist()
                for source, target, block in zip(sources, targets, place, strict=True):
                    assert torch.equal(target[block].cpu(), source)
                    target[block].zero_()
            assert not any(target.any() for target in targets), "nothing else is written"
            owner.kill()
            owner.wait()
        mapped.close()


def test_memory_that_cannot_be_mapped() -> None:
    memory = torch.zeros(1 << 22, dtype=torch.uint8, device=CUDA)
    exported = mapped_memory.export(memory)
    with pytest.raises(NotMappable):
        MappedMemory(exported, memory.nbytes, CUDA)  # of this process
    with pytest.raises(NotMappable):
        MappedMemory(ExportedMemory(bytes(64), 0), 16, CUDA)
    with child(OWNER, "cuda:0") as owner:
        offer = json.loads(line_of(owner))
        memory_of_other = ExportedMemory(bytes.fromhex(offer[0]["handle"]), 0)
        with pytest.raises(NotMappable, match="expected"):
            MappedMemory(memory_of_other, 1 << 45, CUDA)


def test_engines_in_two_processes_give_the_texts_of_staging_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("uvicorn")
    from tests.server.helpers import NAME, running_server, write_folder
    from tests.server.test_roles import figures, texts, wait_for_peers

    folder, address = write_folder(tmp_path / NAME), f"unix:{tmp_path}/a"
    found: dict[bool, Any] = {}
    written: list[int] = []
    true_write = PrefixBlocks.write

    def write(blocks: PrefixBlocks, tables: Any, content: memoryview) -> None:
        written.append(len(tables))
        true_write(blocks, tables, content)

    monkeypatch.setattr(PrefixBlocks, "write", write)
    for mapped in (True, False):
        if not mapped:
            monkeypatch.setattr(mapped_memory, "mappable", lambda device: False)
        with (
            child(PREFILL, str(folder), address) as prefill,
            running_server(folder, role="decode", prefill_engines=address) as decode,
        ):
            assert line_of(prefill) == "ready\n"
            wait_for_peers(decode)
            found[mapped] = texts(decode)
            assert figures(decode).received_blocks > 20 and not figures(decode).damaged_blocks
            assert bool(written) != mapped
            decode.settle()
    assert found[True] == found[False]
