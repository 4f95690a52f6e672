"""Predicts the seconds of a step of reinforcement learning by phase: hand-over of weights, sampling of answers,
training.

- Sampling: the serving simulator plays the requests of the rank with the longest answer. As answers end, fewer requests
  run together; while the last answers are sampled, most of the device is idle.
- Training: the predicted step of the plan, for the rows that questions and answers fill.
- The time of rewards depends on the user's own function, so it is not predicted.
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
"""For each question a sequence of numbers of tokens: of the question, then of each of its answers."""
COPY_SECONDS = 15e-6
"""Seconds to copy one parameter tensor, in addition to the time for its bytes."""
NO_LIMITS = ServeLimits(ttft_seconds=1e6, tpot_seconds=1e6)
"""Latency limits that every request meets."""
LATER = 1e-6
"""Seconds by which the other answers to a question arrive after the first.

The first one computes the question for all of them.
"""


@dataclass(frozen=True, kw_only=True)
class RlSeconds:
    """Predicted seconds of a step, as a mean over the updates of a batch of answers."""

    handover: float
    """Seconds in which the engine gets the trainer's weights."""
    rollout: float
    """Seconds of sampling."""
    training: float
    """Seconds of the trainer's step."""
    rows: int
    """Rows of `train.seq_len` tokens that the questions and answers of a step fill."""
    mean_tokens: float
    """Mean number of tokens of an answer."""
    longest: int
    """Number of tokens of the longest answer."""

    @property
    def total(self) -> float:
        """Return the seconds of the step without the time of rewards."""
        return self.handover + self.rollout + self.training


def rl_seconds(run: RunSpec, plan: Plan, lengths: Lengths | None = None, rows: int | None = None) -> RlSeconds:
    """Return the predicted phases of a step.

    `lengths` are the lengths of a batch, by default `expected_lengths`. `rows` is the number of rows that are trained
    per step, by default as many as the lengths fill. Raises BadInput with the reason if times cannot be predicted.
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
    """Return lengths of a batch before any answer is known.

    Answers have a geometric distribution with the mean that `rl` presumes, cut at `rl.new_tokens`, in random order.
    Example: of 512 answers with a mean of 128 tokens and a much higher limit, the longest has 888.
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
    """Return the scale of an exponential distribution that has the given mean after its values are cut at `most`.

    A mean near `most` needs a large scale. For example, if values are cut at 256 tokens and then have a mean of 100,
    the scale is:

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
    """Return the seconds of sampling on the rank with the longest answer."""
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
    """Return the seconds in which an engine gets all weights.

    They are read and written in device memory, and sent between ranks if several ranks divide them.
    """
    prices = pricing(run.model, run.train, plan, run.cluster)
    if prices is None:
        raise BadInput(unpredicted_message(run.cluster))
    count = parameter_count(run.model)
    precision = plan.precision
    written = count * bytes_of(precision.compute)
    # A model with adapters has almost only frozen weights. They are stored in the compute dtype.
    read = count * bytes_of(precision.stored if run.model.adapter is None else precision.compute)
    seconds = (read + written) / number(prices.machine.hbm) + COPY_SECONDS * len(parameters(run.model))
    if plan.ranks > 1:
        rate = (port_rate if run.cluster.nodes > 1 else link_rate)(prices.machine, prices.constants)
        seconds += written / number(rate)
    return seconds


def _training(run: RunSpec, plan: Plan, rows: int) -> float:
    """Return the predicted seconds of the plan's step for `rows` rows."""
    each = plan.batch.global_batch // plan.batch.accumulate
    count = max(-(-rows // each), 1)
    batch = replace(plan.batch, global_batch=each * count, accumulate=count)
    asked = replace(run, train=replace(run.train, global_batch=each * count))
    predicted = predict(asked, replace(plan, batch=batch)).predicted
    if predicted is None or predicted.step_seconds is None:
        raise BadInput(unpredicted_message(run.cluster))
    return predicted.step_seconds
