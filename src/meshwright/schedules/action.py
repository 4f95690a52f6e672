"""Actions: the elements of a schedule.

The simulator computes the time of an action, the executor runs it, and the timeline draws it. Error messages, tests and
pictures use its short printed form (`F3.2` is the forward of stage 3 for micro-batch 2):

    F3.2 B3.2 I3.2 W3.2 E3.2   forward, backward, backward for inputs, backward for weights, forward without backward
    F3.2/1                     the same for unit 1 of the stage
    SA3.2>4  RA4.2<3           send and receive an activation (stage.micro-batch, then the other stage)
    SG3.2>2  RG2.2<3           send and receive a gradient
    U3/1 D3/1 G3/1             gather a unit's parameters, free them, reduce its gradients
    N O                        compute the gradient norm over all ranks, run the optimizer
    F3.2&F3.3                  the same forward or backward of two micro-batches together
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from meshwright.spec.errors import BadInput

Op = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "forward_only",
    "send",
    "recv",
    "unshard",
    "reshard",
    "reduce_grad",
    "norm_barrier",
    "optim",
]
Payload = Literal["activation", "gradient"]

LETTERS: dict[Op, str] = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "forward_only": "E",
    "send": "S",
    "recv": "R",
    "unshard": "U",
    "reshard": "D",
    "reduce_grad": "G",
    "norm_barrier": "N",
    "optim": "O",
}
"""First letter of an action's printed form. An action of two micro-batches prints both parts."""
_OP_BY_LETTER: dict[str, Op] = {letter: op for op, letter in LETTERS.items()}
COMPUTE = frozenset[Op](("forward", "backward", "backward_input", "backward_weight", "forward_only"))
"""Ops that compute on the device."""
FORWARD = frozenset[Op](("forward", "forward_only"))
"""Ops that compute a stage's output from its input."""
GRADIENT = frozenset[Op](("backward", "backward_input"))
"""Ops that compute the gradient of a stage's input from the gradient of its output."""

_COMPUTE_FORM = re.compile(r"([FBIWE])(\d+)\.(\d+)(?:/(\d+))?")
_TRANSFER_FORM = re.compile(r"([SR])([AG])(\d+)\.(\d+)([<>])(\d+)")
_UNIT_FORM = re.compile(r"([UDG])(\d+)/(\d+)")
_PAYLOADS: dict[str, Payload] = {"A": "activation", "G": "gradient"}


class Action(NamedTuple):
    """One operation of a pipeline rank.

    `op`: what is done. `stage`: index of a virtual stage in the whole pipeline; -1 for operations of the whole rank.
    `micro_batch`: its index, -1 if the operation has none. `unit`: an FSDP unit of the stage; None for the whole stage.
    `peer`: the other stage of a transfer. `payload`: what a transfer carries.
    `pair`: for an action of two micro-batches, the action of each; `op`, `stage` and `unit` are theirs.
    """

    op: Op
    stage: int = -1
    micro_batch: int = -1
    unit: int | None = None
    peer: int = -1
    payload: Payload | None = None
    pair: tuple[Action, ...] = ()

    @property
    def parts(self) -> tuple[Action, ...]:
        """The actions of the two micro-batches, or the action itself."""
        return self.pair or (self,)

    @property
    def paired(self) -> bool:
        """Whether the action runs two micro-batches together."""
        return bool(self.pair)

    @property
    def label(self) -> str:
        """Op, stage, micro-batch and unit, such as `backward_input 3.2/1`: the name of the action's span in timelines."""
        if self.pair:
            return " & ".join(part.label for part in self.pair)
        if self.stage < 0:
            return self.op
        micro_batch = "" if self.micro_batch < 0 else f".{self.micro_batch}"
        unit = "" if self.unit is None else f"/{self.unit}"
        return f"{self.op} {self.stage}{micro_batch}{unit}"

    def __str__(self) -> str:
        if self.pair:
            return "&".join(map(str, self.pair))
        letter = LETTERS[self.op]
        if self.op in ("norm_barrier", "optim"):
            return letter
        if self.op in ("unshard", "reshard", "reduce_grad"):
            return f"{letter}{self.stage}/{self.unit}"
        if self.payload is not None:
            arrow = ">" if self.op == "send" else "<"
            return f"{letter}{self.payload[0].upper()}{self.stage}.{self.micro_batch}{arrow}{self.peer}"
        unit = "" if self.unit is None else f"/{self.unit}"
        return f"{letter}{self.stage}.{self.micro_batch}{unit}"


def together(first: Action, second: Action) -> Action:
    """Return one action for the same forward or backward of two micro-batches. Their parts alternate on the device."""
    return first._replace(micro_batch=-1, pair=(first, second))


def parse(text: str) -> Action:
    """Return the action with this printed form. Raises BadInput if there is none."""
    if "&" in text:
        first, second = map(parse, text.split("&", 1))
        if first.op in COMPUTE and first[:2] == second[:2] and first.unit == second.unit:
            return together(first, second)
    if text in ("N", "O"):
        return Action(_OP_BY_LETTER[text])
    if match := _COMPUTE_FORM.fullmatch(text):
        letter, stage, micro_batch, unit = match.groups()
        return Action(_OP_BY_LETTER[letter], int(stage), int(micro_batch), None if unit is None else int(unit))
    if match := _UNIT_FORM.fullmatch(text):
        letter, stage, unit = match.groups()
        return Action(_OP_BY_LETTER[letter], int(stage), unit=int(unit))
    match = _TRANSFER_FORM.fullmatch(text)
    if match and (match[1] == "S") == (match[5] == ">"):
        return Action(
            _OP_BY_LETTER[match[1]], int(match[3]), int(match[4]), peer=int(match[6]), payload=_PAYLOADS[match[2]]
        )
    raise BadInput(
        f"{text!r} is no action; expected a form such as F3.2, B3.2/1, SA3.2>4, RG2.2<3, U3/1, N, O or F3.2&F3.3"
    )


def parse_all(text: str) -> tuple[Action, ...]:
    """Parse printed forms separated by white space."""
    return tuple(parse(word) for word in text.split())
