"""The run file reference of the docs, generated from the spec dataclasses: every key, its type, default and meaning."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from meshwright.config.family_dimensions import DIMENSIONS
from meshwright.config.presets import MODEL_PRESETS, run_preset
from meshwright.config.schema import expected_text, keys_of, section_of, sections_of
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import docs_of, from_plain, hints_of, to_plain
from meshwright.spec.model import ModelSpec, flops_per_token, parameter_count
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import RunSpec

COLUMNS = 118
"""Width of a line of prose."""
_INTRODUCTION = """\
# Run file reference

`make reference` writes this page from the classes in `src/meshwright/spec`; do not edit it.

A run file is YAML. Only `model` (a preset or its dimensions), `train.steps` or `train.epochs`, and `train.global_batch`
are required.

```yaml
model: llama3-8b
data: {mix: {corpora/code: 0.7, corpora/web: 0.3}}
train: {steps: 10_000, global_batch: 64, seq_len: 8192, warmup_steps: 500}
cluster: auto
```

**Order.** Later values replace earlier ones: defaults, the file that `extends` names, the run file, the command line
(`train.steps=200`, `plan.layers.0.recompute=full`, `data.mix=DIR`; `--train.steps=200` is the same). Values on the
command line are read as YAML. Sections merge key by key. Lists, `data.mix` and values of another type are replaced as
a whole. Another preset starts `model` anew; adapters stay.

**Extends.** `extends: NAME` starts from a model preset with its usual sequence length and learning rate (table
below). `extends: FILE` starts from another run file, which may extend a further one.

**Short forms.**

- `model: NAME` is `model: {preset: NAME}`.
- `data.mix: DIR` is `data.mix: {DIR: 1.0}`.
- `observe.wandb: PROJECT` is `observe.wandb: {project: PROJECT}`.
- `cluster: auto` uses the devices of this machine, `cluster: NAME` a built-in example, `cluster: FILE` a YAML file
  with the keys of `cluster`.
- `plan: auto` leaves everything to the planner, `plan: FILE` uses a [plan file](plan-file.md) as it is, and a section
  with some of its keys fixes these.

**Paths.** `extends`, `cluster` and `plan` are relative to the file that names them. `data.mix`, `data.validation`,
`data.lengths`, `train.expert_load` and `model.init` are relative to the current directory. `~` is the home directory.

**Model dimensions.** They come from a preset, from the weights (`model: {init: hf:DIR}` or
`model: {init: checkpoint:DIR}`, where DIR is a run's folder or name), or from the run file. The run file must then
give `family`, `layers`, `hidden` and `heads`, for MoE models also `experts`, `experts_per_token` and
`expert_hidden`, for Qwen2-MoE and GLM-4.5 also `shared_expert_hidden`, and for DeepSeek `head_dim`, `kv_rank`,
`rope_head_dim`, `value_head_dim` and `shared_expert_hidden`.
Defaults are `kv_heads` = `heads`, `head_dim` = `hidden / heads`, and `ffn_hidden` = 4 × `hidden`
with `mlp: gelu`, or 8/3 × `hidden` rounded up to a multiple of 256 with `swiglu`. `positions`, `norm`, `mlp`, `bias`,
`qkv_bias`, `qk_norm` and `tied` follow from the family. Derived values are printed before the run starts. The default
of `train.seq_len` is limited by `model.max_seq_len`.

**Cluster.** Without `cluster.gpu` the cluster is `auto`: this machine's GPUs, or one CPU rank, which uses all cores.
`cluster: {gpu: cpu, gpus_per_node: 2}` asks for more CPU ranks, to try a layout. Other keys of `cluster` replace
single detected values.

**Without a file.** `meshwright train model=llama3-1b` uses the name, data and training settings of the quick start
with the preset's sequence length and learning rate, and prints them. The model is the quick start's only where no key
of `model` is given. The cluster is never the quick start's.

**Values.** YAML 1.2: `3e-4` is a number, `10_000` an integer, `yes` and `no` are text. `none` and `null` empty a key
that allows it; only `null` does where `none` is one of the choices, as in `plan.recompute`. An unknown key, a wrong
type, a value out of bounds or a repeated key is an error with file, line and column. All errors are reported at once,
at most a hundred, together with those of the data, the weights and the plan.

**Limits.** An integer whose type names no upper bound is at most 1,000,000,000. A model has at most 10^15 parameters,
a cluster at most 2^20 ranks, a step at most 2^14 sequences per rank, and a file at most 512 KiB and 5,000 values.
"""
_DERIVED = {
    "ffn_hidden": "by `mlp`",
    "kv_heads": "`heads`",
    "head_dim": "`hidden / heads`",
    "gpu": "what is found",
    "name": "the file's stem",
    "extends": "none",
}
_EXTENDS = ["extends", "text", _DERIVED["extends"], "Preset or run file whose keys this file builds on."]


def page() -> str:
    """The whole page as Markdown."""
    parts = [
        _INTRODUCTION,
        *_sections(RunSpec, "", "Top level"),
        _presets(),
    ]
    return "\n".join(parts)


def key_table(cls: type) -> str:
    """The keys of a spec class as a Markdown table."""
    entries = [_table_entry(cls, field) for field in dataclasses.fields(cls)]
    return _table(["key", "type", "default", "meaning"], entries)


def _sections(cls: type, key: str, title: str) -> Iterator[str]:
    """Yield a table for `cls`, then one for each section below it."""
    entries = [_EXTENDS] if cls is RunSpec else []
    entries += [_table_entry(cls, field) for field in dataclasses.fields(cls)]
    paragraph = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    description = textwrap.fill(paragraph, COLUMNS, break_on_hyphens=False)
    yield f"## {title}\n\n{description}\n\n{_table(['key', 'type', 'default', 'meaning'], entries)}"
    for name, annotation in hints_of(cls).items():
        for section in sections_of(annotation):
            below = f"{key}.{name}" if key else name
            below += f": {section().name}" if len(sections_of(annotation)) > 1 else ""
            items = "[]" if expected_text(annotation).startswith("a list") else ""
            yield from _sections(section, below, f"`{below}{items}`")


def _table_entry(cls: type, field: dataclasses.Field[Any]) -> list[str]:
    return [field.name, _type(keys_of(cls)[field.name]), _default(cls, field), docs_of(cls)[field.name]]


def _type(annotation: Any) -> str:
    section = section_of(annotation)
    if section is None:
        return expected_text(annotation)
    text = expected_text(annotation)
    if text.startswith("a mapping"):
        return "mapping from name to section"
    return "list of sections" if text.startswith("a list") else "text or section" if "file" in text else "section"


def _default(cls: type, field: dataclasses.Field[Any]) -> str:
    """The default in the table: the value of a key that is left out."""
    if field.name in _DERIVED and issubclass(cls, (ModelSpec, ClusterSpec, RunSpec)):
        return _DERIVED[field.name]
    if issubclass(cls, ModelSpec) and field.name in DIMENSIONS:
        return "the preset's"
    if cls is RunSpec and section_of(hints_of(cls)[field.name]) and field.name != "plan":
        return "see below"
    factory = field.default_factory
    value = field.default if factory is dataclasses.MISSING else factory()
    if value is None:
        return "the planner's" if cls is PlanKeys else "none"
    if value is dataclasses.MISSING:
        return "required"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(to_plain(value))}`"


def _presets() -> str:
    """The table of model presets."""
    entries = []
    for name, dimensions in MODEL_PRESETS.items():
        spec = from_plain(ModelSpec, {**dimensions, "vocab_size": dimensions["vocab_size"] or _TRAINED_VOCABULARY})
        start = run_preset(name)["train"]
        shape = [str(n) for n in (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.ffn_hidden)]
        vocabulary = str(dimensions["vocab_size"] or "tokenizer's")
        flops = [f"{flops_per_token(spec, start['seq_len'], causal=causal) / 1e9:,.4g}" for causal in (True, False)]
        lengths = [str(spec.max_seq_len), str(start["seq_len"])]
        parameters = f"{parameter_count(spec):,}"
        rate = f"{start['learning_rate']:g}"
        entries.append([name, spec.family, parameters, *shape, vocabulary, *lengths, rate, *flops])
    head = ["preset", "family", "parameters", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab_size"]
    head += ["max_seq_len", "train.seq_len", "train.learning_rate", "GFLOP a token, causal", "full"]
    return f"## Model presets\n\n{_PRESETS}\n{_table(head, entries)}"


_TRAINED_VOCABULARY = 4096
"""Tokens of the quick start's tokenizer, for presets without a vocabulary."""
_PRESETS = f"""\
`model: NAME` takes the dimensions; `extends: NAME` also starts from `train.seq_len` and `train.learning_rate`. GFLOP
are for training, per token at that sequence length, with causal and with full attention. `llama-nano` takes its
vocabulary from the tokenizer; its figures are for {_TRAINED_VOCABULARY:,} tokens.
"""


def _table(head: list[str], entries: list[list[str]]) -> str:
    """A Markdown table whose first column is code."""
    lines = [head, ["---"] * len(head), *([f"`{entry[0]}`", *entry[1:]] for entry in entries)]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
