"""What a start prints about fine-tuning on chats: packing, trained tokens, learning rate and validation."""

from __future__ import annotations

from meshwright.data.preference_windows import PreferenceWindows
from meshwright.data.source import DataSource, has_validation
from meshwright.spec.job import TrainSpec
from meshwright.spec.preference import START, PreferenceSpec
from meshwright.spec.rl import RlSpec
from meshwright.spec.run import RunSpec

DECAYS = {"cosine": "a cosine", "linear": "a line", "wsd": "a line at the end", "inverse_sqrt": "the root of the step"}
"""Words for the curve of the learning rate after warm-up, by `train.schedule`."""


def fine_tuning_lines(run: RunSpec, source: DataSource) -> list[str]:
    """Return the lines for a run whose data have chats; none for other runs. `prepare.data_line` prints the rest about data."""
    if not source.has_chats:
        return []
    if run.preference is not None:
        return [
            *_preference_lines(run, run.preference, source),
            *(f"preference: {each}" for each in _rate_and_validation(run)),
        ]
    lines = []
    for name, each in source.sources.items():
        if (packing := each.packing) is None:
            continue
        manifest = each.directory.manifest
        trained = ""
        if manifest is not None and manifest.trained_tokens is not None:
            share = manifest.trained_tokens / manifest.tokens
            trained = f"; {manifest.trained_tokens:,} of {manifest.tokens:,} tokens ({share:.0%}) are trained on"
        weights = ", with weights" if each.stream.weighted else ""
        lines.append(
            f"SFT: {name}: {packing.conversations:,} conversations fill {packing.sequences:,} sequences to "
            f"{packing.fill:.0%} (best fit){trained}{weights}"
        )
    lines += [] if run.rl is None else [_rollout_words(run.train, run.rl)]
    kind = "SFT" if run.rl is None else "RL"
    return [*lines, *(f"{kind}: {each}" for each in _rate_and_validation(run))]


def _rate_and_validation(run: RunSpec) -> list[str]:
    return [learning_rate_words(run.train), _validation_words(run)]


def _preference_lines(run: RunSpec, preference: PreferenceSpec, source: DataSource) -> list[str]:
    """Return lines about preference training: how many pairs or answers a step has, the loss, and the reference model."""
    lines = []
    what = "pairs" if preference.paired else "answers"
    units = 0.0
    windows = sum(each.windows for each in source.sources.values())
    for name, each in source.sources.items():
        layout = each.layout
        packing = each.packing
        if packing is None or not isinstance(layout, PreferenceWindows):
            continue
        count = packing.conversations // layout.together
        units += count
        left_out = f"; {layout.left_out:,} longer ones are left out" if layout.left_out else ""
        fill = f"fill {packing.sequences:,} sequences to {packing.fill:.0%} (best fit)"
        lines.append(f"preference: {name}: {count:,} {what} {fill}{left_out}")
    a_step = units / max(windows, 1) * run.train.global_batch
    lines.append(
        f"preference: a step has {run.train.global_batch:,} sequences with about {a_step:,.0f} {what}; {_loss_words(preference)}"
    )
    if preference.has_reference:
        model = "the model at the start" if preference.reference == START else preference.reference
        lines.append(
            f"preference: log-probabilities of {model} are computed once, before the first step, and kept beside the corpus"
        )
    return lines


def _loss_words(preference: PreferenceSpec) -> str:
    """Return words about the loss and those of its settings that are in use."""
    words = "reward model" if preference.scores else f"{preference.loss}, beta {preference.scale:g}"
    words += f", score_margin {preference.score_margin:g}" if preference.score_margin else ""
    words += f", center {preference.center:g}" if preference.center else ""
    words += f", margin {preference.ahead:g}" if preference.loss == "simpo" else ""
    words += f", label_smoothing {preference.label_smoothing:g}" if preference.label_smoothing else ""
    return words + (f", and {preference.sft:g} of the loss per token of chosen answers" if preference.sft else "")


def _rollout_words(train: TrainSpec, rl: RlSpec) -> str:
    """Return the line about an RL step: questions, answers, policy loss and reward."""
    asked = f"{train.global_batch:,} questions with {rl.samples} answers of at most {rl.new_tokens:,} tokens"
    return f"RL: a step has {asked}; {rl.policy}; rewards by {rl.reward}"


def learning_rate_words(train: TrainSpec) -> str:
    """Return words about warm-up, peak and decay of the learning rate."""
    warm_up = f"grows for {train.warmup_steps:,} steps to" if train.warmup_steps else "begins, without warm-up, at"
    end = train.learning_rate * train.min_learning_rate
    return f"learning rate {warm_up} {train.learning_rate:g}, then follows {DECAYS[train.schedule]} down to {end:g}"


def _validation_words(run: RunSpec) -> str:
    """Return words about when held-out data is evaluated, or how to have some."""
    judged = run.preference is not None
    if not has_validation(run.data, run.train.seq_len):
        return f"no held-out {'answers' if judged else 'chats'}; `meshwright data prepare --held-out 0.05` keeps some apart"
    every = run.train.validate_every
    when = f"every {every:,} steps and at the end" if every else "at the end (train.validate_every)"
    if judged:
        return f"accuracy and margin of held-out answers before the first step, and {when}"
    return f"held-out loss per trained token {when}"
