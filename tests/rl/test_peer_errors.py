"""Errors of other programs that raised nothing, each with the test that would fail if this one had it.

The errors are those that users have reported of published programs for reinforcement learning. `ERRORS` names the tests of each. Some could
only happen in asynchronous runs, where samples of older weights are trained on; here a step reads its answers inside itself, and what could
go wrong of it instead is tested. Those of preferences and of fine-tuning are in tests/preferences/test_peer_errors.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.config.load import load_run
from meshwright.data.source import open_data
from meshwright.data.tokenizer_file import open_tokenizer
from meshwright.kernels.rope import RotaryTables
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.rl.rollouts import ANSWERS
from meshwright.rl.samples import SampledAnswer, from_plain
from meshwright.serve.cached_attention import whole_tables
from meshwright.serve.kv_cache import KVCache
from tests.distributed.pool import Pool
from tests.distributed.test_training import merge_tensors, same_bits, trained
from tests.models.tiny import LLAMA
from tests.named_tests import missing_tests
from tests.rl.corpus import make_questions
from tests.training.tiny import ranks

HERE, SAMPLES = "tests/rl/test_peer_errors.py", "tests/rl/test_samples.py"
RUNS, REWARDS, RULES = "tests/distributed/test_rl.py", "tests/rl/test_rewards.py", "tests/config/test_rl_rules.py"
POLICIES = "tests/distributed/test_policy_objectives.py"
BITS, GPU_BITS, WEIGHTS = "tests/serve/test_exact.py", "tests/gpu/test_exact.py", "tests/serve/test_weights.py"
FORMULA = "test_the_loss_is_that_of_the_formula_for_any_rows_and_ranks"
SAMPLED = "test_probabilities_are_those_of_the_distribution_that_was_sampled"
EQUAL, BROKEN = "test_the_engine_samples_with_the_probabilities_of_the_trainer", "test_broken_rules_are_named"
RESUMED, UPDATES = (
    "test_a_stopped_run_goes_on_with_the_same_bits",
    "test_updates_of_one_batch_keep_the_sampled_probabilities",
)
ERRORS: dict[str, list[str]] = {
    # Losses
    "log-probabilities before temperature, or divided by it after the softmax (TRL#4159, prime-rl#697, NeMo RL#935, vime#69)": [
        f"{HERE}::{SAMPLED}"
    ],
    "top-p renormalises on one side (ms-swift#8442)": [f"{HERE}::{SAMPLED}", f"{RULES}::{BROKEN}"],
    "truncated answers in the divisor and not in the sum (TRL#6369)": [f"{SAMPLES}::{FORMULA}"],
    "divisor of a micro-batch or a rank (TRL#3021, TRL#2175)": [
        f"{SAMPLES}::{FORMULA}",
        f"{POLICIES}::test_every_policy_equals_one_device_on_every_axis",
    ],
    "trainer in fp32 beside an engine in bf16: tokens clipped before any change (TRL AsyncGRPO)": [
        f"{HERE}::test_nothing_is_clipped_before_the_first_update",
        f"{RULES}::{BROKEN}",
    ],
    "text decoded and encoded again (verl#3960, verl#3720, SGLang#26555, ms-swift#10012)": [
        f"{HERE}::{SAMPLED}",
        "tests/rl/test_reward_model.py::test_rewards_are_the_scores_that_transformers_gives",
    ],
    "the environment fails, the reward is 0, training goes on (NeMo-Gym#1351)": [
        f"{REWARDS}::test_a_call_gives_a_reward_or_says_why_not",
        f"{SAMPLES}::{FORMULA}",
    ],
    "gradient of the k3 estimate taken for that of another (DeepSeek-V3.2)": [
        f"{POLICIES}::test_every_policy_equals_one_device_on_every_axis"
    ],
    "a reward for short answers does not lead to short answers (TRL)": [
        f"{HERE}::test_a_reward_for_short_answers_leads_to_short_answers"
    ],
    # Rewards
    "a limit by a signal raises in threads, a right answer counts as wrong (math-verify)": [
        f"{REWARDS}::test_a_call_gives_a_reward_or_says_why_not"
    ],
    "a message of a reward's program is taken for a reward": [f"{REWARDS}::test_a_call_gives_a_reward_or_says_why_not"],
    # Rollouts
    "cached blocks of older weights are read (NeMo RL#4018, lmdeploy#4917)": [
        f"{WEIGHTS}::test_logits_after_the_swap_are_those_of_the_new_weights",
        f"{HERE}::test_questions_that_come_again_are_read_by_the_new_weights",
    ],
    # asynchronous there: a saved cursor was ahead of what had been trained on; here it is the step's first sample
    "a resumed run leaves out prompts, mostly of long answers (NeMo RL#3599, TRL#5911)": [
        f"{RUNS}::{UPDATES}",
        f"{RUNS}::{RESUMED}",
        "tests/faults/test_rl.py::test_a_killed_run_ends_with_the_same_bits",
    ],
    "batches in the order in which answers are complete (verl)": [
        f"{HERE}::test_verdicts_in_another_order_change_nothing",
        f"{RUNS}::test_layouts_sample_the_same_answers",
    ],
    "what is left of a group trains, which is biased (tinker-cookbook#497)": [f"{SAMPLES}::{FORMULA}"],
    # asynchronous there: answers to one batch outlive it; here a step waits for all of its answers
    "long answers are cut off or dropped, so that lengths are biased (slime)": [f"{RUNS}::{UPDATES}"],
    # Engine and trainer
    "tiles and splits of matmuls follow the batch (vLLM, SGLang)": [f"{BITS}::{EQUAL}", f"{GPU_BITS}::{EQUAL}"],
    "attention of prompts other than that of decodes": [f"{BITS}::{EQUAL}", f"{GPU_BITS}::{EQUAL}"],
    "fused norm, rotation or gate rounds in other places": [f"{GPU_BITS}::{EQUAL}"],
    "log-softmax by another kernel": [f"{GPU_BITS}::test_log_probabilities_do_not_depend_on_the_other_rows"],
    "rotary tables in the dtype of activations (torchtitan)": [
        f"{HERE}::test_rotary_tables_are_those_of_the_engine_in_every_dtype"
    ],
    "a router's matmul sends a token to another expert; sums of experts and of tensor ranks": [f"{RULES}::{BROKEN}"],
    "adapters merged on one side": [f"{RULES}::{BROKEN}", f"{RUNS}::{RESUMED}"],
    "fp8 scales of a micro-batch on one side and of a token on the other": [f"{RULES}::{BROKEN}"],
    "the sampled log-probability is copied to where it should be computed": [f"{HERE}::{SAMPLED}"],
    "deviation without correction: the run drifts": [
        "tests/rl/test_drift.py::test_a_correction_keeps_a_run_from_drifting_where_the_engine_differs"
    ],
    # Plans
    "the time of sampling is predicted from mean lengths (RLinf)": [
        "tests/planner/test_rollout_time.py::test_sampling_takes_the_decode_steps_of_a_shrinking_batch"
    ],
}
"""Errors and the programs that had them, with the tests that would fail."""


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_has_a_test(error: str) -> None:
    assert not missing_tests(ERRORS[error])


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_questions(tmp_path_factory.getbasetemp() / "questions")


def stored_answers(runs: Path) -> list[SampledAnswer]:
    """The answers of the batch within which a run was stopped, from its checkpoint."""
    (checkpoint,) = runs.glob("*/checkpoints/step-*")
    with CheckpointReader(checkpoint) as reader:
        return [answer for group in from_plain(reader.state()[ANSWERS]["groups"]) for answer in group]


HOT = ["rl.temperature=0.6", "rl.exact=true", "rl.updates=2", "rl.samples=8", "train.warmup_steps=0"]


def test_probabilities_are_those_of_the_distribution_that_was_sampled(
    pool: Pool, questions: Path, tmp_path: Path
) -> None:
    """They are of the sampled tokens themselves, after temperature, over the whole vocabulary.

    The trainer computes them with the same bits. The folder of the base model has a `top_k` of 1 for its server: no answers would differ.
    """
    (seen,) = trained(pool, questions, tmp_path, *ranks(1), *HOT, stop_at=1)
    answers, run = stored_answers(tmp_path), load_run(questions, HOT)
    data = open_data(run.data, seq_len=32, seed=0, conversations=True)
    assert data.tokenizer_file is not None
    tokenizer, model = open_tokenizer(data.tokenizer_file), Decoder(run.model, reference=True).double()
    initialise(model, run.model, seed=run.seed)
    for answer in answers:
        with torch.no_grad():
            logits = model(torch.tensor([[*answer.prompt, *answer.tokens]]))[0, len(answer.prompt) - 1 : -1] / 0.6
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert answer.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert len({tuple(answer.tokens) for answer in answers}) > len(answers) / 2
    assert seen.steps[0]["unequal_logprobs"] == 0
    # Most texts are spelled by other tokens than those that were sampled.
    texts = [tokenizer.decode(answer.tokens, skip_special_tokens=False) for answer in answers]
    again = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert sum(ids != answer.tokens for ids, answer in zip(again, answers, strict=True)) > len(answers) / 2


def test_a_reward_for_short_answers_leads_to_short_answers(pool: Pool, questions: Path, tmp_path: Path) -> None:
    """With minus the number of letters as its reward, a model that knows nothing ends its answers at once within 30 updates."""
    words = ["rl.reward.function=short", "rl.samples=8", "train.steps=30", "train.learning_rate=1e-2"]
    (seen,) = trained(pool, questions, tmp_path, *ranks(1), *words, "train.min_learning_rate=1")
    lengths = [step["answer_tokens"] for step in seen.steps]
    assert lengths[0] > 7 and sum(lengths[-3:]) / 3 < 1.1


def test_verdicts_in_another_order_change_nothing(pool: Pool, questions: Path, tmp_path: Path) -> None:
    words = [*ranks(2), "train.steps=2", "train.warmup_steps=0"]
    in_order = trained(pool, questions, tmp_path / "in-order", *words)
    late = trained(pool, questions, tmp_path / "late", *words, "rl.reward.function=late", "rl.reward.processes=4")
    assert same_bits(merge_tensors(late), merge_tensors(in_order))
    assert [step["reward"] for step in late[0].steps] == [step["reward"] for step in in_order[0].steps]


def test_questions_that_come_again_are_read_by_the_new_weights(pool: Pool, questions: Path, tmp_path: Path) -> None:
    """Each of the 32 questions is read four times in 16 steps; what an earlier step has cached of it would give other bits."""
    words = ["rl.exact=true", "train.steps=16", "train.learning_rate=2e-2", "train.warmup_steps=0"]
    (seen,) = trained(pool, questions, tmp_path, *ranks(1), *words)
    assert min(seen.steps[-1]["epochs"].values()) > 3
    assert [step["unequal_logprobs"] for step in seen.steps] == [0.0] * 16
    assert len({step["entropy"] for step in seen.steps}) == 16


def test_nothing_is_clipped_before_the_first_update(pool: Pool, questions: Path, tmp_path: Path) -> None:
    """The engine has the trainer's dtype: without `exact` too no token's probability differs by a factor near the clip's 1.2."""
    words = ["train.steps=2", "train.warmup_steps=0", "train.learning_rate=2e-2"]
    (seen,) = trained(pool, questions, tmp_path, *ranks(1), *words)
    assert [step["clipped"] for step in seen.steps] == [0.0, 0.0]
    assert 0 < max(step["largest_logprob_difference"] for step in seen.steps) < math.log(1.2) / 1000


def test_rotary_tables_are_those_of_the_engine_in_every_dtype() -> None:
    """Also in bf16 they are those of fp32, bit for bit, on both sides."""
    positions, tables = torch.arange(64)[None], dict[Any, Any]()
    for dtype in (torch.float32, torch.bfloat16):
        shared = Decoder(LLAMA).shared_inputs(torch.zeros(1, 64, dtype=torch.long), positions, None, dtype)
        (ours, _), *_ = shared.by_kind.values()
        cache = KVCache(LLAMA, [4], tokens_per_block=16, device=torch.device("cpu"), dtype=dtype)
        (engine,) = whole_tables(cache, 64, dtype)
        tables[dtype] = flat(ours), flat(engine)
    assert all(table.dtype == torch.float32 for pair in tables.values() for side in pair for table in side)
    expected = tables[torch.float32][0]
    for pair in tables.values():
        for side in pair:
            assert all(torch.equal(table, other) for table, other in zip(side, expected, strict=True))


def flat(tables: RotaryTables | None) -> list[torch.Tensor]:
    assert tables is not None
    return [table.reshape(64, -1) for table in tables]
