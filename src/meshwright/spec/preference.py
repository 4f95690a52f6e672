"""Preferences of a run: the loss of good and bad answers, and the model that it compares with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from meshwright.spec.fields import Bound

Loss = Literal["dpo", "ipo", "kto", "simpo", "orpo", "reward"]
BETAS: Mapping[Loss, float] = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "simpo": 2.0, "orpo": 0.1, "reward": 1.0}
"""`beta` by default; a reward model has none, its rewards are its scores."""
SIMPO_MARGIN = 0.5
"""`margin` by default."""
START = "start"
"""The reference that is the model at the start of the run."""


@dataclass(frozen=True, kw_only=True)
class PreferenceSpec:
    """Preferences: answers of `data.mix` that are better become likelier than others to the same prompt, or get a higher score."""

    loss: Loss = "dpo"
    """`dpo` (Rafailov et al. 2023), `ipo` (Azar et al. 2023), `simpo` (Meng et al. 2024) and `orpo` (Hong et al. 2024) compare the two
    answers of a pair; `kto` (Ethayarajh et al. 2024) judges each answer by itself. `reward` trains a reward model instead: its head gives a
    score, which is higher for the better answer (Bradley and Terry 1952)."""
    beta: Annotated[float, Bound(more_than=0)] | None = None
    """Factor of log-probabilities; of `orpo` the weight of the odds ratio. None is 0.1, for `simpo` 2."""
    margin: Annotated[float, Bound(at_least=0)] | None = None
    """`simpo`: by how much the chosen answer should be ahead; none is 0.5."""
    label_smoothing: Annotated[float, Bound(at_least=0, less_than=0.5)] = 0.0
    """`dpo` and `reward`: share of pairs that are assumed to be the wrong way round."""
    sft: Annotated[float, Bound(at_least=0)] = 0.0
    """Weight of the loss per token of chosen answers, added to that of the pairs. `orpo` has it with weight 1 anyway."""
    desirable: Annotated[float, Bound(more_than=0)] = 1.0
    """`kto`: weight of good answers."""
    undesirable: Annotated[float, Bound(more_than=0)] = 1.0
    """`kto`: weight of bad answers. Where there are more of them, a weight below 1 restores the balance."""
    score_margin: Annotated[float, Bound(at_least=0)] = 0.0
    """`reward`: factor of the difference between the scores that the data have of a pair's answers; by so much the chosen one should be
    ahead (Touvron et al. 2023). Pairs without scores have no margin."""
    center: Annotated[float, Bound(at_least=0)] = 0.0
    """`reward`: weight of the squared sum of a pair's scores, which holds scores of different prompts around 0; Eisenstein et al. 2023 use
    0.01."""
    reference: str = START
    """Model of `dpo`, `ipo` and `kto` to stay near: `start`, the weights of `model.init` with the adapters of `model.adapter.init`; or
    `hf:DIR` or `checkpoint:DIR`. Its log-probabilities are computed once, before the first step, and kept beside the corpus."""
    too_long: Literal["refuse", "leave_out"] = "refuse"
    """What happens to pairs of more than `train.seq_len` tokens, prompts included: none is cut."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with another model."""
        return self.loss in ("dpo", "ipo", "kto")

    @property
    def scores(self) -> bool:
        """Whether a reward model is trained."""
        return self.loss == "reward"

    @property
    def paired(self) -> bool:
        """Whether the loss compares two answers."""
        return self.loss != "kto"

    @property
    def scale(self) -> float:
        """`beta`, with the default of the loss."""
        return BETAS[self.loss] if self.beta is None else self.beta

    @property
    def ahead(self) -> float:
        """`margin`, with its default."""
        return SIMPO_MARGIN if self.margin is None else self.margin
