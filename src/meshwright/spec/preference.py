"""Learning from preferences: the loss of good and bad answers, and the model with which it compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from meshwright.spec.fields import Bound

Loss = Literal["dpo", "ipo", "kto", "simpo", "orpo", "reward"]
"""Kinds of losses; see `PreferenceSpec.loss`."""
BETAS: Mapping[Loss, float] = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "simpo": 2.0, "orpo": 0.1, "reward": 1.0}
"""Default of `beta` for each loss. The loss of a reward model has no beta, because its rewards are its scores."""
SIMPO_MARGIN = 0.5
"""Default of `margin`."""
START = "start"
"""The value of `reference` for the model at the start of the run."""


@dataclass(frozen=True, kw_only=True)
class PreferenceSpec:
    """Learning from preferences.

    Of the answers to a prompt in `data.mix`, the better ones become likelier, or get a higher score.
    """

    loss: Loss = "dpo"
    """`dpo` (Rafailov et al. 2023), `ipo` (Azar et al. 2023), `simpo` (Meng et al. 2024) and `orpo` (Hong et al. 2024) compare the two
    answers of a pair; `kto` (Ethayarajh et al. 2024) judges each answer by itself. `reward` trains a reward model instead: its head gives a
    score, which is higher for the better answer (Bradley and Terry 1952)."""
    beta: Annotated[float, Bound(more_than=0)] | None = None
    """Factor of log-probabilities; with `orpo` the weight of the odds ratio. none is 0.1, for `simpo` 2."""
    margin: Annotated[float, Bound(at_least=0)] | None = None
    """`simpo`: by how much the chosen answer should be better; none is 0.5."""
    label_smoothing: Annotated[float, Bound(at_least=0, less_than=0.5)] = 0.0
    """`dpo` and `reward`: share of pairs whose better and worse answer are assumed to be swapped."""
    sft: Annotated[float, Bound(at_least=0)] = 0.0
    """Weight of the loss per token of chosen answers, which is added to the loss of the pairs.

    `orpo` has it with weight 1 in any case.
    """
    desirable: Annotated[float, Bound(more_than=0)] = 1.0
    """`kto`: weight of good answers."""
    undesirable: Annotated[float, Bound(more_than=0)] = 1.0
    """`kto`: weight of bad answers.

    If there are more bad answers than good ones, a weight below 1 restores the balance.
    """
    score_margin: Annotated[float, Bound(at_least=0)] = 0.0
    """`reward`: factor of the difference between the scores that the data have for the two answers of a pair.

    The chosen answer should be better by that product (Touvron et al. 2023). Pairs without scores have no margin.
    """
    center: Annotated[float, Bound(at_least=0)] = 0.0
    """`reward`: weight of the squared sum of a pair's scores, which keeps the scores of different prompts around 0.

    Eisenstein et al. 2023 use 0.01.
    """
    reference: str = START
    """Model from which `dpo`, `ipo` and `kto` should not move far.

    `start`: the weights of `model.init` with the adapters of `model.adapter.init`. Or `hf:DIR` or `checkpoint:DIR`. Its
    log-probabilities are computed once, before the first step, and stored next to the corpus.
    """
    too_long: Literal["refuse", "leave_out"] = "refuse"
    """What happens to pairs with more than `train.seq_len` tokens, prompts included. No pair is cut."""

    @property
    def has_reference(self) -> bool:
        """Return whether the loss compares with another model."""
        return self.loss in ("dpo", "ipo", "kto")

    @property
    def scores(self) -> bool:
        """Return whether a reward model is trained."""
        return self.loss == "reward"

    @property
    def paired(self) -> bool:
        """Return whether the loss compares two answers."""
        return self.loss != "kto"

    @property
    def scale(self) -> float:
        """Return `beta`, or the default of the loss."""
        return BETAS[self.loss] if self.beta is None else self.beta

    @property
    def ahead(self) -> float:
        """Return `margin`, or its default."""
        return SIMPO_MARGIN if self.margin is None else self.margin
