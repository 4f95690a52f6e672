"""An MoE layer, which some blocks have instead of a feed-forward network."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from meshwright.spec.blocks.feed_forward import FeedForwardSpec
from meshwright.spec.blocks.part import BodyPlace
from meshwright.spec.blocks.table import (
    ActivateOp,
    ExchangeOp,
    ExpertsOp,
    FusedWeight,
    GateOp,
    LinearOp,
    Op,
    RouteOp,
    Rows,
    Value,
    VectorOp,
    WeighOp,
)
from meshwright.spec.divisors import divisors
from meshwright.spec.errors import WrongKey

RouterScore = Literal["softmax", "sigmoid", "biased_softmax"]
LEAST_SUM = 1e-12
"""Minimum divisor of a token's weights with a biased softmax: the bias may choose experts whose probability is 0."""


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How the experts of a token are chosen, and with which weights their outputs are added."""

    score: RouterScore = "softmax"
    """Scores of experts.

    `sigmoid` (DeepSeek-V3) and `biased_softmax` (ERNIE 4.5) choose experts by score plus a bias, which balances their
    loads.
    """
    normalised: bool = True
    """Whether weights are scores divided by the sum of the chosen scores; otherwise they are the scores."""
    groups: int = 1
    """Number of groups of experts. The experts of a token are in `groups_per_token` of them."""
    groups_per_token: int = 1
    """Number of groups in which the experts of a token are."""
    scale: float = 1.0
    """Factor of the weights."""
    bias: bool = False
    """Whether the router's linear layer has a bias."""

    @property
    def choice_bias(self) -> bool:
        """Return whether experts are chosen by score plus a bias."""
        return self.score != "softmax"

    def mistakes(self, experts: int, per_token: int) -> Iterator[WrongKey]:
        """Yield what is wrong with the groups of `experts` experts. Mistakes name keys of `model`."""
        groups = self.groups
        size = experts // groups
        least = 2 if self.choice_bias and groups > 1 else 1
        if groups > 1 and (experts % groups or size < least):
            valid = [count for count in divisors(experts) if experts // count >= least]
            near = str(min(valid, key=lambda count: abs(count - groups), default=1))
            expected = "a divisor of {experts}" + f" with at least {least} in a group" * (least > 1)
            yield WrongKey("expert_groups", str(groups), expected, near, (("experts", experts),))
        found = str(self.groups_per_token)
        if self.groups_per_token > groups:
            yield WrongKey("groups_per_token", found, "1 to {expert_groups}", str(groups), (("expert_groups", groups),))
        elif groups > 1 and size and self.groups_per_token * size < per_token <= experts:
            near = str(-(-per_token // size))
            beside = (("experts_per_token", per_token),)
            yield WrongKey("groups_per_token", found, "groups with {experts_per_token} experts", near, beside)


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A router, routed experts, and maybe a shared expert that computes all tokens."""

    MODULE: ClassVar[str] = "moe"
    NORM: ClassVar[str] = "mlp_norm"
    OUTPUT_NORM: ClassVar[str] = "mlp_output_norm"

    experts: int
    """Number of routed experts."""
    per_token: int
    """Number of routed experts of a token."""
    expert: FeedForwardSpec
    """Each of the routed experts."""
    router: RouterSpec
    shared: FeedForwardSpec | None = None
    """The shared expert; None if there is none."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by the sigmoid of a linear layer of width 1 (Qwen2-MoE)."""
    width: int | None = None
    """Width of what experts read and write; None is the width of the residual stream."""

    def operations(self, place: BodyPlace) -> Iterator[Op]:
        """Yield router, exchange of rows (if `place.spread`), experts, sum of a token's rows, and shared expert."""
        name = place.name
        if self.router.choice_bias:
            yield VectorOp(name=name("choice_bias"), reads=(), size=self.experts, trained=False)
        scores = Value(name("scores"), self.experts)
        yield LinearOp(
            name=name("router"),
            reads=(place.reads,),
            writes=(scores,),
            inputs=place.hidden,
            outputs=self.experts,
            std=place.std,
            split="whole",
            bias=self.router.bias,
            router=True,
        )
        yield RouteOp(name=name("route"), reads=(scores.name,))
        outputs = yield from self._routed(place)
        yield Op(name=name("combine"), reads=(outputs,), writes=(Value(name("routed_output"), place.hidden),))
        summed = (name("routed_output"),)
        if self.shared is not None:
            shared = replace(place, prefix=name("shared"))
            yield from self.shared.operations(shared, tiled=False)
            summed = (*summed, shared.output.name)
            if self.shared_gate:
                gate = Value(name("shared_gate_output"), 1)
                gated = Value(name("gated_shared"), place.hidden)
                yield LinearOp(
                    name=name("shared_gate"),
                    reads=(place.reads,),
                    writes=(gate,),
                    inputs=place.hidden,
                    outputs=1,
                    std=place.std,
                    split="whole",
                    router=True,
                )
                yield GateOp(name=name("gate_shared"), reads=(shared.output.name, gate.name), writes=(gated,))
                summed = (name("routed_output"), gated.name)
        yield Op(name=name("sum"), reads=summed, writes=(place.output,))

    def _routed(self, place: BodyPlace) -> Generator[Op, None, str]:
        """Yield the operations on rows, one row for each expert of a token; return the name of the experts' outputs in
        the order of the tokens.
        """
        name = place.name
        expert = self.expert
        width = self.width or place.hidden

        def rows(inside: str, width: int, kind: Rows = "received") -> Value:
            return Value(name(inside), width, kind, self.per_token)

        inputs = rows("rows", width)
        if place.spread:
            sent = rows("sent_rows", width, "sent")
            yield Op(name=name("sort"), reads=(place.reads,), writes=(sent,))
            yield ExchangeOp(name=name("dispatch"), reads=(sent.name,), writes=(inputs,), stages=True)
        else:
            yield Op(name=name("sort"), reads=(place.reads,), writes=(inputs,))
        projected = rows("projected", expert.first_width)
        activated = rows("activated", expert.width)
        outputs = rows("expert_outputs", width)
        sizes = {"experts": self.experts, "per_token": self.per_token}
        yield ExpertsOp(
            name=name(f"experts.{expert.first}"),
            reads=(inputs.name,),
            writes=(projected,),
            inputs=width,
            outputs=expert.first_width,
            std=place.std,
            bias=expert.bias,
            parts=(FusedWeight("gate", expert.width), FusedWeight("up", expert.width)) if expert.gated else (),
            **sizes,
        )
        yield ActivateOp(name=name("experts.activate"), reads=(projected.name,), writes=(activated,))
        yield ExpertsOp(
            name=name("experts.down"),
            reads=(activated.name,),
            writes=(outputs,),
            inputs=expert.width,
            outputs=width,
            std=place.residual_std,
            bias=expert.bias,
            **sizes,
        )
        if not place.spread:  # the router's weights are multiplied into the activation instead
            return outputs.name
        returned = rows("returned_rows", width, "sent")
        weighted = rows("weighted_rows", width, "sent")
        yield ExchangeOp(name=name("return"), reads=(outputs.name,), writes=(returned,))
        yield WeighOp(name=name("weigh"), reads=(returned.name,), writes=(weighted,))
        return weighted.name

    def mistakes(self) -> Iterator[WrongKey]:
        """Yield what is wrong with the experts. Mistakes name keys of `model`."""
        if not 1 <= self.per_token <= self.experts:
            near = str(min(max(self.per_token, 1), self.experts))
            yield WrongKey(
                "experts_per_token", str(self.per_token), "1 to {experts}", near, (("experts", self.experts),)
            )
        yield from self.router.mistakes(self.experts, self.per_token)
