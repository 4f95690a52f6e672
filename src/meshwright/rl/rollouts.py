"""The steps of a reinforcement-learning run: questions from the corpus, answers sampled from the current model, and their rewards.

A rollout replaces the data loader's reader of steps. The training loop, checkpoints, rollback, supervision and reports need no change.

A step that begins at sample n uses conversations n … n + `train.global_batch` − 1. The answers for `rl.updates` such steps form a batch and
are sampled together. They depend only on the weights before the batch, the seed, and these numbers. A checkpoint within a batch contains
the answers, so a run that was stopped continues with the same bits.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from meshwright.checkpoint.models.single_device import allocate
from meshwright.checkpoint.ranks import RankGroup
from meshwright.data.loader import LoadedStep
from meshwright.data.source import DataSource
from meshwright.data.tokenizer_file import open_tokenizer
from meshwright.kernels.exact_attention import exact_attention, rows_are_alike
from meshwright.models.block import Block
from meshwright.models.decoder import Decoder, Head
from meshwright.parallel.fsdp import DTYPES
from meshwright.parallel.mesh import Mesh
from meshwright.policies.skipped_samples import SampleRange
from meshwright.rl.exact_blocks import use_exact_blocks
from meshwright.rl.handover import WeightHandover
from meshwright.rl.objectives import Agreement, PolicyObjective
from meshwright.rl.reference import ReferenceModel
from meshwright.rl.reward_model import RewardModel
from meshwright.rl.rewards import RewardProcesses, RewardVerdict
from meshwright.rl.samples import SampledAnswer, batch_of, from_plain, to_plain
from meshwright.serve.engine import Engine
from meshwright.serve.failures import NotFinite
from meshwright.serve.generation import Update
from meshwright.serve.sampling_options import SamplingOptions
from meshwright.spec.errors import BadInput, NumericalFailure
from meshwright.spec.model import without_adapter
from meshwright.spec.plan import Plan
from meshwright.spec.rl import RlSpec
from meshwright.spec.run import RunSpec
from meshwright.state.parts import StateParts
from meshwright.workload.rollout_memory import rollout_options

log = logging.getLogger("meshwright")
KEPT_BATCHES = 2
"""Batches of answers in memory. The one before the latest is needed because a step's checkpoint is written one step later."""
RECENT_STEPS = 4
"""Number of latest steps whose answers are used by the prediction check of a run."""
ANSWERS = "answers"
"""Key of the answers in a checkpoint's plain values."""
MOST_CHARACTERS = 2000
"""Characters of a question or answer that are recorded for people to read."""


class Rollouts:
    """Reads steps of answers on this rank. Every rank has an engine with the whole model. The methods and the constructor are collective.

    `weights` are the trainer's weights. Each batch of answers is sampled from their values at that time. Call `close` at the end.
    """

    def __init__(
        self,
        run: RunSpec,
        plan: Plan,
        mesh: Mesh,
        weights: Mapping[str, StateParts],
        data: DataSource,
        ranks: RankGroup,
        group: dist.ProcessGroup | None,
    ) -> None:
        assert run.rl is not None
        self._rl: RlSpec = run.rl
        self._run = run
        self._mesh = mesh
        self._data = data
        self._ranks = ranks
        self._micro_batch = plan.batch.micro_batch
        self._prompts = run.train.global_batch
        self.objective = PolicyObjective(run.rl, Agreement(mesh.device))
        if data.tokenizer_file is None or data.text_format is None:
            raise BadInput("rl: expected data with a tokenizer, whose texts the reward function reads")
        self._tokenizer = open_tokenizer(data.tokenizer_file)
        self._stops = frozenset(data.text_format.stop_ids)
        dtype = DTYPES[plan.precision.compute]
        self._engine = _engine(run, mesh.device, dtype, self._rl.temperature, ranks.size)
        self._handover = WeightHandover(run.model, weights, ranks, group, dtype)
        self._reference = ReferenceModel(run.model, run.model.init, mesh.device, dtype) if self._rl.kl.weight else None
        self._judge = RewardModel(run, data.text_format, mesh.device, dtype) if self._rl.reward.model else None
        self._rewards = RewardProcesses(self._rl.reward) if self._judge is None else None
        self.on_progress: Callable[[int], None] = lambda action: None
        """Called with an increasing number at each step of the engine, and every second while the run waits for verdicts."""
        self._figures: dict[str, float] = {}
        self._sampled: dict[int, list[list[SampledAnswer]]] = {}
        """Answers of the latest batches, by the first sample of each batch."""
        self._groups: list[list[SampledAnswer]] = []
        """Answers of the step that was read last, one list for each question."""
        self._compares = True
        """Whether this step is the first update of its batch. Then the trainer should compute the same probabilities as the engine."""
        self.recent: deque[tuple[list[list[int]], int]] = deque(maxlen=RECENT_STEPS)
        """For each of the latest steps: lengths in its batch (see `_lengths`), and its number of training rows."""
        self.empty = False
        """Whether no answer of the step that was read last has a gradient."""
        self._said_alike = False
        """Whether a warning about a step with equal rewards was logged since the start. It is logged once."""

    def read(self, sample: int, skipped: Sequence[SampleRange] = ()) -> LoadedStep:
        """This rank's micro-batches of the step that begins at `sample`. Collective."""
        del skipped  # always whole steps, which the loop leaves out itself
        first = self._batch_of(sample)
        end = sample + self._prompts
        self._compares = first not in self._sampled
        seconds = dict.fromkeys(("handover_seconds", "rollout_seconds", "rewards_seconds"), 0.0)
        if self._compares:
            self._sampled[first], seconds = self._sample(first)
            for old in sorted(self._sampled)[:-KEPT_BATCHES]:
                del self._sampled[old]
        self._groups = self._sampled[first][sample - first : end - first]
        batch = batch_of(self._groups, self._rl, self._run.train.seq_len)
        batches = batch.micro_batches(self._micro_batch, self._mesh.data_rank, self._mesh.data_ranks)
        if self._reference is not None:
            batches = [self._reference.add_to(each, self._rl.temperature) for each in batches]
        self.empty = not len(batch.rows["tokens"])
        if self.empty and not self._said_alike and self._ranks.is_first and batch.figures["equal_prompts"]:
            self._said_alike = True
            log.warning(
                "rl: all answers to each question have the same reward: such steps train nothing (equal_prompts)"
            )
        self.recent.append((_lengths(self._sampled[first]), len(batch.rows["tokens"])))
        self._figures = batch.figures | seconds
        return LoadedStep(batches, (sample, end), sum(each.valid_tokens for each in batches))

    def end_step(self) -> dict[str, float]:
        """Figures of the step that was read last, including figures of its loss over all ranks. Collective. Waits for the device."""
        agreement = Agreement.figures(self._ranks.run_on_all("add figures", self.objective.agreement.take))
        return self._figures | (agreement if self._compares else {"clipped": agreement["clipped"]})

    def state(self, sample: int) -> dict[str, Any]:
        """State for a checkpoint from which the run continues at `sample`: the answers of its batch. Empty if a new batch begins there."""
        first = self._batch_of(sample)
        if sample == first or first not in self._sampled:
            return {}
        return {ANSWERS: {"first": first, "groups": to_plain(self._sampled[first])}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the answers in a checkpoint's plain values. Batches that they do not contain are sampled."""
        self._sampled.clear()
        if (stored := state.get(ANSWERS)) is None:
            return
        groups = from_plain(stored["groups"])
        asked = self._rl.updates * self._prompts, self._rl.samples
        if (len(groups), len(groups[0])) != asked or stored["first"] != self._batch_of(stored["first"]):
            log.warning(
                "the checkpoint's answers are not used: %d questions with %d answers each; this run has %d with %d",
                *(len(groups), len(groups[0]), *asked),
            )
            return
        self._sampled[stored["first"]] = groups

    def _batch_of(self, sample: int) -> int:
        """The first sample of the batch that contains `sample`."""
        return sample - sample % (self._rl.updates * self._prompts)

    def _sample(self, first: int) -> tuple[list[list[SampledAnswer]], dict[str, float]]:
        """Sample and judge the batch that begins at `first`. Returns all ranks' answers and the seconds of each part. Collective."""
        begin = self._time()
        self._engine.replace_weights(self._handover.tensors())
        handed_over = self._time()
        prompts = self._rl.updates * self._prompts
        ranks = self._ranks
        self._data.begin_step(range(first, first + prompts))
        own = range(*(first + prompts * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1)))
        sampled = ranks.run_on_all("sample answers", lambda: self._answers(own))
        judged = time.perf_counter()
        rollout_seconds = max(seconds for _, seconds in sampled)
        seconds = {
            "handover_seconds": handed_over - begin,
            "rollout_seconds": rollout_seconds,
            "rewards_seconds": max(judged - handed_over - rollout_seconds, 0.0),
        }
        return [group for of_rank, _ in sampled for group in of_rank], seconds

    def answers_to_read(self) -> dict[str, Any]:
        """A question of the step that was read last, with its best and its worst answer by reward.

        `lengths` has one list for each question of the step: the tokens of the question, then of each answer.
        """
        group = next((group for group in self._groups if len({answer.reward for answer in group}) > 1), self._groups[0])
        judged = sorted(group, key=lambda answer: -math.inf if answer.reward is None else answer.reward)
        shown = [judged[-1], judged[0]] if judged[-1].reward != judged[0].reward else judged[:1]
        decode = partial(self._tokenizer.decode, skip_special_tokens=True)
        answers = [
            {"answer": decode(each.tokens)[:MOST_CHARACTERS], "reward": each.reward, "outcome": each.outcome}
            for each in shown
        ]
        question = decode(group[0].prompt)[:MOST_CHARACTERS]
        return {"question": question, "answers": answers, "lengths": _lengths(self._groups)}

    @contextmanager
    def tempered(self, head: Head | None) -> Iterator[None]:
        """Within a `with` block, the trainer's head divides logits by the temperature, like the engine's. A stage may have no head."""
        if head is None:
            yield
            return
        factor = head.factor
        head.factor = head.factor / self._rl.temperature
        try:
            yield
        finally:
            head.factor = factor

    def close(self) -> None:
        """End the processes of the reward function."""
        if self._rewards is not None:
            self._rewards.close()

    def _time(self) -> float:
        """Current time in seconds, after the device has done all its work. This costs nothing: the engine's first step would wait too."""
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
        return time.perf_counter()

    def _answers(self, prompts: range) -> tuple[list[list[SampledAnswer]], float]:
        """Sample and judge answers to these conversations' questions. Returns them by question, and the seconds of sampling."""
        begin = time.perf_counter()
        answers: dict[int, SampledAnswer] = {}
        verdicts: dict[int, Future[RewardVerdict]] = {}
        texts: dict[int, tuple[str, str]] = {}
        numbers = [self._submit(prompt, answers, texts) for prompt in prompts]
        actions = count(1)
        for update in self._updates(actions):
            answer = answers[update.number]
            answer.tokens += update.tokens
            answer.logprobs += (logprob.chosen for logprob in update.logprobs)
            if update.code == NotFinite.code:
                raise NumericalFailure("rl: the logits of an answer are not finite: the weights have diverged")
            if update.reason == "failed":
                raise RuntimeError(f"the engine ended an answer: {update.error}")
            text = partial(self._text, list(answer.tokens))  # a copy without the stop token
            if update.stop_token is not None and update.stop_logprob is not None:
                answer.tokens.append(update.stop_token)
                answer.logprobs.append(update.stop_logprob)
            answer.truncated = update.stop_token is None
            if self._rewards is not None:
                question, reference = texts[update.number]
                verdicts[update.number] = self._rewards.submit(question, text, {"reference": reference})
        sampled = time.perf_counter()
        if self._judge is not None:
            self._judge.judge(list(answers.values()), lambda: self.on_progress(next(actions)))
        while wait(verdicts.values(), timeout=1.0).not_done:  # ends, because the function's processes have a time limit
            self.on_progress(next(actions))
        messages = []
        for number, verdict in verdicts.items():
            answers[number].outcome, answers[number].reward, message = verdict.result()
            messages += [message] if message else []
        if messages:
            log.warning(
                "rl.reward: %d of %d answers got no reward, and others to their questions are not trained on either; the first: %s",
                *(len(messages), len(verdicts), messages[0]),
            )
        return [[answers[number] for number in group] for group in numbers], sampled - begin

    def _text(self, tokens: list[int]) -> str:
        """The text of an answer.

        `decode_batch` releases the interpreter's lock. `decode` would hold it and stop the engine's thread.
        """
        return self._tokenizer.decode_batch([tokens], skip_special_tokens=True)[0]

    def _updates(self, actions: Iterator[int]) -> Iterator[Update]:
        """The updates of all steps of the engine. Each answer has one update, at its end."""
        while self._engine.unfinished:
            self.on_progress(next(actions))
            yield from self._engine.step()

    def _submit(self, sample: int, answers: dict[int, SampledAnswer], texts: dict[int, tuple[str, str]]) -> list[int]:
        """Submit a conversation's question to the engine. Returns the numbers of the answers."""
        conversation = self._data.conversation(sample)
        prompt = conversation.tokens[: conversation.answer].tolist()
        reference = conversation.tokens[conversation.answer :].tolist()
        room = self._run.train.seq_len + 1 - len(prompt)
        question, expected = (self._tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, reference))
        numbers = self._engine.submit_samples(
            prompt,
            self._rl.samples,
            sampling=SamplingOptions(seed=_seed(self._run.seed, sample), logprobs=True),
            new_tokens=min(self._rl.new_tokens, room),
            stop_ids=self._stops,
            reports_steps=False,
        )
        for number in numbers:
            answers[number] = SampledAnswer(prompt, [], [], truncated=False)
            texts[number] = question, expected
        return numbers


def use_exact_forward(model: Decoder, run: RunSpec, dtype: torch.dtype, ranks: int) -> None:
    """Make the forward of the trainer's model bitwise equal to that of an invariant engine.

    `dtype` is the type of activations, `ranks` the number of data ranks. Raises BadInput if this machine cannot compute equal bits.
    """
    if model.embed.weight.is_cuda:
        context = rollout_options(run, ranks).context
        assert context is not None
        use_exact_blocks(model, dtype, context)
        return
    if not rows_are_alike(model.spec.hidden, torch.float32):
        raise BadInput(
            "rl.exact: this CPU computes a row of a matmul otherwise in batches of other sizes; set rl.exact to false",
            key="rl.exact",
        )
    for block in model.layers.values():
        if isinstance(block, Block):
            block.hooks.attend = exact_attention


def _engine(run: RunSpec, device: torch.device, dtype: torch.dtype, temperature: float, ranks: int) -> Engine:
    """An engine next to the trainer. Its head divides logits by the temperature: log-probabilities fit the sampled distribution."""
    with torch.device("meta"):
        model = Decoder(without_adapter(run.model))
    allocate(model.to(dtype).requires_grad_(False), device)
    model.head.factor /= temperature
    return Engine(model, None, rollout_options(run, ranks))


def _lengths(groups: Sequence[Sequence[SampledAnswer]]) -> list[list[int]]:
    """For each question: its tokens, then the tokens of each of its answers."""
    return [[len(group[0].prompt), *(len(answer.tokens) for answer in group)] for group in groups]


def _seed(seed: int, sample: int) -> int:
    """The seed for a question's first answer."""
    return (seed * 0x9E3779B97F4A7C15 + sample * 0xD1B54A32D192ED03 + 1) % 2**63
