"""Support of each model family: Hugging Face folders in and out, axes of training, inference engine.

Every entry comes from the tests or from the engine itself. `python -m tests.docs.families` writes the table of the page.
"""

from __future__ import annotations

from typing import get_args

import torch
from tests.distributed import test_hybrid
from tests.docs.features import PAGE, compared, with_table
from tests.docs.pages import ROOT, text_of
from tests.families.test_families import CASES
from tests.interop.check import EXPORTED, NEWER, VERSION
from tests.models.tiny import built

from meshwright.families.registry import FAMILIES
from meshwright.serve.engine import Engine
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import AxisName

HEAD = ["family", "read from Hugging Face", "written for it", "axes", "served"]
EXPERT = "expert"


def axes_by_family() -> dict[str, set[str]]:
    """Returns the axes with which tests compare a family's training with one device."""
    axes: dict[str, set[str]] = {}
    for plan, spec in compared():
        used = {name for name in get_args(AxisName) if plan.axis_size(name) > 1}
        used |= {EXPERT} if plan.experts and plan.experts.expert > 1 else set()
        axes.setdefault(spec.family, set()).update(used)
    for family in ("llama", "gpt2", *test_hybrid.OF_FAMILIES):
        axes[family].add("hybrid")
    return axes


def is_served(family: str) -> bool:
    """Whether the inference engine takes a model of the family."""
    spec = next(spec for spec in EXPORTED.values() if spec.family == family)
    try:
        Engine(built(spec, dtype=torch.float32))
    except BadInput:
        return False
    return True


def lines() -> list[str]:
    """Returns the lines of the table."""
    read, written, axes = set(CASES), {spec.family for spec in EXPORTED.values()}, axes_by_family()
    words = {True: "yes", False: "no"}
    rows = [HEAD, ["---"] * len(HEAD)]
    for family in FAMILIES:
        names = [name for name in (*get_args(AxisName), EXPERT) if name in axes.get(family, ())]
        versions = "5" if family in NEWER else f"5 and {VERSION.rstrip('.')}"
        exported = f"transformers {versions}" if family in written else "no"
        rows.append(
            [f"`{family}`", words[family in read], exported, ", ".join(names) or "none", words[is_served(family)]]
        )
    return [f"| {' | '.join(row)} |" for row in rows]


def rewritten(text: str) -> str:
    """Returns the page's text with a new table."""
    return with_table(text, f"| {HEAD[0]} | {HEAD[1]}", lines())


if __name__ == "__main__":
    (ROOT / PAGE).write_text(rewritten(text_of(PAGE)), encoding="utf-8")
