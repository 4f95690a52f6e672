"""A pool of Gloo worker processes for the tests, with one thread each, started once per session and used by all tests.

They are forked from a server process that has imported the modules of a rank, so that a restart of the pool is fast.

`pool.run(body, ranks, *arguments)` calls `body(world, *arguments)` on `ranks` workers at the same time, in a new process group, and returns
the results in rank order. `body` must be a module-level function.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

LIMIT_SECONDS = 120
freeze_objects = gc.freeze
IMPORTED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "meshwright.training.loop",
    "tests.distributed.cases_training",
    # Several files have their cases in themselves; these import what all of them do.
    "tests.distributed.test_context",
    "tests.distributed.test_hosts",
    "tests.distributed.test_checkpoint_stages",
]


def pack(value: Any) -> bytes:
    """`value` pickled with the bytes of its tensors; torch would open a shared-memory file or a storage for each of them."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor or value.requires_grad or value.layout is not torch.strided:
            return NotImplemented
        return _tensor, (value.contiguous().view(-1).view(torch.uint8).cpu().numpy(), value.dtype, value.shape)


def _tensor(content: Any, dtype: Any, shape: Any) -> Any:
    import torch

    return torch.from_numpy(content).view(dtype).view(shape)


class CaseFailed(AssertionError):
    """A function raised on a rank; the message is the traceback."""


class Pool:
    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, case: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
        self._start(ranks)
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(ranks):
                self._pipes[rank].send((case, rank, ranks, os.path.join(folder, "store"), arguments))
            answers = [self._answer(rank) for rank in range(ranks)]
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            # The other ranks may still wait inside a collective, so the next run starts new processes.
            self.close()
            raise CaseFailed("\n".join(failures))
        return [value for _, value in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        if self._pipes[rank].poll(LIMIT_SECONDS):
            try:
                return pickle.loads(self._pipes[rank].recv_bytes())
            except EOFError:
                return False, "the worker died"
        return False, f"no answer within {LIMIT_SECONDS} s"

    def _start(self, ranks: int) -> None:
        """Start workers until there are at least `ranks`."""
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        for _ in range(ranks - len(self._processes)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes.clear()
        self._processes.clear()


def _serve(pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)
    _keep_frozen()
    while True:
        try:
            case, rank, ranks, store, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send_bytes(pack(_run_on_rank(case, rank, ranks, store, arguments)))


def _keep_frozen() -> None:
    """Exclude the imported modules, 350,000 objects, from all later collections: training would thaw them at its end."""
    freeze_objects()
    gc.freeze = gc.unfreeze = lambda: None


def _run_on_rank(
    case: Callable[..., Any], rank: int, ranks: int, store: str, arguments: tuple[Any, ...]
) -> tuple[bool, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from meshwright.parallel.world import RankEnvironment, World

    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )
        world = World(RankEnvironment(rank, ranks, rank, ranks, "127.0.0.1", 0), torch.device("cpu"), dist.group.WORLD)
        answer = case(world, *arguments)
        # A rank that returns early would close its connections, and ranks that still connect to it would fail.
        dist.barrier()
        return True, answer
    except BaseException:
        return False, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # DTensor caches results by mesh, with group names, and would use them for a later test's mesh of the same ranks.
        _clear_sharding_prop_cache()
        # Process groups are in reference cycles; collect them now, so that their sockets and threads do not end during the next test.
        # The remaining objects are modules; later collections skip them.
        gc.collect()
        freeze_objects()
