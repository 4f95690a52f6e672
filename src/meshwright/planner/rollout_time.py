"""Seconds of a step of reinforcement learning by phase: hand-over of weights, sampling, training.

Sampling is the serving simulator's time for the requests of the rank with the longest answer: the batch of decodes shrinks as answers end,
and while the last ones run most of the device is idle. Training is the plan's price for the rows that questions and answers fill. The time
of rewards is that of the user's function, which nobody can predict.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.costs.collective_costs import link_rate, port_rate
from meshwright.costs.machine_rates import is_guessed, unpredicted_message
from meshwright.costs.plan_costs import number, pricing
from meshwright.costs.serve_costs import ServeCosts
from meshwright.planner.reprice import predict
from meshwright.simulator.serve_simulation import simulate
from meshwright.spec.deployment import PREFIX_BLOCK, Deployment, InstanceSpec, ServeLimits, TimedRequest
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.model import parameter_count, parameters, without_adapter
from meshwright.spec.plan import Plan
from meshwright.spec.rl import RlSpec
from meshwright.spec.run import RunSpec
from meshwright.workload.dtypes import bytes_of
from meshwright.workload.rollout_memory import rollout_options

Lengths = Sequence[Sequence[int]]
"""Of each question its tokens, then those of each answer."""
COPY_SECONDS = 15e-6
"""Time of a parameter's copy beside that of its bytes."""
NO_LIMITS = ServeLimits(ttft_seconds=1e6, tpot_seconds=1e6)
LATER = 1e-6
"""Seconds after which the further answers to a question arrive: the first computes the question for all."""


@dataclass(frozen=True, kw_only=True)
class RlSeconds:
    """Predicted seconds of a step, mean over the updates of a batch of answers."""

    handover: float
    rollout: float
    training: float
    rows: int
    """Rows of `train.seq_len` tokens that the questions and answers of a step fill."""
    mean_tokens: float
    longest: int
    """Tokens of the longest answer."""

    @property
    def total(self) -> float:
        """The step without the time of rewards."""
        return self.handover + self.rollout + self.training


def rl_seconds(run: RunSpec, plan: Plan, lengths: Lengths | None = None, rows: int | None = None) -> RlSeconds:
    """Predict the phases of a step, for answers of `lengths` of a batch, and so many rows of a step; by default those expected.

    Raises BadInput, saying why, where they cannot be predicted.
    """
    assert run.rl is not None
    if run.rl.exact:
        raise BadInput("times of exact engines and trainers are not predicted", key="rl.exact")
    if is_guessed(run.cluster):
        raise BadInput(unpredicted_message(run.cluster))
    lengths = lengths or expected_lengths(run.rl, run.train.global_batch, run.train.seq_len)
    answers = [answer for _, *of_question in lengths for answer in of_question]
    if rows is None:
        tokens = sum(question + answer - 1 for question, *of_question in lengths for answer in of_question)
        rows = math.ceil(tokens / run.train.seq_len / run.rl.updates)
    return RlSeconds(
        handover=_handover(run, plan) / run.rl.updates,
        rollout=_rollout(run, plan, lengths) / run.rl.updates,
        training=_training(run, plan, rows),
        rows=rows,
        mean_tokens=sum(answers) / len(answers),
        longest=max(answers),
    )


def expected_lengths(rl: RlSpec, prompts: int, seq_len: int) -> Lengths:
    """Lengths of a batch before any is known: geometric ones of the mean that `rl` presumes, cut at `rl.new_tokens`, in a random order.

    Example: of 512 answers with a mean of 128 tokens and no limit near, the longest has 888.
    """
    count = prompts * rl.updates * rl.samples
    mean = min(rl.presumed_answer or rl.new_tokens / 2, rl.new_tokens)
    prompt = rl.presumed_question or max((seq_len - rl.new_tokens) // 2, 1)
    scale = _scale(mean, rl.new_tokens)
    tokens = [
        min(max(math.ceil(-scale * math.log1p(-(number + 0.5) / count)), 1), rl.new_tokens) for number in range(count)
    ]
    random.Random(0).shuffle(tokens)
    return [[prompt, *tokens[first : first + rl.samples]] for first in range(0, count, rl.samples)]


def _scale(mean: float, most: int) -> float:
    """The scale of an exponential distribution that has this mean once it is cut at `most`; a mean near `most` takes a large one.

    Answers of 100 tokens on average that are cut at 256 come from a distribution with a longer mean:

    >>> round(_scale(mean=100, most=256), 1)
    111.1
    """
    low = mean
    high = 1e3 * most
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle * -math.expm1(-most / middle) < mean else (low, middle)
    return low


def _rollout(run: RunSpec, plan: Plan, lengths: Lengths) -> float:
    """Seconds of the engine of the rank whose answers are longest."""
    ranks = plan.ranks
    options = rollout_options(run, plan.ranks)
    shares = [lengths[len(lengths) * rank // ranks : len(lengths) * (rank + 1) // ranks] for rank in range(ranks)]
    share = max(shares, key=lambda share: max((max(answers) for _, *answers in share), default=0))
    first: list[TimedRequest] = []
    later: list[TimedRequest] = []
    for place, (question, *answers) in enumerate(share):
        blocks = tuple(place * run.train.seq_len + block for block in range(-(-question // PREFIX_BLOCK)))
        first.append(TimedRequest(0.0, question, answers[0], blocks))
        later += (TimedRequest(LATER, question, answer, blocks) for answer in answers[1:])
    try:
        costs = ServeCosts(without_adapter(run.model), run.cluster, settings=options)
        deployment = Deployment(instances=(InstanceSpec(token_budget=options.step_tokens),))
        return simulate(deployment, [*first, *later], costs, NO_LIMITS).seconds
    except OutOfResources as error:
        raise BadInput(str(error)) from error


def _handover(run: RunSpec, plan: Plan) -> float:
    """Seconds in which an engine gets all weights: read and written in device memory, and moved where ranks divide them."""
    prices = pricing(run.model, run.train, plan, run.cluster)
    if prices is None:
        raise BadInput(unpredicted_message(run.cluster))
    count = parameter_count(run.model)
    precision = plan.precision
    written = count * bytes_of(precision.compute)
    # Frozen weights, those of nearly all of a model with adapters, are stored in the dtype of compute.
    read = count * bytes_of(precision.stored if run.model.adapter is None else precision.compute)
    seconds = (read + written) / number(prices.machine.hbm) + COPY_SECONDS * len(parameters(run.model))
    if plan.ranks > 1:
        rate = (port_rate if run.cluster.nodes > 1 else link_rate)(prices.machine, prices.constants)
        seconds += written / number(rate)
    return seconds


def _training(run: RunSpec, plan: Plan, rows: int) -> float:
    """Seconds of the plan's step for so many rows."""
    each = plan.batch.global_batch // plan.batch.accumulate
    count = max(-(-rows // each), 1)
    batch = replace(plan.batch, global_batch=each * count, accumulate=count)
    asked = replace(run, train=replace(run.train, global_batch=each * count))
    predicted = predict(asked, replace(plan, batch=batch)).predicted
    if predicted is None or predicted.step_seconds is None:
        raise BadInput(unpredicted_message(run.cluster))
    return predicted.step_seconds
