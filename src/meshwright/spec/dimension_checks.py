"""Checks that the dimensions of a ModelSpec fit each other.

These are the only rules for run files, folders and models. Without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from meshwright.spec.errors import BadInput, WrongKey
from meshwright.spec.fields import describe_type, hints_of, within
from meshwright.spec.model import MOST_PARAMETERS, SCALINGS, ModelSpec, described_bodies, parameter_count, unusable_keys

MOST_EXPERTS = 10**6
"""Largest number of routed experts of all layers together.

Each expert is a few tensors of a folder, and their names are listed.
"""


def check_dimensions(spec: ModelSpec, where: str = "model") -> None:
    """Raise BadInput, with all mistakes, if fields of a model do not fit each other.

    `where` is the file or the section from which the fields come.
    """
    mistakes = [*_bound_mistakes(spec)]
    if mistakes:
        raise BadInput("\n".join(f"{where}: {mistake}" for mistake in mistakes))
    texts = list(map(str, model_mistakes(spec)))
    if spec.vocab_size == 0:
        texts.insert(0, "vocab_size is 0: expected the tokenizer's size; give model.vocab_size or a tokenizer")
    if not texts and (count := parameter_count(spec)) > MOST_PARAMETERS:
        texts.append(f"{count:.1e} parameters: expected at most {MOST_PARAMETERS:.0e}")
    if texts:
        raise BadInput("\n".join(f"{where}: {text}" for text in texts))


def model_mistakes(spec: ModelSpec) -> Iterator[WrongKey]:
    """Yield what is wrong between the keys of a model whose numbers are within their bounds, each mistake once."""
    of_bodies = (mistake for body in described_bodies(spec) for mistake in body.mistakes())
    yield from dict.fromkeys((*unusable_keys(spec), *of_bodies))


def _bound_mistakes(spec: ModelSpec) -> Iterator[WrongKey]:
    """Yield the numbers that are outside their bounds, and a number of experts that no machine can list."""
    sections = {"": spec, **{f"{key}.": getattr(spec, key) for key in (*SCALINGS, "adapter")}}
    for prefix, section in sections.items():
        if section is None:
            continue
        for name, annotation in hints_of(type(section)).items():
            value = getattr(section, name)
            bounds = get_args(annotation)[1:]
            if not all(within(bound, value) for bound in bounds):
                yield WrongKey(f"{prefix}{name}", str(value), describe_type(annotation))
    if (spec.layers + spec.prediction_depth) * spec.experts > MOST_EXPERTS:
        yield WrongKey("experts", str(spec.experts), f"at most {MOST_EXPERTS:,} in all {spec.layers} layers")
