"""Rules of the section `preference`: which settings exclude it, and which keys a loss does not read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from meshwright.config.run_values import RunValues
from meshwright.spec.errors import Mistake
from meshwright.spec.preference import START, PreferenceSpec

DEFAULTS = {field.name: field.default for field in fields(PreferenceSpec)}
"""Default of each key in the section."""
READ_BY = {
    "beta": ("dpo", "ipo", "simpo", "orpo", "kto"),
    "margin": ("simpo",),
    "label_smoothing": ("dpo", "reward"),
    "sft": ("dpo", "ipo", "simpo"),
    "score_margin": ("reward",),
    "center": ("reward",),
    "desirable": ("kto",),
    "undesirable": ("kto",),
    "reference": ("dpo", "ipo", "kto"),
}
"""The losses that read a key. Keys that all losses read are not listed."""


def preference(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes of the section `preference`.

    Training on preferences needs whole answers in sequences of equal length, and its own loss. A reward model needs a
    head for scores.
    """
    scores = run("preference") is not None and run("preference.loss") == "reward"
    if (run("model.head") == "score") != scores and not run.given("serve"):  # A file with `serve` trains nothing.
        expected = (
            "score with preference.loss: reward"
            if scores
            else "vocabulary, as only preference.loss: reward trains a score"
        )
        yield run.mistake("model.head", expected, "score" if scores else "vocabulary")
    if run("preference") is None:
        return
    if scores and run("train.z_loss"):
        yield run.mistake("train.z_loss", "0 with preference.loss: reward, which has no logits", "0")
    if run("rl") is not None:
        yield run.mistake(
            "preference", "none, as rl has a loss of its own: do one after the other", "none", "a section"
        )
    if run("data.packing") == "none":
        yield run.mistake("data.packing", "stream, as preference packs whole pairs", "stream")
    if run("data.document_mask") is False:
        yield run.mistake("data.document_mask", "true, as answers of a sequence must not see each other", "true")
    if run("model.prediction_depth"):
        yield run.mistake(
            "model.prediction_depth", "0, as preference trains no modules that predict further tokens", "0"
        )
    loss = run("preference.loss")
    for key, losses in READ_BY.items():
        if loss is not None and loss not in losses and run(f"preference.{key}") not in (None, DEFAULTS[key]):
            yield run.mistake(f"preference.{key}", f"no such key, as preference.loss {loss} does not read it", "none")
    reference = run("preference.reference")
    if reference in (None, START) or loss not in READ_BY["reference"]:
        return
    if not reference.startswith(("hf:", "checkpoint:")):
        yield run.mistake("preference.reference", "start, hf:DIR or checkpoint:DIR", START)
    elif run("model.init") == "scratch":
        yield run.mistake(
            "preference.reference", "start, as model.init is scratch: the reference is where training begins", START
        )
