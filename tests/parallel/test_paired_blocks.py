"""The order in which two micro-batches in one block compute and exchange rows, and the gradients of both."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.models.block import AttentionKind
from meshwright.models.decoder import SharedInputs
from meshwright.parallel import paired_blocks
from meshwright.parallel.block_parts import BlockParts, Routed
from meshwright.parallel.experts import AllToAll
from meshwright.parallel.paired_blocks import PairedBlock, PairedBlocks

Log = list[str]
Visit = tuple[int, int, int]
KIND = AttentionKind(None, None)
SHARED = SharedInputs(torch.empty(0), {KIND: (None, None)})
FORWARD = "rA >A rB >B .A cA >A .B cB >B .A sA .B sB"
BACKWARD = "sB >B sA >A .B cB >B .A cA >A .B rB .A rA"
"""r: route, c: compute, s: combine, >: start of an exchange, .: wait for it, each with its micro-batch."""


class Units(dict[tuple[str, Visit], Tensor]):
    """The inputs and outputs of the block, and their gradients."""

    def take(self, payload: str, visit: Visit) -> Tensor:
        return self.pop((payload, visit))

    def pass_on(self, payload: str, visit: Visit, tensor: Tensor) -> None:
        self[payload, visit] = tensor


class Transfer:
    """Rows on their way from a rank to itself."""

    def __init__(self, log: Log, sent: Tensor, name: str) -> None:
        self.log, self.received, self.name = log, sent.clone(), name
        log.append(f">{name}")

    def wait(self) -> Tensor:
        self.log.append(f".{self.name}")
        return self.received


def parts_of(name: str, log: Log) -> BlockParts:
    """Parts of x ↦ x² + 8·x³·sin x, which log their forward and their backward."""

    def logged(part: str, output: Tensor) -> Tensor:
        log.append(part + name)
        output.register_hook(lambda gradient: log.append(part + name))
        return output

    def route(x: Tensor, *others: Any) -> Routed:
        unused: Any = torch.zeros(())
        return Routed(x * x, x.exp(), logged("r", 2 * x), x.sin(), *6 * (unused,))

    def combine(x: Tensor, normed: Tensor, returned: Tensor, weights: Tensor, *orders: Any) -> Tensor:
        return logged("s", x + returned * weights)

    return BlockParts(route, lambda received, loads: logged("c", received**3), combine, AllToAll(name, 1), None, KIND)


def test_a_part_of_the_other_micro_batch_runs_during_each_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    log: Log = []

    def start(sent: Tensor, splits: Any, count: Any, back: bool, name: str, *, asynchronous: bool) -> Transfer:
        assert asynchronous
        return Transfer(log, sent, name)

    monkeypatch.setattr(paired_blocks, "exchange_loads", lambda *loads: (None, None))
    monkeypatch.setattr(paired_blocks, "start_exchange", start)
    visits, units = [(0, number, 1) for number in range(2)], Units()
    xs = [torch.linspace(0, 1 + number, 6, dtype=torch.float64).view(3, 2) for number in range(2)]
    units |= {("activation", visit): x.clone() for visit, x in zip(visits, xs, strict=True)}
    blocks = [PairedBlock(parts_of(name, log), lambda y: None, lambda: None) for name in "AB"]
    paired = PairedBlocks(units)  # pyrefly: ignore [bad-argument-type]
    paired.forward(visits, blocks, [SHARED, SHARED])
    assert log == FORWARD.split()
    log.clear()
    for visit, x in zip(visits, xs, strict=True):
        torch.testing.assert_close(units.take("activation", visit), x**2 + 8 * x**3 * x.sin())
        units["gradient", visit] = torch.ones_like(x)
    paired.backward(visits, partial(log.append, "sum"))
    assert [entry for entry in log if entry != "sum"] == BACKWARD.split()
    assert log.count("sum") == 6
    for visit, x in zip(visits, xs, strict=True):
        expected = 2 * x + 24 * x**2 * x.sin() + 8 * x**3 * x.cos()
        torch.testing.assert_close(units.take("gradient", visit), expected)
