"""What a start says about fine-tuning on chats: packing and trained tokens (SFT) or questions and answers (RL), rate, validation."""

from __future__ import annotations

from meshwright.data.source import DataSource, has_validation
from meshwright.spec.job import TrainSpec
from meshwright.spec.rl import RlSpec
from meshwright.spec.run import RunSpec

DECAYS = {"cosine": "a cosine", "linear": "a line", "wsd": "a line at the end", "inverse_sqrt": "the root of the step"}
"""By `train.schedule`, what the learning rate follows after warm-up."""


def fine_tuning_lines(run: RunSpec, source: DataSource) -> list[str]:
    """Lines for a run whose data have chats; none without chats. Passes and document mask are in `prepare.data_line`."""
    if not source.has_chats:
        return []
    lines = []
    for name, each in source.sources.items():
        if (packing := each.packing) is None:
            continue
        manifest, trained = each.directory.manifest, ""
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
    return [*lines, f"{kind}: {learning_rate_words(run.train)}", f"{kind}: {_validation_words(run)}"]


def _rollout_words(train: TrainSpec, rl: RlSpec) -> str:
    asked = f"{train.global_batch:,} questions with {rl.samples} answers of at most {rl.new_tokens:,} tokens"
    return f"RL: a step has {asked}; {rl.policy}; rewards by {rl.reward.function} of {rl.reward.file}"


def learning_rate_words(train: TrainSpec) -> str:
    """Warm-up, peak and decay of the learning rate."""
    warm_up = f"grows for {train.warmup_steps:,} steps to" if train.warmup_steps else "begins, without warm-up, at"
    end = train.learning_rate * train.min_learning_rate
    return f"learning rate {warm_up} {train.learning_rate:g}, then follows {DECAYS[train.schedule]} down to {end:g}"


def _validation_words(run: RunSpec) -> str:
    if not has_validation(run.data, run.train.seq_len):
        return "no held-out chats; `meshwright data prepare --held-out 0.05` keeps some apart"
    every = run.train.validate_every
    when = f"every {every:,} steps and at the end" if every else "at the end (train.validate_every)"
    return f"held-out loss per trained token {when}"
