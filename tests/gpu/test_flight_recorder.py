"""Records of torch's flight recorder about collectives of NCCL, on one device."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from meshwright.observe.flight_recorder import recorded_collectives

pytestmark = pytest.mark.gpu


def unfinished() -> list[str]:
    entries = recorded_collectives()["nccl"]["entries"]
    return [entry["profiling_name"] for entry in entries if not entry["finished"]]


def test_a_collective_behind_unfinished_work_is_unfinished() -> None:
    device = torch.device("cuda", 0)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        values = torch.ones(4, device=device)
        dist.all_reduce(values)
        torch.cuda.synchronize()
        assert not unfinished()
        torch.cuda._sleep(2_000_000_000)  # about one second
        dist.all_reduce(values)
        assert unfinished() == ["nccl:all_reduce"]
        torch.cuda.synchronize()
        assert not unfinished()
    finally:
        dist.destroy_process_group()
