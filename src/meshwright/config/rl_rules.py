"""Rules of reinforcement learning (`rl`): which settings exclude it, and what an exact forward needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from meshwright.config.run_values import RunValues
from meshwright.spec.errors import Mistake
from meshwright.spec.exact_forward import ROWS, VOCABULARY, inexact_reason
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec
from meshwright.spec.rl import RewardSpec, RlSpec

_WHOLE = ("plan.tensor", "plan.context_ring", "plan.context_ulysses", "plan.pipeline")
"""Axes that divide the model among ranks. An exact forward excludes them."""
DEFAULTS = {f"rl.{field.name}": field.default for field in fields(RlSpec)}
"""Default of each key in the section `rl`."""
REWARD_DEFAULTS = {
    f"rl.reward.{field.name}": field.default for field in fields(RewardSpec) if field.name not in ("file", "model")
}
"""Default of each key that only a reward function reads."""


def rl(run: RunValues, model: Mapping[str, Any] | None) -> Iterator[Mistake]:
    """Yield mistakes of the section `rl`, which samples answers from the model that is trained.

    `model` has the values of the run's ModelSpec; None if some are not known.
    """
    if run("rl") is None:
        return
    yield from _reward(run)
    if run("data.packing") == "none":
        yield run.mistake("data.packing", "stream, as rl packs its answers", "stream")
    if run("train.batch_ramp"):
        yield run.mistake(
            "train.batch_ramp", "none, as rl has the same number of questions in every step", "none", "stages"
        )
    if run("model.prediction_depth"):
        yield run.mistake("model.prediction_depth", "0, as rl trains no modules that predict further tokens", "0")
    if run("model.adapter") is not None and run("plan.linear") not in (None, "compute"):
        expected = "compute, as rl merges adapters into the frozen weights for its engine"
        yield run.mistake("plan.linear", expected, "compute")
    if run("cluster.gpu") == "cpu" and run("plan.compute") not in (None, "fp32"):
        yield run.mistake(
            "plan.compute", "fp32, as rl samples with the trainer's dtype, and an engine on CPUs has fp32", "fp32"
        )
    longest = run("train.seq_len")
    new = run("rl.new_tokens")
    if longest and new and new > longest:
        yield run.mistake(
            "rl.new_tokens", f"at most train.seq_len = {longest}, which has the question too", str(longest // 2)
        )
    for key, expected in _without_effect(run):
        if run(key) != DEFAULTS[key]:
            yield run.mistake(key, f"no such key, as {expected}", "none")
    if run("rl.kl.weight") and run("model.init") == "scratch":
        yield run.mistake("rl.kl.weight", "0, as model.init is scratch: there is no model to stay near", "0")
    if (updates := run("rl.updates") or 1) > 1 and run("rl.correction") != "none":
        expected = f"none, as rl.updates is {updates}: later updates change the probabilities too"
        yield run.mistake("rl.correction", expected, "none")
    if run("rl.exact"):
        yield from _exact(run, model)


def _reward(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes of `rl.reward`: a function or a model must give the rewards, and only its own keys may be set."""
    file = run("rl.reward.file")
    model = run("rl.reward.model")
    if file is None and model is None:
        yield run.mistake("rl.reward", "file: FILE.py with a function, or model: DIR of a reward model")
    if file is not None and model is not None:
        yield run.mistake("rl.reward.model", "none beside rl.reward.file: one of them judges", "none")
    elif model is not None:
        for key, default in REWARD_DEFAULTS.items():
            if run(key) != default:
                yield run.mistake(key, "no such key, as rl.reward.model judges", "none")


def _without_effect(run: RunValues) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of each key of `rl` that nothing reads because of another key."""
    correction = run("rl.correction")
    if run("rl.policy") == "cispo":
        yield "rl.clip_below", "rl.policy is cispo, which has an upper clip only"
    if correction != "mask":
        yield "rl.correction_least", f"rl.correction is {correction}"
    if correction == "none":
        yield "rl.correction_most", "rl.correction is none"


def _exact(run: RunValues, model: Mapping[str, Any] | None) -> Iterator[Mistake]:
    """Yield mistakes of `rl.exact`, which makes the trainer and the engine compute the same probabilities, bit for bit.

    It needs a dense model that is not divided among ranks. On CPUs it needs fp32 and tensor shapes in which each row is
    computed alike.
    """
    if run("model.adapter") is not None:
        yield run.mistake("rl.exact", "false, as model.adapter is set: the engine has merged weights", "false")
    if model is not None and (reason := inexact_reason(from_plain(ModelSpec, dict(model)))):
        yield run.mistake("rl.exact", f"false: this release has no exact forward of {reason}", "false")
    for key in _WHOLE:
        if (run(key) or 1) > 1:
            yield run.mistake(key, "1, as rl.exact is true: ranks that divide the model add in another order", "1")
    if run("cluster.gpu") == "cpu":
        yield from _exact_on_cpus(run)
    elif run("cluster.gpu") is not None:
        yield from _exact_on_gpus(run)


def _exact_on_gpus(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes of `rl.exact` on GPUs.

    The forward is the engine's, and the backward computes each block again (`rl.exact_blocks`).
    """
    if run("plan.recompute") != "full":
        expected = "full, as rl.exact is true: the backward computes each block again"
        yield run.mistake("plan.recompute", expected, "full", "none")
    if run("plan.linear") not in (None, "compute"):
        yield run.mistake("plan.linear", "compute, as rl.exact is true", "compute")


def _exact_on_cpus(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes of `rl.exact` on CPUs: compiled blocks, and sizes that are not multiples of the kernels' blocks."""
    if run("plan.compile") is not False:
        yield run.mistake(
            "plan.compile",
            "false, as rl.exact is true: compiled blocks round otherwise than the engine",
            "false",
            "true",
        )
    for key, multiple in (("train.seq_len", ROWS), ("train.loss_chunk", ROWS), ("model.vocab_size", VOCABULARY)):
        if (size := run(key)) and size % multiple:
            yield run.mistake(
                key, f"a multiple of {multiple}, as rl.exact is true", str(-(-size // multiple) * multiple)
            )
