"""Reinforcement learning of a run: what is sampled, how it is judged, and the loss of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from meshwright.spec.errors import BadInput
from meshwright.spec.fields import Bound, NotNegative, Positive

Policy = Literal["grpo", "dr_grpo", "dapo", "cispo", "rloo"]
Divisor = Literal["tokens", "sequences", "length"]
Correction = Literal["none", "truncate", "mask"]
Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """How answers are judged: by a Python function in processes of its own, or by a reward model beside the engine."""

    file: str | None = None
    """Python file of the function."""
    model: str | None = None
    """Folder of a reward model instead: of a run with `preference.loss: reward`, a checkpoint of one, or a Hugging Face folder with
    one label. It has the tokenizer of the data; each rank has a copy. The score of a question with its answer is the reward."""
    function: str = "reward"
    """Its function `(prompt, answer, record)`, which returns a number, or None where it has no verdict. `record["reference"]` is the
    answer of the corpus."""
    processes: Positive = 2
    """Processes of each rank that call the function."""
    seconds: Annotated[float, Bound(more_than=0)] = 10.0
    """Processor time of a call at most. A call that takes longer, or waits ten times as long, gives no verdict."""
    memory_gib: Annotated[float, Bound(more_than=0)] = 4.0
    """Address space of a process at most."""

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
        """What judges, for people."""
        return f"{self.function} of {self.file}" if self.model is None else f"the reward model {self.model}"


@dataclass(frozen=True, kw_only=True)
class KlSpec:
    """A penalty for the distance to the model at the start of the run."""

    weight: Annotated[float, Bound(at_least=0)] = 0.0
    """Factor of the penalty of each token; 0 computes none."""
    estimator: Estimator = "k3"
    """With d = log π − log π_reference: k1 = d, k2 = d² / 2, k3 = e^−d − 1 + d (Schulman 2020)."""


@dataclass(frozen=True, kw_only=True)
class RlSpec:
    """Reinforcement learning: the model answers prompts of the corpus, answers get rewards, and the better ones become likelier."""

    reward: RewardSpec
    """How answers are judged."""
    samples: Annotated[int, Bound(at_least=2)] = 8
    """Answers to each of the `train.global_batch` prompts of a step, which are compared with each other."""
    updates: Positive = 1
    """Steps whose answers are sampled together, by the weights before the first of them: mini-batches of one batch of answers. The batch
    has `updates` times `train.global_batch` prompts, and each step is one update by the answers to its own prompts."""
    new_tokens: Positive = 256
    """Tokens of an answer at most; an answer without an end by then is truncated."""
    temperature: Annotated[float, Bound(more_than=0)] = 1.0
    """Divides the logits, for the samples and for their loss."""
    policy: Policy = "grpo"
    """Advantages and loss: `grpo` (Shao et al. 2024), `dr_grpo` (Liu et al. 2025: no division by the deviation), `dapo` (Yu et al. 2025:
    the wider upper clip), `cispo` (MiniMax 2025: clipped factors of log-probabilities), or `rloo` (Ahmadian et al. 2024)."""
    clip_below: Annotated[float, Bound(more_than=0, at_most=1)] | None = None
    """Fall of a token's probability beyond which it has no gradient, as a fraction; none is 0.2, and none for `rloo` and `cispo`."""
    clip_above: Annotated[float, Bound(more_than=0)] | None = None
    """Rise of a token's probability beyond which it has no gradient; none is 0.2, for `dapo` 0.28, and none for `rloo`. For `cispo` the
    ratio that multiplies a log-probability is at most 1 + this; none is 4."""
    divisor: Divisor | None = None
    """What the loss is divided by: all tokens of answers; `sequences`, the mean of each answer's mean; or `length`, answers times
    `new_tokens`. None takes tokens, for `dr_grpo` length."""
    train_truncated: bool = True
    """Whether truncated answers are trained on; if not, the divisor does not have them either."""
    correction: Correction = "none"
    """For engine probabilities that differ from the trainer's: `truncate` multiplies a token's loss by the ratio of the two, at most
    `correction_most`; `mask` leaves out tokens whose ratio is not from `correction_least` to `correction_most`."""
    correction_least: Annotated[float, Bound(more_than=0, at_most=1)] = 0.5
    """Least ratio of the trainer's probability to the engine's."""
    correction_most: Annotated[float, Bound(at_least=1)] = 2.0
    """Largest ratio."""
    kl: KlSpec = KlSpec()
    """Penalty for the distance to the first weights."""
    exact: bool = False
    """Whether the trainer's forward gives the engine's log-probabilities bit for bit; refused where it cannot."""
    presumed_question: Positive | None = None
    """Mean tokens of a question that predictions before a run presume; none is half of what `new_tokens` leaves of `train.seq_len`."""
    presumed_answer: Positive | None = None
    """Mean tokens of an answer that predictions before a run presume; none is half of `new_tokens`. The run itself measures them."""
    cache_tokens: NotNegative = 0
    """Tokens of the key/value cache of each rank's engine at most; 0 holds the longest texts of all answers that run at a time."""

    @property
    def counted(self) -> Divisor:
        """What the loss is divided by, with the policy's default."""
        return self.divisor or ("length" if self.policy == "dr_grpo" else "tokens")
