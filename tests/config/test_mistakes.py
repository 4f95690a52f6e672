"""Every mistake is reported at once, at the token that makes it, with the nearest valid thing."""

from __future__ import annotations

import json
import random
import re
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.slow import examples

from meshwright.config.load import load_run, mistakes_as_json, resolved_yaml
from meshwright.config.schema import all_keys
from meshwright.config.yaml_positions import MAX_BYTES, MAX_VALUES, dump_yaml
from meshwright.spec.errors import MOST_LISTED, BadConfig, Mistake
from meshwright.spec.optimizers import AdamWSpec, LambSpec, SgdSpec
from meshwright.spec.run import RunSpec

MANY = """\
name: .secret run
sede: 3
model:
  preset: llama3-8x
  hiden: 4096
  attention_dropout: 0.1
  seq_len: 4096
  init: scrach
  norm_eps: 0
  moe_experts: 8
data:
  mix: {}
  document_mask: yes
  damaged: skp
train:
  steps: "100"
  steps: 5
  learning_rate: fast
  lr: 1e-4
  optimizer: {beta1: 1.0, epsilon: .inf}
  gc_every: 2.5
cluster: {gpu: h1000, gpus_per_node: 3}
plan:
  shard: 2
  sequence: 2
  reshard: true
  layers:
    - {range: 0}
    - {range: 1-3, recompute: ful}
checkpoint: 5
observe: {wandb: [project]}
zebra: !paint red
"""

# (key, the token at the reported place, a piece of `expected`, nearest)
EXPECTED_MISTAKES = [
    ("name", ".secret run", "not beginning with '.'", "secret-run"),
    ("sede", "sede", "top-level key", "seed"),
    ("model.preset", "llama3-8x", "such as llama3-8b", "llama3-8b"),
    ("model.hiden", "hiden", "key of model", "hidden"),
    ("model.attention_dropout", "attention_dropout", "there is no dropout", None),
    ("model.seq_len", "seq_len", "its path is train.seq_len", "train.seq_len"),
    ("model.init", "scrach", "checkpoint:DIR", "scratch"),
    ("model.norm_eps", "0", "number (> 0)", None),
    ("model.moe_experts", "moe_experts", "MoE model", None),
    ("data.mix", "{}", "at least one", "stdlib"),
    ("data.document_mask", "yes", "true | false, or none", "true"),
    ("data.damaged", "skp", "refuse | skip", "skip"),
    ("train.steps", '"100"', "integer (≥ 1)", "100"),
    ("train.steps", "steps: 5", "first is on line 16", None),
    ("train", "train:", "integer (≥ 1)", None),
    ("train.learning_rate", "fast", "number (> 0)", None),
    ("train.lr", "lr", "key of train", "learning_rate"),
    ("train.optimizer.beta1", "1.0", "< 1", None),
    ("train.gc_every", "2.5", "integer (≥ 0)", None),
    ("train.optimizer.epsilon", ".inf", "number (> 0)", None),
    ("cluster.gpu", "h1000", "H200", "H100"),
    ("plan.shard", "2", "divisor of the cluster's 3 ranks", "1"),
    ("plan.sequence", "sequence", "plans replicate, shard, pipeline", None),
    ("plan.layers.0.range", "0}", "text", '"0"'),
    ("plan.layers.1.recompute", "ful}", "none | selective | all_but_attention | full", "full"),
    ("checkpoint", "5", "a section (every, keep, at_end, mode, …)", None),
    ("observe.wandb", "[project]", "a project's name or a section", None),
    ("zebra", "zebra", "top-level key", None),
    ("zebra", "!paint", "without tags", None),
]


def mistakes_in(file: Path, text: str, *overrides: str) -> list[Mistake]:
    file.write_text(text)
    with pytest.raises(BadConfig) as caught:
        load_run(file, overrides)
    return list(caught.value.mistakes)


def test_thirty_mistakes_at_once_each_at_its_token(tmp_path: Path) -> None:
    reported = mistakes_in(tmp_path / "run.yaml", MANY)
    lines = MANY.splitlines()
    for key, token, expected, nearest in EXPECTED_MISTAKES:
        shown = "train.global_batch" if key == "train" else key
        matching = [m for m in reported if m.key == shown and expected in m.expected]
        assert len(matching) == 1, (key, expected, [str(m) for m in reported])
        (mistake,) = matching
        assert mistake.file == str(tmp_path / "run.yaml")
        assert mistake.line is not None
        assert mistake.column is not None
        assert lines[mistake.line - 1][mistake.column - 1 :].startswith(token), str(mistake)
        assert mistake.nearest == nearest, str(mistake)
    assert len(reported) == len(EXPECTED_MISTAKES), [str(m) for m in reported]
    positions = [(m.line, m.column) for m in reported]
    assert positions == sorted(positions, key=lambda position: (position[0] or 0, position[1] or 0))


def test_the_message_and_the_json_say_the_same(tmp_path: Path) -> None:
    reported = mistakes_in(tmp_path / "run.yaml", "model: llama-nano\ntrain: {stepz: 3, global_batch: 4}\n")
    (mistake,) = reported
    assert (
        str(mistake) == f"{tmp_path}/run.yaml:2:9: train.stepz: expected a key of train, got 'stepz' (nearest: steps)"
    )
    assert mistakes_as_json(reported) == {
        "ok": False,
        "errors": [
            {
                "file": f"{tmp_path}/run.yaml",
                "line": 2,
                "column": 9,
                "key": "train.stepz",
                "expected": "a key of train",
                "got": "'stepz'",
                "nearest": "steps",
            }
        ],
    }
    assert mistakes_as_json() == {"ok": True, "errors": []}


def test_a_model_without_dimensions_says_what_it_needs(tmp_path: Path) -> None:
    text = "train: {steps: 1, global_batch: 1}\nmodel: {family: llama, layers: 2, heads: 2}\n"
    (mistake,) = mistakes_in(tmp_path / "run.yaml", text)
    assert (mistake.line, mistake.column, mistake.key, mistake.got) == (2, 1, "model", "no hidden")
    assert "all of family, layers, hidden, heads" in mistake.expected and "ffn_hidden" not in mistake.expected
    # The length of no model is known, so a sequence is not too long for it.
    (mistake,) = mistakes_in(tmp_path / "run.yaml", "train: {steps: 1, global_batch: 1, seq_len: 4096}\n")
    assert len(mistake.expected) < 200
    assert (mistake.line, mistake.key, mistake.got) == (1, "model", "none of them")


def test_everything_that_a_model_lacks_is_in_one_mistake() -> None:
    """Also without a file, where nothing comes from the quick start's model, and of an MoE layer's experts."""
    for overrides, got in (
        (["model.family=gpt2", "model.hidden=64"], "no layers, heads"),
        (["model.layers=2"], "no family, hidden, heads"),
        (["model={family: mixtral, layers: 2, hidden: 64}"], "no heads, experts, experts_per_token, expert_hidden"),
        (["model.family=qwen3_moe", "model.experts=4"], "no layers, hidden, heads, experts_per_token, expert_hidden"),
    ):
        with pytest.raises(BadConfig) as caught:
            load_run(None, overrides)
        (mistake,) = caught.value.mistakes
        assert (mistake.file, mistake.key, mistake.got) == ("command line", "model", got)


def test_optimizer_keys_are_those_of_its_name(tmp_path: Path) -> None:
    text = "model: llama-nano\ntrain: {steps: 1, global_batch: 1, %s}\n"
    for train, key, expected, nearest in (
        ("beta1: 0.5", "beta1", "a key of train; its path is train.optimizer.beta1", "train.optimizer.beta1"),
        ("beta2: 0.5", "beta2", "a key of train; its path is train.optimizer.beta2", "train.optimizer.beta2"),
        ("epsilon: 1", "epsilon", "a key of train; its path is train.optimizer.epsilon", "train.optimizer.epsilon"),
        ("optimizer: {name: adam}", "optimizer.name", "adamw | lamb | muon | sgd", "adamw"),
        (
            "optimizer: {name: sgd, beta1: 0.5}",
            "optimizer.beta1",
            "a key of train.optimizer (name, momentum, nesterov)",
            None,
        ),
        ("optimizer: {name: moun, momentm: 1}", "optimizer.momentm", "a key of train.optimizer", "momentum"),
        ("optimizer: {name: lamb, beta2: 1}", "optimizer.beta2", "number (≥ 0, < 1)", None),
        ("optimizer: muon", "optimizer", "a section whose name is adamw | lamb | muon | sgd", None),
    ):
        *_, mistake = mistakes_in(tmp_path / "run.yaml", text % train)
        assert (mistake.key, mistake.expected, mistake.nearest) == (f"train.{key}", expected, nearest)


def test_another_optimizer_takes_no_keys_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "model: llama-nano\ntrain: {steps: 1, global_batch: 1, optimizer: {beta1: 0.5, epsilon: 1}}\n"
    )
    file = tmp_path / "run.yaml"
    file.write_text("extends: base.yaml\ntrain: {optimizer: {name: lamb, beta2: 0.5}}\n")
    assert load_run(file).train.optimizer == LambSpec(beta2=0.5)
    assert load_run(file, ["train.optimizer.momentum=0.5", "train.optimizer.name=sgd"]).train.optimizer == SgdSpec(
        momentum=0.5
    )
    assert load_run(tmp_path / "base.yaml", ["train.optimizer.beta2=0.25"]).train.optimizer == AdamWSpec(
        beta1=0.5, beta2=0.25, epsilon=1
    )


def test_a_misspelt_section_is_not_also_missing(tmp_path: Path) -> None:
    reported = mistakes_in(tmp_path / "run.yaml", "model: llama-nano\ntrian: {steps: 1, global_batch: 1}\n")
    assert [(m.key, m.nearest) for m in reported] == [("trian", "train")]


def test_a_hundred_mistakes_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    text = "model: llama-nano\ntrain: {steps: 1, global_batch: 1}\n" + "".join(f"kye{i}: 1\n" for i in range(2000))
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(BadConfig) as caught:
        load_run(file)
    lines = str(caught.value).splitlines()
    assert len(caught.value.mistakes) == 2000 and len(lines) == MOST_LISTED + 1
    assert lines[0].startswith(f"{file}:3:1: kye0: ") and lines[-1] == "… and 1900 more"
    report = mistakes_as_json(caught.value.mistakes)
    assert (len(report["errors"]), report["more"], report["ok"]) == (MOST_LISTED, 1900, False)


@pytest.mark.parametrize(
    ("text", "expected", "got"),
    [
        ("# a comment\n" * (MAX_BYTES // 12 + 1), "at most 512 KiB of YAML", "a larger file"),
        ("".join(f"kye{i}: 1\n" for i in range(MAX_VALUES + 1)), "valid YAML", "more than 5000 values"),
    ],
    ids=["bytes", "values"],
)
def test_a_file_that_is_too_large_is_one_mistake(tmp_path: Path, text: str, expected: str, got: str) -> None:
    (mistake,) = mistakes_in(tmp_path / "run.yaml", text)
    assert (mistake.expected, mistake.got) == (expected, got) and mistake.line


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.hidden=1000000000001", "integer (≥ 1) of at most 1,000,000,000"),
        (f"train.steps={10**30}", "integer (≥ 1) of at most 1,000,000,000"),
        ("model.layers=100000", "integer (≥ 1, ≤ 1000)"),
        ("model.ffn_hidden=1000000000", "a model of at most 1e+15 parameters"),
        ("train.global_batch=1000000", "at most 16384 sequences for each of the cluster's 1 ranks"),
        ("cluster.nodes=10000000", "cluster.nodes × cluster.gpus_per_node of at most 1048576"),
        ("cluster.memory_gib=1e308", "number (> 0, ≤ 1e+06), or none"),
        ("data.mix.stdlib=1e308", "number (> 0, ≤ 1e+15)"),
        (f"name={'x' * 10_000}", "at most 200 characters"),
        (f"{'x' * 10_000}=1", "a top-level key"),
    ],
)
def test_a_huge_value_is_refused(tmp_path: Path, override: str, expected: str) -> None:
    text = "model: llama3-70b\ntrain: {steps: 10, global_batch: 4}\n"
    text = text if override.startswith("model.ffn") else text.replace("llama3-70b", "llama-nano")
    (mistake,) = mistakes_in(tmp_path / "run.yaml", text, override)
    assert mistake.key == override.partition("=")[0] and mistake.expected.startswith(expected)
    assert len(str(mistake)) < 500


@pytest.mark.parametrize(
    ("plan", "key", "got", "nearest"),
    [
        ("{shard: 2, tensor: 2}", "plan.shard", "2 × 2 = 4 ranks, the cluster has 2", "1"),
        ("{replicate: 2, tensor: 2}", "plan.replicate", "2 × 2 = 4 ranks, the cluster has 2", "1"),
        ("{replicate: 2, shard: 2}", "plan.shard", "2 × 2 = 4 ranks, the cluster has 2", "1"),
        ("{tensor: 2, pipeline: 2}", "plan.pipeline", "2 × 2 = 4 ranks, the cluster has 2", None),
    ],
)
def test_pins_whose_matmul_exceeds_the_cluster(
    tmp_path: Path, plan: str, key: str, got: str, nearest: str | None
) -> None:
    train = "train: {steps: 10, global_batch: 4}"
    text = f"model: llama-nano\n{train}\ncluster: {{gpus_per_node: 2}}\nplan: {plan}\n"
    (mistake,) = mistakes_in(tmp_path / "run.yaml", text)
    assert (mistake.key, mistake.line, mistake.got, mistake.nearest) == (key, 4, got, nearest)


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("plan: {recomput: full}", "recompute"),
        ("observe: {every: 3}", "checkpoint.every"),
        ("observe: {evry: 3}", "checkpoint.every"),
        ("observe: {color: 3}", None),
        ("checkpoint: {keep_last: 3}", "keep"),
        ("cluster: {nods: 3}", "nodes"),
        ("cluster: {mode: 3}", "checkpoint.mode"),
        ("batch: 3", None),
    ],
)
def test_the_nearest_key_is_one_of_the_section_or_almost_equal(tmp_path: Path, line: str, nearest: str | None) -> None:
    text = f"model: llama-nano\ntrain: {{steps: 10, global_batch: 4}}\n{line}\n"
    (mistake,) = mistakes_in(tmp_path / "run.yaml", text)
    assert mistake.nearest == nearest


def test_a_key_that_only_the_preset_has_is_the_one_that_was_meant(tmp_path: Path) -> None:
    """The preset sets train.learning_rate; the file that extends it does not."""
    text = "extends: llama-nano\ntrain: {steps: 10, global_batch: 4, learning_rat: 0.001}\n"
    (mistake,) = mistakes_in(tmp_path / "run.yaml", text)
    assert mistake.nearest == "learning_rate"
    text = text.replace("learning_rat:", "learning_rate: 0.002, learning_rat:")
    (mistake,) = mistakes_in(tmp_path / "run.yaml", text)
    assert mistake.nearest == "min_learning_rate", "a file that has the first cannot have meant it again"


def test_a_broken_file_does_not_make_its_keys_missing(tmp_path: Path) -> None:
    (mistake,) = mistakes_in(tmp_path / "run.yaml", "model: llama-nano\ntrain: {steps: [}\n")
    assert (mistake.line, mistake.column, mistake.key) == (2, 17, "yaml")
    (tmp_path / "run.yaml").unlink()
    with pytest.raises(BadConfig, match=r"^no file \S*/runn\.yaml$"):
        load_run(tmp_path / "runn.yaml")
    (tmp_path / "run.yaml").touch()
    with pytest.raises(BadConfig, match=r"^no file \S*/runn\.yaml; nearest: \S*/run\.yaml$"):
        load_run(tmp_path / "runn.yaml")


@pytest.mark.parametrize(
    ("override", "key", "expected", "nearest"),
    [
        ("train.stepz=3", "train.stepz", "key of train", "steps"),
        ("steps=3", "steps", "its path is train.steps", "train.steps"),
        ("train.steps", "train.steps", "KEY=VALUE", None),
        ("=3", "", "KEY=VALUE", None),
        ("train.steps=many", "train.steps", "integer", None),
        ("train.steps=[1", "train.steps", "valid YAML", None),
        ("train.steps.more=1", "train.steps", "integer", None),
        ("train=5", "train", "a section", None),
        ("model=llama3-9b", "model.preset", "a preset", "llama3-8b"),
        ("cluster=nowhere.yaml", "cluster", "cluster file", None),
        ("plan=aut", "plan", "plan file", "auto"),
        ("plan.layers.9.recompute=full", "plan.layers.9.recompute", "an item of plan.layers, 0 to 0", None),
        ("extends=llama3-8b", "extends", "in a run file only", None),
        ("model.dropout=0.1", "model.dropout", "no dropout", None),
    ],
)
def test_a_bad_override_is_a_mistake_of_the_command_line(
    tmp_path: Path, override: str, key: str, expected: str, nearest: str | None
) -> None:
    text = "model: llama-nano\ntrain: {steps: 10, global_batch: 4}\nplan: {layers: [{range: all}]}\n"
    (mistake,) = mistakes_in(tmp_path / "run.yaml", text, override)
    assert (mistake.file, mistake.line, mistake.column) == ("command line", None, None)
    assert (mistake.key, mistake.nearest) == (key, nearest)
    assert expected in mistake.expected


def test_a_value_of_the_file_that_an_override_makes_wrong_is_a_mistake_of_the_command_line(tmp_path: Path) -> None:
    text = "model: llama-nano\ntrain: {steps: 10, global_batch: 4}\n"
    (mistake,) = mistakes_in(tmp_path / "run.yaml", text, "model.heads=5")
    assert (mistake.file, mistake.line, mistake.key) == ("command line", None, "model.kv_heads")
    assert mistake.expected == "a divisor of model.heads = 5"
    (mistake,) = mistakes_in(tmp_path / "run.yaml", text + "plan: {tensor: 3}\n", "cluster.gpus_per_node=3")
    assert mistake.file.endswith("run.yaml"), "the file is wrong without the override too"


def test_a_pin_beside_a_plan_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("global_batch: 4\nmicro_batch: 4\n")
    text = "model: llama-nano\ntrain: {steps: 10, global_batch: 4}\nplan: p.yaml\n"
    (mistake,) = mistakes_in(tmp_path / "run.yaml", text, "plan.shard=1")
    assert (mistake.file, mistake.key) == ("command line", "plan.shard")


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text("a\0/~.:é", max_size=4) | st.just("x" * 300),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["mix", "range", "x", ""]), inner, max_size=2)
    ),
    max_leaves=3,
)
PATHS = [".".join(map(str, path)) for path in all_keys(RunSpec)] + [
    "plan.layers.0.range",
    "extends",
    "data.mix.a",
    "plan.layers",
]


@settings(max_examples=examples(30, 200), deadline=None)
@given(st.dictionaries(st.sampled_from(PATHS), ANY, min_size=1, max_size=3), st.booleans())
def test_whatever_is_written_ends_in_a_run_or_in_placed_mistakes(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], in_file: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    data: dict[str, Any] = {"model": {"preset": "llama-nano"}, "train": {"steps": 10, "global_batch": 8}}
    if in_file:
        for path, value in changes.items():
            *around, last = path.split(".")
            section = data
            for step in around:
                section[step] = section[step] if isinstance(section.get(step), dict) else {}
                section = section[step]
            section[last] = value
    file.write_text(dump_yaml(data), encoding="utf-8")
    overrides = [] if in_file else [f"{path}={json.dumps(value)}" for path, value in changes.items()]
    try:
        load_run(file, overrides)
    except BadConfig as error:
        assert error.mistakes
        for mistake in error.mistakes:
            assert mistake.file in (str(file), "command line")
            assert (mistake.line is None) == (mistake.file == "command line")


FULL = (
    resolved_yaml(load_run(None, ["model=llama3-8b", "cluster.gpus_per_node=2", "plan.shard=2"]))
    .replace("layers: null", "layers: [{range: all}]")
    .replace("mix:\n    stdlib: 1.0", "mix: {stdlib: 1.0}")
)
KEYS = [(n, m[1], m.start(1)) for n, line in enumerate(FULL.splitlines()) if (m := re.match(r" *([a-z]\w+):", line))]
LETTERS = string.ascii_lowercase + string.digits + "_"


def typo_of(word: str, edit: int, at: int, letter: str) -> str:
    """`word` with one character deleted, inserted or replaced."""
    at %= len(word)
    return word[:at] + ("" if edit == 0 else letter) + word[at + (edit != 1) :]


def report_of(file: Path, line: int, key: str, wrong: str) -> list[Mistake]:
    lines = FULL.splitlines()
    lines[line] = lines[line].replace(f"{key}:", f"{wrong}:", 1)
    return mistakes_in(file, "\n".join(lines))


def names(mistake: Mistake, key: str) -> bool:
    return mistake.nearest is not None and mistake.nearest.split(".")[-1] == key


@settings(max_examples=examples(20, 150), deadline=None)
@given(where=st.sampled_from(KEYS), edit=st.integers(0, 2), at=st.integers(0, 30), letter=st.sampled_from(LETTERS))
def test_every_typo_of_every_key_is_rejected_at_its_place(
    tmp_path_factory: pytest.TempPathFactory, where: tuple[int, str, int], edit: int, at: int, letter: str
) -> None:
    line, key, column = where
    wrong = typo_of(key, edit, at, letter)
    if wrong == key or not wrong:
        return
    reported = report_of(tmp_path_factory.getbasetemp() / "typo.yaml", line, key, wrong)
    assert any((m.line, m.column) == (line + 1, column + 1) and wrong in m.got + m.key for m in reported), reported


def test_a_plan_in_a_run_file_s_place_is_one_mistake(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("shard: 2\nglobal_batch: 4\nmicro_batch: 1\nlayers: []\n")
    with pytest.raises(BadConfig) as caught:
        load_run(file)
    (mistake,) = caught.value.mistakes
    assert (mistake.key, mistake.line) == ("micro_batch", 3) and f"plan={file}" in mistake.expected


def test_only_a_known_synonym_names_the_path_of_a_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("extends: llama-nano\nbatch: 3\nlr: 3\ntrain: {steps: 3, global_batch: 2}\n")
    with pytest.raises(BadConfig) as caught:
        load_run(file)
    assert [(m.nearest, "its path is" in m.expected) for m in caught.value.mistakes] == [
        (None, False),
        ("train.learning_rate", True),
    ]


def test_the_nearest_key_is_right_for_nine_typos_of_ten(tmp_path: Path) -> None:
    chance, rounds = random.Random(0), examples(1, 3)
    right = tried = 0
    for line, key, column in KEYS * rounds:
        wrong = typo_of(key, chance.randrange(3), chance.randrange(30), chance.choice(LETTERS))
        if wrong == key:
            continue
        tried += 1
        at_token = [
            m
            for m in report_of(tmp_path / "typo.yaml", line, key, wrong)
            if (m.line, m.column) == (line + 1, column + 1)
        ]
        right += any(names(mistake, key) for mistake in at_token)
    assert tried > 50 * rounds
    assert right / tried >= 0.9, f"{right} of {tried}"
