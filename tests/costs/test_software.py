"""Software of published runs: found by name and by source, each with constants that exist."""

from __future__ import annotations

import pytest

from meshwright.costs.constants import constants, table
from meshwright.costs.software import OTHER, SOFTWARE, TrainingSoftware, parent_of, software_named, software_of
from meshwright.spec.errors import BadInput


@pytest.mark.parametrize("software", SOFTWARE, ids=lambda software: software.name)
def test_constants_of_each_software_exist_or_are_its_parents(software: TrainingSoftware) -> None:
    stacks = table()["stacks"]
    fitted = software.constants in stacks or software.parent in stacks
    assert fitted or "constants of all software" in software.about, "what `plan --software` prints has to say so"


def test_a_child_has_its_own_few_constants_and_its_parents_others() -> None:
    own = table()["stacks"]["kempnerforge"]
    assert len(own) <= 6
    child, parent = constants("hopper", "kempnerforge"), constants("hopper", parent_of("kempnerforge"))
    assert child.slow == own["slow"] != parent.slow
    assert child.passes == parent.passes and child.scatter_bytes == parent.scatter_bytes == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize(
    ("source", "note", "year", "name"),
    [
        ("pytorch/torchtitan docs", "", 0.0, "torchtitan"),
        ("NVIDIA-NeMo/Automodel docs", "", 2026.6, "automodel"),
        ("NVIDIA-NeMo/Megatron-Bridge docs", "container 26.06", 2026.4, "megatron-bridge"),
        ("a report (Megatron-LM)", "", 2026.0, "megatron-core"),
        ("a report (Megatron-LM)", "", 2021.0, "megatron-lm-2021"),
        ("MegaScale table", "Megatron-LM baseline", 0.0, "megatron-lm-2021"),
        ("nothing known", "", 0.0, OTHER.name),
    ],
)
def test_software_by_source(source: str, note: str, year: float, name: str) -> None:
    assert software_of(source, note, year).name == name


def test_software_by_name_ignores_case_and_punctuation() -> None:
    assert software_named("Megatron Bridge") is software_named("megatron-bridge")
    with pytest.raises(BadInput, match="software torchtitn: expected one of .* \\(nearest: torchtitan\\)"):
        software_named("torchtitn")
