"""MoE models: against a loop over tokens and experts, the balance loss, and loss and gradients of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.checkpoint.models.hf import import_hf
from meshwright.models.hooks import BlockHooks
from meshwright.models.moe import MoELayer, RoutedOutput
from meshwright.spec.model import moe_of as described_moe
from meshwright.spec.model import parameters
from tests.checkpoint.test_hf import Rotary
from tests.models.tiny import MIXTRAL, MOE_LAYERS, SHARED, built, some_tokens
from tests.slow import quick_first


def moe_of(model_name: str, **options: Any) -> MoELayer:
    return built(MOE_LAYERS[model_name], **options).layers["1"].moe


def some_input(batch: int = 2, seq: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(batch, seq, MIXTRAL.hidden, generator=generator, dtype=torch.float64)


def naive(moe: MoELayer, spec: Any, token: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Output and chosen experts of one token, most probable expert first."""
    probabilities = torch.softmax(moe.router(token), 0)
    chosen = sorted(range(spec.experts), key=lambda e: -probabilities[e].item())[: spec.experts_per_token]
    total = sum(probabilities[e] for e in chosen) if spec.normalised_routing else 1.0
    y = torch.zeros_like(token)
    biases = [getattr(moe.experts, f"{name}_bias", torch.zeros(spec.experts, 1)) for name in ("gate_up", "down")]
    for e in chosen:
        if spec.mlp == "clamped_swiglu":
            gate, up = (moe.experts.gate_up[e] @ token + biases[0][e]).chunk(2)
            gate = gate.minimum(torch.tensor(7.0))
            activation = gate / (1 + torch.exp(-1.702 * gate)) * (up.clamp(-7, 7) + 1)
        elif spec.mlp == "swiglu":
            gate, up = (moe.experts.gate_up[e] @ token).chunk(2)
            activation = F.silu(gate) * up
        else:
            activation = F.gelu(moe.experts.up[e] @ token, approximate="tanh")
        y = y + probabilities[e] / total * (moe.experts.down[e] @ activation + biases[1][e])
    shared = 0 if moe.shared is None else moe.shared(token)
    return y + (shared if moe.shared_gate is None else torch.sigmoid(moe.shared_gate(token)) * shared), chosen


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("model_name", MOE_LAYERS)
def test_every_token_is_routed_to_its_most_probable_experts(model_name: str, reference: bool) -> None:
    spec, moe, x = MOE_LAYERS[model_name], moe_of(model_name, reference=reference), some_input()
    routed = moe(x)
    loads = torch.zeros(2, spec.experts, dtype=torch.float64)
    for sequence in range(2):
        for position in range(x.shape[1]):
            y, chosen = naive(moe, spec, x[sequence, position])
            assert torch.allclose(routed.x[sequence, position], y, rtol=1e-10, atol=1e-12)
            loads[sequence, chosen] += 1
    assert torch.equal(routed.load.double(), loads.sum(0))
    means = torch.softmax(moe.router(x), -1).mean(1)
    balance = sum(spec.experts * (load / load.sum()) @ mean for load, mean in zip(loads, means, strict=True))
    assert torch.allclose(routed.balance, balance, rtol=1e-12)


def test_balance_is_1_for_even_loads_and_the_number_of_experts_for_one_loaded_expert() -> None:
    moe, x = moe_of("shared expert"), some_input(batch=3)
    with torch.no_grad():
        moe.router.weight.zero_()
        assert moe(x).balance == pytest.approx(3 * 1.0)  # all probabilities are equal, whichever experts are chosen
        moe.router.weight[2] = 100 * x.mean((0, 1))
        x = x.abs() * x.mean((0, 1)).sign()  # every token points to expert 2
        uneven = moe(x)
    assert uneven.balance == pytest.approx(3 * SHARED.experts, rel=1e-3)
    assert uneven.load.tolist() == [0, 0, 36, 0]
    assert not uneven.x.isnan().any()


class CountedOperators(TorchDispatchMode):
    """Counts operators that compute: views take no time on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_inference_computes_no_losses() -> None:
    """By torch's operators on the meta device, where no kernel runs: without balance loss and sums that nobody reads."""
    counts = {}
    for losses in (False, True):
        moe, x = moe_of("mixtral").to("meta"), some_input().to("meta")
        with CountedOperators() as operators:
            moe(x, losses=losses)
        counts[losses] = len(operators.names)
    assert counts[False] <= counts[True] - 12


@torch.no_grad()
@pytest.mark.parametrize("model_name", MOE_LAYERS)
def test_inference_has_the_output_of_training(model_name: str) -> None:
    moe, x = moe_of(model_name), some_input()
    assert torch.equal(moe(x, losses=False), moe(x).x)


def test_experts_without_tokens_have_zero_gradients() -> None:
    moe, x = moe_of("mixtral"), some_input(batch=1, seq=1)
    routed = moe(x)
    routed.x.sum().backward()
    idle = routed.load == 0
    assert idle.sum() == MIXTRAL.experts - MIXTRAL.experts_per_token
    for weight in moe.experts.parameters():
        assert not weight.grad[idle].any()
        assert all(gradient.any() for gradient in weight.grad[~idle])


def test_the_balance_loss_reaches_the_router() -> None:
    """Its gradient moves the router towards experts that are chosen less."""
    moe, x = moe_of("mixtral"), some_input(batch=8)
    before = moe(x).balance
    (gradient,) = torch.autograd.grad(before, moe.router.weight)
    with torch.no_grad():
        moe.router.weight -= 0.01 * gradient / gradient.norm()
    assert moe(x).balance < before


def test_the_squares_of_the_router_z_loss_are_those_of_its_logits() -> None:
    moe, x = moe_of("mixtral"), some_input(batch=3)
    assert moe(x).squares == 0
    moe.z_loss = True
    squares = moe(x).squares
    expected = moe.router(x).exp().sum(-1).log().square().sum()
    assert torch.allclose(squares, expected, rtol=1e-12)
    for ours, theirs in zip(
        *(torch.autograd.grad(each, moe.router.weight) for each in (squares, expected)), strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-10)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
@pytest.mark.parametrize("model_name", quick_first(1, ["mixtral", "shared expert"]))
def test_a_block_compiles_whole(model_name: str) -> None:
    model, tokens = built(MOE_LAYERS[model_name]), some_tokens(MOE_LAYERS[model_name])
    results = []
    for wrap in (False, True):
        for block in model.layers.values():
            block.moe.z_loss = True
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager") if wrap else block.forward
        loss, balance, _ = model.losses(tokens, tokens)
        results.append([loss, balance, *torch.autograd.grad(loss + balance, tuple(model.parameters()))])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_the_host_reads_no_value_before_the_experts() -> None:
    """On the meta device the host can read no value; the whole block runs there."""
    with torch.device("meta"):
        moe = MoELayer(described_moe(MIXTRAL), MIXTRAL.hidden, reference=False, hooks=BlockHooks())
        routed = moe(torch.empty(2, 12, MIXTRAL.hidden))
    assert isinstance(routed, RoutedOutput)
    assert routed.x.shape == (2, 12, MIXTRAL.hidden) and routed.load.shape == (MIXTRAL.experts,)


def their_model(model_name: str, layers: int, weight: float) -> Any:
    import transformers as t

    small = {
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "initializer_range": 0.2,
        "intermediate_size": 40,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": weight,
        "output_router_logits": bool(weight),
    }
    config = {
        "mixtral": lambda: t.MixtralConfig(num_local_experts=5, **small),
        "qwen3 moe": lambda: t.Qwen3MoeConfig(num_experts=6, moe_intermediate_size=24, norm_topk_prob=True, **small),
    }[model_name]()
    torch.manual_seed(0)
    return t.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")


def as_ours(name: str, theirs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight or gradient of transformers for our parameter; transformers stacks experts in memory too."""
    if not name.startswith("layers."):
        return theirs[
            {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}.get(
                name, "lm_head.weight"
            )
        ]
    _, layer, part = name.split(".", 2)
    at = f"model.layers.{layer}."
    if part == "attention.qkv.weight":
        return torch.cat([theirs[f"{at}self_attn.{x}_proj.weight"] for x in "qkv"])
    names = {
        "attention_norm.weight": "input_layernorm.weight",
        "attention.out.weight": "self_attn.o_proj.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        "moe.router.weight": "mlp.gate.weight",
        "moe.experts.gate_up": "mlp.experts.gate_up_proj",
        "moe.experts.down": "mlp.experts.down_proj",
        "attention.q_norm.weight": "self_attn.q_norm.weight",
        "attention.k_norm.weight": "self_attn.k_norm.weight",
    }
    return theirs[at + names[part]]


@pytest.mark.parametrize(("layers", "weight"), [(1, 0.5), (2, 0.0)])
@pytest.mark.parametrize("model_name", ["mixtral", "qwen3 moe"])
def test_loss_and_every_gradient_equal_transformers(
    model_name: str, layers: int, weight: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers computes the balance loss over batch and layers together and counts every copy of a token.

    For one sequence and one layer it is experts_per_token times ours.
    """
    theirs = their_model(model_name, layers, weight)
    theirs.save_pretrained(tmp_path)
    spec, reader = import_hf(tmp_path)
    ours = built(spec)
    with torch.no_grad():
        for parameter in parameters(spec):
            ours.get_parameter(parameter.name).copy_(reader.read(parameter))
    tokens = some_tokens(spec, batch=1, seq=60)
    theirs = theirs.double()
    theirs.model.rotary_emb = Rotary(spec)
    with (
        monkeypatch.context() as patched
    ):  # transformers uses fp32 for norms, softmax and the loss, whatever the model's dtype
        patched.setattr(torch, "float32", torch.float64)
        patched.setattr(torch, "float", torch.float64)
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        answer = theirs(tokens, labels=tokens)
        answer.loss.backward()
    loss, balance, _ = ours.losses(tokens, tokens.roll(-1, 1).index_fill(1, torch.tensor([59]), -1))
    total = loss / 59 + weight * spec.experts_per_token * balance
    total.backward()
    assert torch.allclose(total, answer.loss, rtol=1e-10)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        exact = as_ours(name, gradients)
        assert (parameter.grad - exact).norm() <= 1e-9 * exact.norm(), name
