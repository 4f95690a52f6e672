"""Every family with every mode of recomputation, matmuls in fp8, drafts, and 8-bit weights; the page of families lists
these tests.

Other tests compare each feature with an exact reference. These run it with every family. Where it rounds they see large mistakes only:
EXAONE 4 without norms of heads differs by 1.2 in gradients, by 0.28 if all layers rotate, FlexOlmo with weights normalised by 0.003.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.parallel.apply import wrap_blocks
from meshwright.parallel.fp8_weights import use_fp8_matmuls
from meshwright.spec.engine import Speculation, WeightFormat
from meshwright.spec.plan import RECOMPUTE_MODES, BatchPlan, LayerStrategy, Plan, Precision
from meshwright.spec.serving_limits import weights_error
from tests.families.specimens import SPECIMENS, of_whole_tiles
from tests.models.tiny import built, some_tokens
from tests.serve.helpers import PROMPTS, engine_of, record_logits, texts
from tests.slow import quick_first

ROUNDED = 0.3
"""Most that 8-bit matmuls may change a gradient, or logits, relative to its norm: seen are 0.23 (Mixtral) and 0.13."""
WITHOUT_INPUT_NORMS = 0.4
"""The same of gradients where norms are of outputs alone: seen are 0.38 (FlexOlmo) and 0.34 (EXAONE 4), alike in all weights.

Their norms give every sublayer's output the size of the residual stream, and with it the output's rounding. OLMoE, which is FlexOlmo with
norms of inputs, has 0.14, Qwen3 0.13.
"""


def gradients(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a step."""
    tokens = some_tokens(model.spec, batch=1)
    loss = model(tokens, targets=tokens.roll(-1, 1)) / tokens.numel()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plan_of(**fields: object) -> Plan:
    """A plan of one device."""
    return Plan(
        mesh=(),
        batch=BatchPlan(global_batch=1, micro_batch=1, accumulate=1),
        **{"layers": (LayerStrategy(),), "compile": False, **fields},
    )


@pytest.mark.parametrize("family", quick_first(2, SPECIMENS))
def test_recomputation_changes_nothing(family: str) -> None:
    loss, exact = gradients(built(SPECIMENS[family]))
    for mode in RECOMPUTE_MODES[1:]:
        model = built(SPECIMENS[family])
        wrap_blocks(model, plan_of(layers=(LayerStrategy(recompute=mode),)))
        again, found = gradients(model)
        assert torch.equal(loss, again) and found.keys() == exact.keys()
        assert all(torch.equal(found[name], gradient) for name, gradient in exact.items()), mode


@pytest.mark.parametrize("family", quick_first(2, SPECIMENS))
def test_matmuls_in_fp8_round_and_nothing_else(family: str) -> None:
    spec = of_whole_tiles(SPECIMENS[family])
    model = built(spec, dtype=torch.float32)
    rounded = copy.deepcopy(model)
    use_fp8_matmuls(rounded, plan_of(precision=Precision(compute="fp32", linear="fp8_rowwise")), torch.device("cpu"))
    (loss, exact), (near, found) = gradients(model), gradients(rounded)
    assert 0 < abs(near - loss) < 0.1 * loss and found.keys() == exact.keys()
    assert difference(found, exact) < (ROUNDED if spec.input_norms else WITHOUT_INPUT_NORMS)


def difference(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Relative difference of all gradients together."""
    squares = sum((found[name] - exact[name]).square().sum() for name in exact)
    return float((squares / sum(gradient.square().sum() for gradient in exact.values())).sqrt())


@torch.no_grad()
@pytest.mark.parametrize("family", quick_first(2, SPECIMENS))
def test_texts_with_drafts_are_those_without(family: str) -> None:
    model = built(SPECIMENS[family], dtype=torch.float32)
    drafting = engine_of(model, speculation=Speculation(shortest=1))
    assert texts(drafting) == texts(engine_of(model))


@torch.no_grad()
@pytest.mark.parametrize("weights", ["fp8", "int8"])
@pytest.mark.parametrize(
    "family", quick_first(2, [name for name in SPECIMENS if not weights_error(SPECIMENS[name], "fp8")])
)
def test_weights_in_8_bits_round_and_nothing_else(family: str, weights: WeightFormat) -> None:
    model = built(of_whole_tiles(SPECIMENS[family]), dtype=torch.float32)
    engine, exact = engine_of(model, weights=weights), engine_of(model)
    logits = [record_logits(each) for each in (engine, exact)]
    for each in (engine, exact):
        texts(each, PROMPTS[:1], new_tokens=1)
    rounded, whole = (torch.stack(seen[0]) for seen in logits)
    assert 0 < (rounded - whole).norm() < ROUNDED * whole.norm()
