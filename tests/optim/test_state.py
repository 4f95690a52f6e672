"""An optimizer lists all state of its rank, on device and host, and its next step uses what is written to that memory."""

from __future__ import annotations

import torch
from tests.models.tiny import LLAMA

from meshwright.models.decoder import Decoder
from meshwright.optim.adamw import AdamW
from meshwright.optim.fused import MOMENTS
from meshwright.parallel.apply import held_weights
from meshwright.spec.job import TrainSpec

TRAIN = TrainSpec(steps=4, global_batch=4, seq_len=8)
HOST_OFFLOADED = ("embed.weight", "layers.0.mlp.down.weight")


def new_optimizer(seed: int, *, releases: bool = True) -> tuple[Decoder, AdamW]:
    """A model whose optimizer keeps the state of two parameters in host memory, with `releases` also their master weights."""
    torch.manual_seed(seed)
    model = Decoder(LLAMA)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    named = dict(model.named_parameters())
    host_offloaded = {
        name: (lambda name=name: named[name].detach().to(torch.bfloat16)) if releases else None
        for name in HOST_OFFLOADED
    }
    return model, AdamW(model, LLAMA, TRAIN, held_weights(model), host_offloaded)


def step(model: Decoder, optimizer: AdamW) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * 0.1
    one = torch.ones((), dtype=torch.float64)
    optimizer.step(1e-2, one, one)


def test_state_lists_every_weight_and_moment_with_its_memory() -> None:
    model, optimizer = new_optimizer(0)
    before = {parts.name: parts.memory for parts in optimizer.state()}
    optimizer.release_master_weights()
    state = {parts.name: parts for parts in optimizer.state()}
    names = [name for name, _ in model.named_parameters()]
    state_names = ["model", *(f"optimizer.{moment}" for moment in MOMENTS)]
    assert set(before) == set(state) == {f"{state_name}.{name}" for state_name in state_names for name in names}
    for state_name in state_names:
        for name in names:
            parts, offloaded = state[f"{state_name}.{name}"], name in HOST_OFFLOADED
            assert parts.shape == tuple(model.get_parameter(name).shape) == parts.boxes[0].sizes
            assert parts.memory == ("host" if offloaded else "device") and parts.dtype == torch.float32
            assert before[parts.name] == ("host" if offloaded and state_name != "model" else "device")


def test_a_copy_of_the_state_gives_the_same_next_step() -> None:
    for releases in (True, False):
        (model, optimizer), (other, restored) = new_optimizer(0, releases=releases), new_optimizer(1, releases=releases)
        optimizer.release_master_weights()
        restored.release_master_weights()
        step(model, optimizer)
        for theirs, ours in zip(optimizer.state(), restored.state(), strict=True):
            assert theirs.name == ours.name
            ours.local.copy_(theirs.local)
        restored.set_steps(1)
        step(model, optimizer)
        step(other, restored)
        for theirs, ours in zip(optimizer.state(), restored.state(), strict=True):
            assert torch.equal(theirs.local, ours.local), theirs.name
