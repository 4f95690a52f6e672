"""An optimizer lists all state of its rank, wherever it is, and what is written there is what it steps next."""

from __future__ import annotations

import torch
from tests.models.tiny import LLAMA

from meshwright.models.decoder import Decoder
from meshwright.optim.fused import MOMENTS
from meshwright.optim.optimizer import Optimizer
from meshwright.parallel.apply import local_weights
from meshwright.spec.job import TrainSpec

TRAIN = TrainSpec(steps=4, global_batch=4, seq_len=8)
HOST_OFFLOADED = ("embed.weight", "layers.0.mlp.down.weight")


def model_and_optimizer(seed: int, *, releases: bool = True) -> tuple[Decoder, Optimizer]:
    """A model whose two HOST_OFFLOADED parameters have their state in host memory; with `releases` also the master weights."""
    torch.manual_seed(seed)
    model = Decoder(LLAMA)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    named = dict(model.named_parameters())
    host_offloaded = {
        name: (lambda name=name: named[name].detach().to(torch.bfloat16)) if releases else None
        for name in HOST_OFFLOADED
    }
    return model, Optimizer(model, LLAMA, TRAIN, local_weights(model), host_offloaded)


def step(model: Decoder, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * 0.1
    one = torch.ones((), dtype=torch.float64)
    optimizer.step(1e-2, one, one)


def test_every_weight_and_moment_is_listed_with_the_memory_it_is_in() -> None:
    model, optimizer = model_and_optimizer(0)
    before = {parts.name: parts.memory for parts in optimizer.state()}
    optimizer.release_master_weights()
    state = {parts.name: parts for parts in optimizer.state()}
    names = [name for name, _ in model.named_parameters()]
    kinds = ["model", *(f"optimizer.{moment}" for moment in MOMENTS)]
    assert set(before) == set(state) == {f"{kind}.{name}" for kind in kinds for name in names}
    for kind in kinds:
        for name in names:
            parts, host_offloaded = state[f"{kind}.{name}"], name in HOST_OFFLOADED
            assert parts.shape == tuple(model.get_parameter(name).shape) == parts.boxes[0].sizes
            assert parts.memory == ("host" if host_offloaded else "device") and parts.dtype == torch.float32
            assert before[parts.name] == ("host" if host_offloaded and kind != "model" else "device")


def test_state_that_is_copied_from_one_optimizer_to_another_is_stepped_alike() -> None:
    for releases in (True, False):
        (model, optimizer), (other, restored) = (
            model_and_optimizer(0, releases=releases),
            model_and_optimizer(1, releases=releases),
        )
        optimizer.release_master_weights()
        restored.release_master_weights()
        step(model, optimizer)
        for theirs, ours in zip(optimizer.state(), restored.state(), strict=True):
            assert theirs.name == ours.name
            ours.write(theirs.read())
        restored.set_steps(1)
        step(model, optimizer)
        step(other, restored)
        for theirs, ours in zip(optimizer.state(), restored.state(), strict=True):
            assert torch.equal(theirs.read(), ours.read()), theirs.name
