"""A split backward gives the gradients of an ordinary one, also with compilation or recomputation."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.linear import Linear, WeightGradientSink, WeightQueue, with_taps
from meshwright.models.block import Block
from meshwright.parallel.recompute import with_recompute
from meshwright.spec.plan import Recompute
from tests.models.tiny import ALL, GPT2, LLAMA, built, some_tokens

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
SLOWLY = [
    None,
    "eager",
    pytest.param("aot_eager", marks=pytest.mark.slow),
    pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow]),
]
RECOMPUTE = get_args(Recompute)
WIDTH, HIDDEN = 16, 24


def with_sink(model: nn.Module, sink: WeightGradientSink | None = None) -> WeightGradientSink:
    """Give every Linear of the model one sink."""
    sink = sink or WeightGradientSink()
    for module in model.modules():
        if isinstance(module, Linear):
            module.gradient_sink = sink
    return sink


class Layer(nn.Module):
    """Norms, nonlinearities and residuals between matmuls: results an in-place compiler would like to write over.

    Without `norm` the first matmul's input is the block's own.
    """

    def __init__(self, linear: type[nn.Linear], bias: bool, norm: bool) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.rand(WIDTH) + 0.5) if norm else None
        self.gate_up = linear(WIDTH, 2 * HIDDEN, bias=bias)
        self.down = linear(HIDDEN, WIDTH, bias=bias)
        self.mix = linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x if self.norm is None else F.rms_norm(x, (WIDTH,), self.norm)).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * up)
        return x + 0.5 * torch.tanh(self.mix(x))


def call(forward: Callable[..., Any], mode: Recompute, block: nn.Module, *inputs: Any) -> Any:
    return with_recompute(partial(forward, block), mode)(*inputs)


def wrap(blocks: Iterable[nn.Module], compiler: str | None, mode: Recompute, *, split: bool = True) -> None:
    """As `parallel.apply` does: one compiled function for all blocks, recompute inside."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = call if compiler is None else torch.compile(call, fullgraph=True, dynamic=False, backend=compiler)
    for block in blocks:
        block.forward = partial(run, type(block).forward, mode, block)
        if split:
            block.forward = with_taps(block.forward, [block])


def stack(
    linear: type[nn.Linear], dtype: torch.dtype = torch.float64, *, bias: bool = True, norm: bool = True
) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(linear, bias, norm) for _ in range(3))).to(dtype)


def batches(count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, 6, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(count)
    ]


def gradients(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    gradients_by_name = {
        name: weight.grad for name, weight in model.named_parameters() if not name.endswith("choice_bias")
    }  # a choice of experts has no gradient
    gradients_by_name |= {f"input {index}": x.grad for index, x in enumerate(inputs)}
    assert all(grad is not None for grad in gradients_by_name.values()), [
        name for name, grad in gradients_by_name.items() if grad is None
    ]
    return gradients_by_name


def ordinary(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    for x in inputs:
        model(x).square().sum().backward()
    return gradients(model, inputs)


def deferred(model: nn.Module, inputs: list[Tensor], drains: str = "in order") -> dict[str, Tensor]:
    """All forwards, then all input gradients, then all weight gradients."""
    sink = with_sink(model)
    outputs = [model(x) for x in inputs]
    queues = [WeightQueue() for _ in inputs]
    for output, queue in zip(outputs, queues, strict=True):
        with sink.defer_to(queue):
            output.square().sum().backward()
        assert queue.pending == len([module for module in model.modules() if isinstance(module, Linear)])
    for queue in queues if drains == "in order" else reversed(queues):
        queue.drain(model.parameters())
        assert queue.pending == 0
    return gradients(model, inputs)


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        error = (ours[name].double() - grad.double()).norm() / grad.double().norm()
        assert error < bound, f"{name}: {error}"


def deferred_cases() -> Iterator[Any]:
    """Every compiler with every mode; of those that take long, some are quick."""
    quick: dict[str, tuple[str, ...]] = {"aot_eager": ("full", "selective"), "inductor": ()}
    for compiler in (None, "eager", "aot_eager", "inductor"):
        for mode in RECOMPUTE:
            marks = [needs_compiler] * (compiler == "inductor")
            marks += [pytest.mark.slow] * (mode not in quick.get(compiler or "", RECOMPUTE))
            yield pytest.param(compiler, mode, marks=marks)


@pytest.mark.parametrize(("compiler", "mode"), list(deferred_cases()))
def test_deferred_gradients_equal_those_of_nn_linear(compiler: str | None, mode: Recompute) -> None:
    model = stack(Linear)
    wrap(model, compiler, mode)
    ours = deferred(model, batches(2))
    assert_equal(ours, ordinary(stack(nn.Linear), batches(2)), 1e-12)
    if compiler is not None:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "all blocks share one graph"


@pytest.mark.parametrize("drains", ["in order", "last first"])
@pytest.mark.parametrize(("bias", "norm"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("compiler", [None, pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_micro_batches_in_flight(compiler: str | None, bias: bool, norm: bool, drains: str) -> None:
    """Input gradients of all three, then their weight gradients in either order."""
    model = stack(Linear, bias=bias, norm=norm)
    wrap(model, compiler, "none")
    ours = deferred(model, batches(3), drains)
    assert_equal(ours, ordinary(stack(nn.Linear, bias=bias, norm=norm), batches(3)), 1e-12)


@pytest.mark.parametrize("compiler", [None, pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_without_a_queue_backward_is_whole(compiler: str | None) -> None:
    model = stack(Linear)
    wrap(model, compiler, "selective")
    assert_equal(ordinary(model, batches(2)), ordinary(stack(nn.Linear), batches(2)), 1e-12)


@pytest.mark.parametrize("compiler", [None, pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_matmuls_are_handed_over_one_by_one(compiler: str | None) -> None:
    """Of every weight and micro-batch once, and nothing is left in its gradient; a factor on one is seen."""
    model, sums = stack(Linear), {}
    wrap(model, compiler, "selective")
    names = {
        id(module.weight): f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Linear)
    }
    inputs = batches(2)

    def add(weight: Tensor, a: Tensor, b: Tensor) -> None:
        assert weight.grad is None
        sums[names[id(weight)]] = sums.get(names[id(weight)], 0.0) + a @ b

    with_sink(model, WeightGradientSink(add))
    for x in inputs:
        model(x).square().sum().backward()
    for name, weight in model.named_parameters():
        if name in sums:
            weight.grad = sums[name]
    theirs = ordinary(stack(nn.Linear), batches(2))
    assert len(sums) == 9
    assert_equal(gradients(model, inputs), theirs, 1e-12)
    next(iter(sums.values())).mul_(1 + 1e-9)
    with pytest.raises(AssertionError):
        assert_equal(gradients(model, inputs), theirs, 1e-12)


@pytest.mark.parametrize("compiler", [None, pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_bf16_is_as_near_to_the_truth(compiler: str | None) -> None:
    exact = [x.detach().double().requires_grad_() for x in batches(2, torch.bfloat16)]
    truth = ordinary(stack(nn.Linear, torch.bfloat16).double(), exact)
    theirs = ordinary(stack(nn.Linear, torch.bfloat16), batches(2, torch.bfloat16))
    model = stack(Linear, torch.bfloat16)
    wrap(model, compiler, "selective")
    ours = deferred(model, batches(2, torch.bfloat16))
    assert {grad.dtype for grad in ours.values()} == {torch.bfloat16}
    for grads in (ours, theirs):
        assert_equal(grads, truth, 1.5e-2)


@pytest.mark.parametrize(
    ("compiler", "spec"),
    [
        *(pytest.param(None, spec, id=name) for name, spec in ALL.items()),
        pytest.param("inductor", LLAMA, marks=[needs_compiler, pytest.mark.slow], id="inductor-llama"),
        pytest.param(
            "inductor",
            replace(GPT2, parallel_block=True),
            marks=[needs_compiler, pytest.mark.slow],
            id="inductor-gpt2-parallel",
        ),
    ],
)
def test_every_gradient_of_a_decoder(compiler: str | None, spec: Any) -> None:
    tokens = some_tokens(spec, batch=2, seq=13)
    reference, model = (built(spec, reference=True) for _ in range(2))
    reference(tokens, targets=tokens.roll(-1, 1)).backward()
    wrap((module for module in model.modules() if isinstance(module, Block)), compiler, "selective")
    queue, sink = WeightQueue(), with_sink(model)
    with sink.defer_to(queue):
        model(tokens, targets=tokens.roll(-1, 1)).backward()
    matmuls = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    assert queue.pending == len(matmuls) and (spec.experts or len(matmuls) == 4 * spec.layers)
    assert all(model.get_parameter(f"{name}.weight").grad is None for name in matmuls)
    queue.drain()
    assert_equal(gradients(model, []), gradients(reference, []), 1e-12)


def test_what_is_not_split_traces_to_the_graph_of_nn_linear() -> None:
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        del inputs
        graphs.append(graph.code)
        return graph.forward

    for layer_class in (nn.Linear, Linear):
        model = stack(layer_class)
        wrap(model, keep, "none", split=False)  # type: ignore[arg-type]
        model(batches(1)[0]).sum().backward()
    assert len(graphs) == 2
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_no_grad_between_forward_and_backward(compiler: str | None) -> None:
    """A validation of another length does not disturb what is in flight."""
    model = stack(Linear)
    wrap(model, compiler, "full")
    (x,) = batches(1)
    sink = with_sink(model)
    output, queue = model(x), WeightQueue()
    with torch.no_grad():
        model(torch.randn(5, 2, WIDTH, dtype=torch.float64))
    with sink.defer_to(queue):
        output.square().sum().backward()
    queue.drain()
    assert_equal(gradients(model, [x]), ordinary(stack(nn.Linear), batches(1)), 1e-12)


def test_frozen_weights_park_nothing() -> None:
    model = stack(Linear)
    model[0].down.weight.requires_grad_(False)
    wrap(model, None, "none")
    queue, sink = WeightQueue(), with_sink(model)
    with sink.defer_to(queue):
        model(batches(1)[0]).sum().backward()
    queue.drain()
    assert model[0].down.weight.grad is None
    assert model[1].down.weight.grad is not None


def model_with_deferred_gradients() -> tuple[nn.Sequential, WeightQueue, WeightGradientSink]:
    model, queue = stack(Linear), WeightQueue()
    wrap(model, None, "none")
    sink = with_sink(model)
    output = model(batches(1)[0]).sum()
    with sink.defer_to(queue):
        output.backward()
    return model, queue, sink


def test_a_queue_drains_unit_by_unit_and_misses_no_weight() -> None:
    model, queue, _ = model_with_deferred_gradients()
    with pytest.raises(RuntimeError, match="not among the 7 given.*" + r"\(48, 16\)"):
        queue.drain(model[2].parameters())
    assert queue.pending == 9
    assert model[2].down.weight.grad is None
    for block in reversed(model):
        queue.drain(block.parameters(), partial=True)
        assert all(parameter.grad is not None for parameter in block.parameters())
    assert queue.pending == 0
    assert_equal(gradients(model, []), gradients(ordinary_sum(), []), 1e-12)


def ordinary_sum() -> nn.Module:
    model = stack(nn.Linear)
    model(batches(1)[0]).sum().backward()
    return model


def test_a_queue_that_was_not_drained_is_refused() -> None:
    _, queue, sink = model_with_deferred_gradients()
    with pytest.raises(RuntimeError, match="still holds 9 weight gradients"), sink.defer_to(queue):
        pass
    queue.drain()
    with sink.defer_to(queue):
        pass


def test_queues_do_not_nest() -> None:
    sink = WeightGradientSink()
    with (
        sink.defer_to(WeightQueue()),
        pytest.raises(RuntimeError, match="one queue at a time"),
        sink.defer_to(WeightQueue()),
    ):
        pass
    with sink.defer_to(WeightQueue()):
        pass


def test_a_factor_that_was_written_to_is_refused() -> None:
    """The gradient that a backward starts from may itself be a factor: residuals pass it on unchanged."""
    block, queue = nn.Sequential(Linear(WIDTH, WIDTH)).double(), WeightQueue()
    block.forward = with_taps(block.forward, [block])
    sink = with_sink(block)
    output = block(batches(1)[0])
    received = torch.ones_like(output)
    with sink.defer_to(queue):
        output.backward(received)
    received.mul_(2)
    with pytest.raises(RuntimeError, match="overwritten before it was used"):
        queue.drain()


def test_the_queue_is_seen_from_autograds_own_threads() -> None:
    model, queue = stack(Linear), WeightQueue()
    wrap(model, None, "none")
    sink = with_sink(model)
    output = model(batches(1)[0]).sum()
    with sink.defer_to(queue):
        thread = threading.Thread(target=output.backward)
        thread.start()
        thread.join()
    assert queue.pending == 9


@needs_compiler
def test_inductor_writes_over_what_a_graph_parks_behind_its_back() -> None:
    """Why X and dY leave as outputs: the same comparison fails for an operator that keeps its arguments."""
    saved_pairs: list[tuple[Tensor, Tensor]] = []

    @torch.library.custom_op("meshwright_test::park", mutates_args=())
    def park(grad: Tensor) -> Tensor:
        saved_pairs.append((grad, grad.clone()))
        return grad.sum()

    @park.register_fake
    def _(grad: Tensor) -> Tensor:
        return grad.new_empty(())

    @torch.compile(fullgraph=True)
    def graph(x: Tensor) -> Tensor:
        y = x.sin()
        total = park(y)
        return (y.cos() @ y.exp()) * total

    graph(torch.randn(64, 64, dtype=torch.float64))
    ((parked, original),) = saved_pairs
    assert not torch.equal(parked, original)
