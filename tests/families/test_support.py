"""What `spec.support` says that a model cannot have is refused before a start, with the same sentence."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.config.load import load_run
from meshwright.families.registry import FAMILIES, RELEASES
from meshwright.models.decoder import Decoder
from meshwright.parallel.expert_inference import distribute_for_inference
from meshwright.parallel.tensor_inference import divide_for_inference
from meshwright.serve.engine import Engine
from meshwright.spec.engine import EngineOptions, Speculation
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import AxisPart
from meshwright.spec.model import ModelSpec
from meshwright.spec.support import serving_support, support_as_plain, support_lines, training_support
from tests.families.specimens import as_words
from tests.interop.check import EXPORTED
from tests.models.tiny import LLAMA, PARALLEL, built

MODELS = {**EXPORTED, "one head": replace(LLAMA, heads=1, kv_heads=1), "parallel": PARALLEL}
RUN = ["train.steps=2", "train.seq_len=16", "train.global_batch=4", "cluster.gpu=cpu", "cluster.gpus_per_node=2"]
SAMPLES = ["data.packing=none", "train.global_batch=null", "train.global_batch_tokens=64"]
BESIDE = {"hybrid": SAMPLES, "expert": ["plan.shard=2"]}
"""What a run with such ranks has in any case."""
OPTIONS = {
    "fp8 weights": EngineOptions(weights="fp8"),
    "int8 weights": EngineOptions(weights="int8"),
    "mtp": EngineOptions(speculation=Speculation(tokens=1, mtp=True)),
}
ON_GPUS = {"invariant results on a GPU", "fast single decodes on a CPU"}
"""Refused by tests/gpu, and no refusal but another path."""


def cases(part: str) -> list[tuple[str, str, str]]:
    """(model, feature, sentence): one model for each sentence."""
    support = training_support if part == "train" else serving_support
    found: dict[tuple[str, str], str] = {}
    for name, spec in MODELS.items():
        for each in support(spec):
            only_gpus = each.feature in ON_GPUS or (each.refusal or "").startswith("fp8 weights need")
            if each.refusal is not None and not only_gpus:
                found.setdefault((each.feature, each.refusal), name)
    return [(name, feature, refusal) for (feature, refusal), name in found.items()]


@pytest.mark.parametrize(("model", "feature", "refusal"), cases("train"))
def test_a_run_with_what_its_model_cannot_have_is_refused(model: str, feature: str, refusal: str) -> None:
    pin = "plan.linear=fp8_tensorwise" if feature == "fp8" else f"plan.{feature}=2"
    with pytest.raises(BadInput) as error:
        load_run(None, [*as_words(MODELS[model]), *RUN, *BESIDE.get(feature, []), pin])
    assert f"expected {refusal}" in str(error.value)


@pytest.mark.parametrize(("model", "feature", "refusal"), cases("serve"))
def test_an_engine_with_what_its_model_cannot_have_is_refused(model: str, feature: str, refusal: str) -> None:
    spec, two, group = MODELS[model], AxisPart(0, 2), torch.distributed.ProcessGroup(0, 2)
    with pytest.raises(BadInput) as error:
        if feature == "tensor ranks":
            divide_for_inference(empty(spec), two, group)
        elif feature == "expert ranks":
            distribute_for_inference(empty(spec), two, group)
        else:
            Engine(built(spec, dtype=torch.float32), options=OPTIONS[feature])
    assert refusal in str(error.value)


def empty(spec: ModelSpec) -> Decoder:
    with torch.device("meta"):
        return Decoder(spec)


def test_all_kinds_of_refusals_have_a_model() -> None:
    assert {feature for _, feature, _ in cases("train")} == {"tensor", "context_ulysses", "hybrid", "expert", "fp8"}
    assert {feature for _, feature, _ in cases("serve")} == {"tensor ranks", "expert ranks", *OPTIONS}


def test_lines_have_every_feature_once() -> None:
    spec = EXPORTED["gpt-oss"]
    expected = []
    for verb, facts in zip(("trained", "served"), support_as_plain(spec).values(), strict=True):
        expected.append(f"gpt_oss can be {verb} with {', '.join(name for name, fact in facts.items() if fact is True)}")
        refusals = {name: str(fact) for name, fact in facts.items() if fact is not True and name != "mtp"}
        expected += [f"  not with {name}: {text.removeprefix(f'{name}: ')}" for name, text in refusals.items()]
    assert list(support_lines(spec)) == expected
    assert max(map(len, support_lines(spec))) < 200


def test_lines_leave_out_parts_that_the_model_does_not_have() -> None:
    text = "\n".join(support_lines(MODELS["gpt2"]))
    assert "not with fp8: " in text and "expert" not in text and "mtp" not in text


def test_every_family_is_found_by_names_of_released_models() -> None:
    names = [name for family in FAMILIES for name in RELEASES[family]]
    assert all(RELEASES.values()) and len(set(names)) == len(names)
    page = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    found = {
        family: row[1].split(", ") for row in rows for family in re.findall(r"`(\w+)`", row[0]) if family in FAMILIES
    }
    assert found.keys() == FAMILIES.keys()
    for family, shown in found.items():
        assert set(RELEASES[family]) <= set(shown), family
