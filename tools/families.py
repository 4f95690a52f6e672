"""The page of families: what each can do, from the tests that show it and from the rules that refuse it.

A cell that says yes has a test of the family (`tested`); one that says no has the sentence with which the rule of the feature refuses all
of the family's models (`spec.support`).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from typing import get_args

from tests.distributed import (
    test_context,
    test_deepseek,
    test_drawn,
    test_equality,
    test_experts,
    test_hybrid,
    test_tensor,
)
from tests.distributed.drawn import draw_case
from tests.families import test_families, test_family_features
from tests.families.specimens import SPECIMENS, of_whole_tiles, released
from tests.interop.check import NEWER, VERSION
from tests.serve import test_transformers
from tools.features import parametrized

from meshwright.families.registry import FAMILIES, RELEASES
from meshwright.families.text_part import SAME_AS
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import AxisName, Plan
from meshwright.spec.support import EXPERT, serving_support, training_support

COLUMNS = {
    "import": "read",
    "export": "written",
    "pipeline": "pipeline",
    "replicate": "replicate",
    "shard": "shard",
    "context_ring": "ring",
    "context_ulysses": "Ulysses",
    "tensor": "tensor",
    EXPERT: "expert",
    "hybrid": "hybrid",
    "recompute": "recompute",
    "fp8": "fp8",
    "serve": "served",
    "speculation": "drafts",
    "8-bit weights": "8-bit",
    "fast single decodes on a CPU": "CPU path",
}
"""Heads of the columns by feature."""
PARTS = {
    "recompute": tuple(f"recompute {mode}" for mode in ("selective", "all_but_attention", "full")),
    "8-bit weights": ("fp8 weights", "int8 weights"),
}
"""Features of `spec.support` that a column stands for, if not that of its name."""
Record = tuple[str, str, str]
"""A family, a feature, and the test that shows it."""


def tests() -> Iterator[Record]:
    """Every test of a family's feature."""
    in_families = {
        test_families.test_logits_and_every_gradient_equal_transformers: "import",
        test_families.test_a_folder_read_and_written_again_is_the_same: "export",
        test_family_features.test_recomputation_changes_nothing: "recompute",
        test_family_features.test_matmuls_in_fp8_round_and_nothing_else: "fp8",
        test_family_features.test_texts_with_drafts_are_those_without: "speculation",
        test_family_features.test_weights_in_8_bits_round_and_nothing_else: "8-bit weights",
        test_transformers.test_greedy_texts_equal_a_full_recomputation_and_transformers: "serve",
    }
    for test, feature in in_families.items():
        for given in parametrized(test, slow=True):
            yield given["family"], feature, name_of(test)
    for test, plan, spec in compared():
        axes = [axis for axis in get_args(AxisName) if plan.axis_size(axis) > 1]
        for axis in [*axes, *([EXPERT] if plan.experts and plan.experts.expert > 1 else [])]:
            yield spec.family, axis, name_of(test)
    for family in test_hybrid.OF_FAMILIES:
        yield family, "hybrid", name_of(test_hybrid.test_families_equal_one_device)
    for spec, _ in test_hybrid.CASES:
        yield spec.family, "hybrid", name_of(test_hybrid.test_batches_of_unequal_samples)


def compared() -> Iterator[tuple[Callable[..., None], Plan, ModelSpec]]:
    """Tests that compare plans of several ranks with one device, each with its plan and its model."""
    for test, models, key in (
        (test_drawn.test_families_equal_one_device, test_drawn.FAMILIES, "family"),
        (test_drawn.test_layers_of_several_kinds_equal_one_device, test_drawn.OF_KINDS, "model"),
        (test_drawn.test_float64_equals_one_device, {None: None}, None),
    ):
        for given in parametrized(test, slow=True):
            spec, plan, _ = draw_case(given["seed"], test_drawn.FLOAT64, of=models[key and given[key]])
            yield test, plan, spec
    for test in (
        test_context.test_up_to_four_ranks,
        test_context.test_eight_ranks,
        test_tensor.test_up_to_four_ranks,
        test_experts.test_experts_on_ranks_of_their_own_equal_one_device,
    ):
        for given in parametrized(test, slow=True):
            yield test, given["case"].plan, given["spec"]
    for given in parametrized(test_deepseek.test_random_plans_equal_one_device, slow=True):
        spec, plan, _ = test_deepseek.case_of(given["seed"])
        yield test_deepseek.test_random_plans_equal_one_device, plan, spec
    for given in parametrized(test_equality.test_float64_equals_one_device, slow=True):
        yield test_equality.test_float64_equals_one_device, test_equality.PLANS[given["name"]], given["spec"]
    for given in parametrized(test_experts.test_float64_equals_one_device, slow=True):
        yield test_experts.test_float64_equals_one_device, given["case"].plan, test_experts.of_case(given["case"])


def name_of(test: Callable[..., None]) -> str:
    """The file and the name of a test."""
    return f"{test.__module__.replace('.', '/')}.py::{test.__name__}"


@cache
def tested() -> dict[tuple[str, str], str]:
    """The first test of each family's feature."""
    found: dict[tuple[str, str], str] = {}
    for family, feature, test in tests():
        found.setdefault((family, feature), test)
    return found


@cache
def models_of(family: str) -> tuple[ModelSpec, ...]:
    """The family's released models, and the small model that the tests have of it."""
    return (*released(family), of_whole_tiles(SPECIMENS[family]))


@cache
def facts_of(spec: ModelSpec) -> dict[str, str | None]:
    """What the rule of each feature expects instead of a model."""
    return {each.feature: each.refusal for each in (*training_support(spec), *serving_support(spec))}


def refusals(family: str, feature: str) -> tuple[str | None, ...]:
    """What the rules of a feature expect instead, by model of the family; None where they refuse nothing."""
    names = PARTS.get(feature, (feature,))
    found = map(facts_of, models_of(family))
    return tuple(next((facts[name] for name in names if facts.get(name)), None) for facts in found)


def cell(family: str, feature: str) -> tuple[str, str | None]:
    """yes, no, some (of the family's models) or untested, and the sentence of a refusal."""
    found = refusals(family, feature)
    refusal = next(filter(None, found), None)
    if None not in found:
        return "no", refusal
    if feature not in FAST_PATHS and (family, feature) not in tested():
        return "untested", None
    return ("some" if refusal else "yes"), refusal


PLAIN = {
    r"no key, as the model is dense .*": "The model has no experts that ranks could divide.",
    r"model\.sliding_window = none .*": "Some layers have a sliding window. Hybrid ranks divide long samples, in whose "
    "attention every token sees all tokens before it.",
    r"a divisor of model\.experts = (\d+), as .*": r"Tensor ranks hold different experts, so their number must divide that "
    r"of the experts, here \1, and that of the heads.",
    r"fp8 is not for experts .*": "fp8 weights do not work for experts with biases or clamped SwiGLU; bf16 does.",
}
"""What the rules say of a refusal, as regular expressions, and the same for a reader of the page."""


def in_plain_words(feature: str, refusal: str) -> str:
    """The reason of a refusal for a reader of the page, who has no run before them. Raises LookupError for one without such words."""
    if feature in FAST_PATHS:
        return f"The fast path does not compute {refusal}."
    found = next((match.expand(words) for rule, words in PLAIN.items() if (match := re.fullmatch(rule, refusal))), None)
    if found is None:
        raise LookupError(f"{feature}: {refusal}: add plain words for the page of families")
    return found


FAST_PATHS = ("fast single decodes on a CPU",)
"""Features that decide how something is computed, and not whether: the tests of serving are of both ways."""


def table() -> tuple[list[str], list[str]]:
    """The lines of the table, and the sentences that its numbers stand for."""
    sentences: list[str] = []
    rows = []
    for family in FAMILIES:
        cells = []
        for feature in COLUMNS:
            word, refusal = cell(family, feature)
            if refusal is None:
                cells.append(word)
                continue
            sentence = f"{COLUMNS[feature]}: {in_plain_words(feature, refusal)}"
            if sentence not in sentences:
                sentences.append(sentence)
            cells.append(f"{word} [{sentences.index(sentence) + 1}]")
        rows.append([f"`{family}`", ", ".join(RELEASES[family][:2]), *cells])
    rows = [["family", "for example", *COLUMNS.values()], ["---"] * (2 + len(COLUMNS)), *rows]
    return [f"| {' | '.join(row)} |" for row in rows], sentences


TEXT = """\
# Families

What can each model family do? Each *yes* has a test of the family, listed below. *No* and *some* (of its models) have
the number of the reason below the table. `check`, `train` and `serve` refuse the others before the start, and
`meshwright check model.init=hf:FOLDER` says what one model can have. [What the families are](models.md#families).

The text part of a model that reads images has the row of its family. It is the word `model_type` in `text_config` of
its config.json, but for these:
{parts}.

{table}

{notes}

for example: released models by their names; [models](models.md#families) has more of them.
read, written: Hugging Face folders, with logits and every gradient equal to those of transformers {version}. Folders
written are also read by transformers {older}, which does not know {newer}.
pipeline to expert (axes) and hybrid: ranks that train it, equal to one device in float64.
recompute: all modes. fp8: `plan.linear`. drafts: `speculate`. 8-bit: `weights: fp8` and `int8`.
CPU path: single decodes in few operators; the others take the general path.

| column | shown by |
| --- | --- |
{tests}

`make reference` writes this page.
"""


def page() -> str:
    """The text of the page."""
    lines, sentences = table()
    shown: dict[str, list[str]] = {}
    for (_, feature), test in tested().items():
        head = "axes" if feature in (*get_args(AxisName), EXPERT) and feature != "hybrid" else COLUMNS[feature]
        shown.setdefault(head, [])
        if test not in shown[head]:
            shown[head].append(test)
    return TEXT.format(
        table="\n".join(lines),
        notes="\n".join(
            textwrap.fill(f"{number}. {sentence}", 118, subsequent_indent="   ", break_on_hyphens=False)
            for number, sentence in enumerate(sentences, 1)
        ),
        parts=textwrap.fill(
            "; ".join(f"`{part.removesuffix('_text')}`: `{family}`" for part, family in SAME_AS.items()), 118
        ),
        version="5",
        older=VERSION.rstrip("."),
        newer=" and ".join(f"`{family}`" for family in sorted(NEWER)),
        tests="\n".join(f"| {head} | {', '.join(f'`{test}`' for test in names)} |" for head, names in shown.items()),
    )
