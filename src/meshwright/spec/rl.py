"""Reinforcement learning: what is sampled, how it is judged, and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from meshwright.spec.errors import BadInput
from meshwright.spec.fields import Bound, NotNegative, Positive

Policy = Literal["grpo", "dr_grpo", "dapo", "cispo", "rloo"]
"""How advantages and the loss are computed; see `RlSpec.policy`."""
Divisor = Literal["tokens", "sequences", "length"]
"""What the loss is divided by; see `RlSpec.divisor`."""
Correction = Literal["none", "truncate", "mask"]
"""What is done if probabilities of the engine and the trainer differ; see `RlSpec.correction`."""
Estimator = Literal["k1", "k2", "k3"]
"""Estimate of the KL divergence; see `KlSpec.estimator`."""


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """How answers are judged: by a Python function in separate processes, or by a reward model next to the engine."""

    file: str | None = None
    """Python file with the function."""
    model: str | None = None
    """Instead of a function, the folder of a reward model: a run with `preference.loss: reward`, one of its
    checkpoints, or a Hugging Face folder with one label. It must have the tokenizer of the data, and each rank has a
    copy. The reward is its score of a question with the answer.
    """
    function: str = "reward"
    """Name of the function `(prompt, answer, record)` in the file.

    It returns a number, or None if it has no verdict. `record["reference"]` is the answer in the corpus.
    """
    processes: Positive = 2
    """Number of processes of each rank that call the function."""
    seconds: Annotated[float, Bound(more_than=0)] = 10.0
    """Maximum processor time of a call. A call that takes more, or waits ten times as long, gives no verdict."""
    memory_gib: Annotated[float, Bound(more_than=0)] = 4.0
    """Maximum address space of a process."""

    def check_path(self) -> None:
        """Raise BadInput unless the file or folder exists."""
        if self.file is not None and not Path(self.file).is_file():
            raise BadInput(
                f"rl.reward.file: expected a Python file, got {self.file}, which is none", key="rl.reward.file"
            )
        if self.model is not None and not Path(self.model).is_dir():
            raise BadInput(
                f"rl.reward.model: expected the folder of a reward model, got {self.model}, which is none",
                key="rl.reward.model",
            )

    def __str__(self) -> str:
        """Return what judges the answers, for messages."""
        return f"{self.function} of {self.file}" if self.model is None else f"the reward model {self.model}"


@dataclass(frozen=True, kw_only=True)
class KlSpec:
    """A penalty for the distance to the model at the start of the run."""

    weight: Annotated[float, Bound(at_least=0)] = 0.0
    """Factor of the penalty of each token; with 0 it is not computed."""
    estimator: Estimator = "k3"
    """With d = log π − log π_reference: k1 = d, k2 = d² / 2, k3 = e^−d − 1 + d (Schulman 2020)."""


@dataclass(frozen=True, kw_only=True)
class RlSpec:
    """Reinforcement learning: the model answers prompts of the corpus, the answers get rewards, and the better answers
    become likelier.
    """

    reward: RewardSpec
    """How answers are judged."""
    samples: Annotated[int, Bound(at_least=2)] = 8
    """Number of answers to each of the `train.global_batch` prompts of a step.

    The answers to a prompt are compared with each other.
    """
    updates: Positive = 1
    """Number of steps whose answers are sampled together, with the weights before the first of these steps.

    A batch of answers belongs to `updates` times `train.global_batch` prompts. Each step is one update with the answers
    to its own prompts (a mini-batch).
    """
    new_tokens: Positive = 256
    """Maximum number of tokens of an answer. An answer that has not ended by then is truncated."""
    temperature: Annotated[float, Bound(more_than=0)] = 1.0
    """Divisor of the logits, for sampling and for the loss."""
    policy: Policy = "grpo"
    """Advantages and loss: `grpo` (Shao et al. 2024), `dr_grpo` (Liu et al. 2025: no division by the deviation), `dapo` (Yu et al. 2025:
    the wider upper clip), `cispo` (MiniMax 2025: clipped factors of log-probabilities), or `rloo` (Ahmadian et al. 2024)."""
    clip_below: Annotated[float, Bound(more_than=0, at_most=1)] | None = None
    """A token whose probability has fallen by more than this fraction has no gradient; none is 0.2, and no limit for
    `rloo` and `cispo`.
    """
    clip_above: Annotated[float, Bound(more_than=0)] | None = None
    """A token whose probability has risen by more than this fraction has no gradient; none is 0.2, for `dapo` 0.28, and
    no limit for `rloo`. For `cispo`, the ratio that multiplies a log-probability is at most 1 + this; none is 4.
    """
    divisor: Divisor | None = None
    """What the loss is divided by. tokens: all tokens of answers. sequences: it is the mean of each answer's mean.
    length: the number of answers times `new_tokens`. none is tokens, for `dr_grpo` length.
    """
    train_truncated: bool = True
    """Whether truncated answers are trained on. If not, they do not count in the divisor either."""
    correction: Correction = "none"
    """For probabilities of the engine that differ from the trainer's. truncate: a token's loss is multiplied by the
    ratio of the two, but at most by `correction_most`. mask: tokens whose ratio is not between `correction_least` and
    `correction_most` are left out.
    """
    correction_least: Annotated[float, Bound(more_than=0, at_most=1)] = 0.5
    """Minimum ratio of the trainer's probability to the engine's."""
    correction_most: Annotated[float, Bound(at_least=1)] = 2.0
    """Largest ratio of the trainer's probability to the engine's."""
    kl: KlSpec = KlSpec()
    """Penalty for the distance to the weights at the start of the run."""
    exact: bool = False
    """Whether the trainer's forward must give the engine's log-probabilities bit for bit; refused for models where it
    cannot.
    """
    presumed_question: Positive | None = None
    """Mean tokens of a question, for predictions before a run; none is half of what `new_tokens` leaves of
    `train.seq_len`.
    """
    presumed_answer: Positive | None = None
    """Mean tokens of an answer, for predictions before a run; none is half of `new_tokens`.

    The run itself measures them.
    """
    cache_tokens: NotNegative = 0
    """Maximum number of tokens in the key/value cache of each rank's engine; 0 has space for the longest sequences of
    all answers that run at the same time.
    """

    @property
    def counted(self) -> Divisor:
        """Return what the loss is divided by, with the default of the policy."""
        return self.divisor or ("length" if self.policy == "dr_grpo" else "tokens")
