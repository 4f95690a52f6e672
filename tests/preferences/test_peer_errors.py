"""Errors of other programs that raised nothing in training on preferences and chats, each with the test that would fail if this one had it.

Those of reinforcement learning are in tests/rl/test_peer_errors.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.config.load import load_run
from meshwright.spec.errors import BadConfig
from tests.data.chats import CHATML, marked
from tests.data.test_preferences import PAIRS, opened, prepared
from tests.distributed.pool import Pool
from tests.distributed.test_preferences import figures, forget
from tests.distributed.test_training import trained
from tests.named_tests import missing_tests
from tests.preferences.corpus import make_preferences
from tests.training.tiny import ranks

HERE, DATA, LOSSES = (
    "tests/preferences/test_peer_errors.py",
    "tests/data/test_preferences.py",
    "tests/preferences/test_losses.py",
)
RUNS, RANKS, CHATS = (
    "tests/preferences/test_runs.py",
    "tests/distributed/test_preferences.py",
    "tests/data/test_chat.py",
)
AXES = "tests/distributed/test_objectives.py::test_every_axis_equals_one_device"
PACKED = f"{LOSSES}::test_packed_pairs_equal_single_pairs_and_the_formulas"
SPLIT = f"{HERE}::test_micro_batches_and_ranks_do_not_change_a_step"
ERRORS: dict[str, list[str]] = {
    # Preferences
    "the prompt is masked in the chosen half only (OpenRLHF#294)": [
        f"{DATA}::test_every_form_is_the_same_pair",
        PACKED,
    ],
    "padding counts as a rejected answer: the first loss is 6 · ln 2 (open-instruct#1900)": [
        f"{LOSSES}::test_the_first_loss_and_margin",
        f"{RANKS}::test_layouts_learn_the_same",
    ],
    "no position ids with padding: 34 nats off (TRL#6800)": [
        f"{RUNS}::test_packed_pairs_have_the_log_probabilities_of_single_ones"
    ],
    "ipo divided by the tokens of a packed row (ms-swift#9925)": [PACKED, SPLIT],
    "orpo not divided under accumulation (TRL#3716)": [f"{LOSSES}::test_micro_batches_add_up", SPLIT],
    "dropout in the policy only (TRL#639, TRL#2042)": [
        f"{HERE}::test_there_is_no_dropout",
        f"{RANKS}::test_the_first_margin_is_zero_to_the_last_bit",
    ],
    "the divisor of tokens instead of pairs, or of a rank's pairs": [AXES, SPLIT],
    "a prompt's tokens found by encoding its text again": [f"{DATA}::test_boundaries_are_those_of_tokens"],
    "both answers of a pair in different updates": [f"{DATA}::test_pairs_stay_together"],
    "z of kto from answers to their own prompts, or of one rank": [
        f"{DATA}::test_mismatched_answers_have_other_prompts_and_the_same_room",
        f"{RANKS}::test_kto",
    ],
    "the reference computed once and read for other weights, template or tokenizer": [
        f"{RUNS}::test_keys_follow_from_weights_corpus_and_dtype",
        f"{RUNS}::test_a_reference_of_another_tokenizer_is_refused",
        f"{HERE}::test_another_template_is_another_corpus",
    ],
    "the reference of adapters has the adapters on": [f"{RANKS}::test_adapters_begin_as_their_reference"],
    "a reference of the resumed weights instead of the first": [
        f"{RANKS}::test_a_stopped_run_goes_on_with_the_same_bits"
    ],
    "chosen and rejected columns the wrong way round": [f"{LOSSES}::test_swapping_the_answers_negates_the_margin"],
    "bad answers read as chats and trained on": [f"{DATA}::test_labels_are_not_lost_as_chats"],
    "a reward model's score read at padding": [
        "tests/preferences/test_reward_models.py::test_padding_and_batches_change_no_score"
    ],
    # Chats
    "a template without marks: all tokens are trained on, or none (Bridge#3359, levanter, marin#7237)": [
        f"{CHATS}::test_templates_without_certain_masks_are_refused",
        f"{CHATS}::test_tokens_and_mask_are_those_of_transformers",
    ],
    "a template that drops earlier reasoning: messages are no prefix of tokens (prime-rl#1334)": [
        f"{CHATS}::test_a_forgetting_template_is_exact_with_generation_blocks",
        "tests/data/test_message_ranges.py::test_what_is_not_certain_is_refused",
    ],
    "weights of messages ignored, or divided by the wrong number (TRL#5761)": [
        f"{CHATS}::test_weights_of_messages_and_chats_multiply",
        AXES,
    ],
}
"""Errors and the programs that had them, with the tests that would fail."""


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_has_a_test(error: str) -> None:
    assert not missing_tests(ERRORS[error])


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_preferences(tmp_path_factory.getbasetemp() / "preferences")


@pytest.mark.parametrize("loss", ["orpo", pytest.param("ipo", marks=pytest.mark.slow)])
def test_micro_batches_and_ranks_do_not_change_a_step(pool: Pool, pairs: Path, tmp_path: Path, loss: str) -> None:
    """Loss, gradient norm and margin of two steps with one sequence a micro-batch, with all eight, and on two ranks."""
    seen: dict[str, Any] = {}
    for name, plan in {
        "1": [*ranks(1), "plan.micro_batch=1"],
        "8": [*ranks(1), "plan.micro_batch=8"],
        "two": ranks(2),
    }.items():
        forget(pairs)
        words = [f"preference.loss={loss}", "train.steps=2", "train.warmup_steps=0", "train.clip_norm=0.1"]
        results = trained(pool, pairs, tmp_path / name, *plan, *words)
        seen[name] = [figures(results, figure) for figure in ("loss", "grad_norm", "margin", "pairs")]
    for name in ("8", "two"):
        for ours, expected in zip(seen[name], seen["1"], strict=True):
            assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_there_is_no_dropout(pairs: Path) -> None:
    """Neither of the model nor of adapters: policy and reference are one function."""
    for key in ("model.dropout", "model.attention_dropout", "model.adapter.dropout"):
        with pytest.raises(BadConfig, match="dropout"):
            load_run(pairs, [f"{key}=0.1"])


def test_another_template_is_another_corpus(tmp_path: Path) -> None:
    """The key of stored log-probabilities has the digest of the corpus, which is that of its tokens and of what is trained on."""
    digests = set()
    for name, template in {
        "first": CHATML,
        "again": CHATML,
        "longer": CHATML.replace("<|im_start|>", "<|im_start|>-"),
    }.items():
        prepared(tmp_path / name, [PAIRS["texts"]] * 3, marked(template))
        digests.update(source.directory.content_digest for source in opened(tmp_path / name).sources.values())
    assert len(digests) == 2
