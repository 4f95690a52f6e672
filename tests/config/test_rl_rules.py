"""Rules of reinforcement learning: each broken one is reported at its key, and a valid run passes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.config.test_key_rules import mistakes

from meshwright.config.load import load_run

RUN = """\
model: {family: llama, layers: 2, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, ffn_hidden: 96, vocab_size: 512, max_seq_len: 64}
train: {steps: 10, global_batch: 8, seq_len: 64}
rl: {reward: {file: judge.py}, samples: 4, new_tokens: 32, exact: true}
cluster: {gpu: cpu, gpus_per_node: 2}
plan: {compile: false}
"""


@pytest.mark.parametrize(
    ("overrides", "key", "expected", "nearest"),
    [
        (["data.packing=none"], "data.packing", "stream, as rl packs its answers", "stream"),
        (
            ["train.batch_ramp=[{until: 2, batch: 4}]"],
            "train.batch_ramp",
            "none, as rl has the same number of questions in every step",
            "none",
        ),
        (
            ["model.adapter.rank=8"],
            "rl.exact",
            "false, as model.adapter is set: the engine has merged weights",
            "false",
        ),
        (
            [
                "model.adapter.rank=8",
                "rl.exact=false",
                "cluster.gpu=H100",
                "plan.compile=true",
                "plan.linear=fp8_tensorwise",
            ],
            "plan.linear",
            "compute, as rl merges adapters into the frozen weights for its engine",
            "compute",
        ),
        (["rl.new_tokens=100"], "rl.new_tokens", "at most train.seq_len = 64, which has the question too", "32"),
        (["rl.kl.weight=0.1"], "rl.kl.weight", "0, as model.init is scratch: there is no model to stay near", "0"),
        (["rl.samples=1"], "rl.samples", "integer (≥ 2)", None),
        (
            ["rl.policy=cispo", "rl.clip_below=0.3"],
            "rl.clip_below",
            "no such key, as rl.policy is cispo, which has an upper clip only",
            "none",
        ),
        (["rl.correction_most=3"], "rl.correction_most", "no such key, as rl.correction is none", "none"),
        (
            ["rl.correction=truncate", "rl.correction_least=0.3"],
            "rl.correction_least",
            "no such key, as rl.correction is truncate",
            "none",
        ),
        (
            ["cluster.gpu=H100", "plan.compile=true"],
            "plan.recompute",
            "full, as rl.exact is true: the backward computes each block again",
            "full",
        ),
        (
            ["cluster.gpu=H100", "plan.recompute=full", "plan.linear=fp8_tensorwise"],
            "plan.linear",
            "compute, as rl.exact is true",
            "compute",
        ),
        (
            ["model.sliding_window=9"],
            "rl.exact",
            "false: this release has no exact forward of sliding windows",
            "false",
        ),
        (
            ["model.family=mixtral", "model.experts=4", "model.experts_per_token=2", "model.expert_hidden=32"],
            "rl.exact",
            "false: this release has no exact forward of routed experts",
            "false",
        ),
        (["plan.compile=true"], "plan.compile", "false, as rl.exact is true", "false"),
        (
            ["plan.tensor=2"],
            "plan.tensor",
            "1, as rl.exact is true: ranks that divide the model add in another order",
            "1",
        ),
        (["plan.compute=bf16"], "plan.compute", "fp32, as rl samples with the trainer's dtype", "fp32"),
        (["plan.compute=bf16", "rl.exact=false"], "plan.compute", "fp32, as rl samples with the trainer's", "fp32"),
        (["train.seq_len=40"], "train.seq_len", "a multiple of 16, as rl.exact is true", "48"),
        (["model.vocab_size=515"], "model.vocab_size", "a multiple of 8, as rl.exact is true", "520"),
    ],
)
def test_broken_rules_are_named(
    tmp_path: Path, overrides: list[str], key: str, expected: str, nearest: str | None
) -> None:
    found = {mistake.key: mistake for mistake in mistakes(tmp_path, *overrides, text=RUN)}
    assert key in found and found[key].expected.startswith(expected) and found[key].nearest == nearest


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"])
def test_answers_are_drawn_from_the_whole_distribution(tmp_path: Path, key: str) -> None:
    """Probabilities over fewer tokens would be others than the trainer's, whose gradient is taken."""
    (mistake,) = mistakes(tmp_path, f"rl.{key}=0.9", text=RUN)
    assert mistake.key == f"rl.{key}" and "answers are drawn from all tokens" in str(mistake)


def test_a_valid_run_passes(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    run = load_run(file)
    assert run.rl is not None and run.rl.reward.function == "reward" and run.rl.policy == "grpo"
    assert load_run(file, ["rl.exact=false", "plan.compile=true", "plan.tensor=2"]).rl is not None
    assert load_run(file, ["cluster.gpu=H100", "plan.compile=true", "plan.recompute=full"]).rl is not None
