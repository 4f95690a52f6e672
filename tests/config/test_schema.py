"""The pydantic models and the JSON schema say what the dataclasses say."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from meshwright.config.load import load_run
from meshwright.config.presets import MODEL_PRESETS
from meshwright.config.schema import annotation_at, docs_of, expected_text, json_schema, section_of, validate
from meshwright.spec.deployment import Deployment, DeploymentSpec
from meshwright.spec.fields import hints_of, to_plain
from meshwright.spec.job import CheckpointSpec, TrainSpec
from meshwright.spec.plan import Plan
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import ModelSection, RunSpec


def sections(cls: type) -> set[type]:
    """`cls` and every spec dataclass below it."""
    below = [section for annotation in hints_of(cls).values() if (section := section_of(annotation))]
    return {cls}.union(*map(sections, below))


FILES = sections(RunSpec) | sections(Plan) | sections(DeploymentSpec) | sections(Deployment)


@pytest.mark.parametrize("cls", sorted(FILES, key=lambda cls: cls.__name__))
def test_every_field_of_every_section_is_documented(cls: type) -> None:
    assert docs_of(cls).keys() == {field.name for field in dataclasses.fields(cls)}
    assert all(text.endswith(".") for text in docs_of(cls).values())


@pytest.mark.parametrize("file", [RunSpec, DeploymentSpec])
def test_the_json_schema_has_the_keys_of_the_dataclasses(file: type) -> None:
    schema = json_schema(file)
    assert schema["properties"].keys() == {"extends", *hints_of(file)}
    for cls in sections(file) - {file}:
        defined = schema["$defs"][cls.__name__]
        assert defined["properties"].keys() == hints_of(cls).keys()
        assert defined["additionalProperties"] is False
        assert "required" not in defined
        for name, prop in defined["properties"].items():
            assert prop["description"] == docs_of(cls)[name]
    assert schema["additionalProperties"] is False
    assert json.loads(json.dumps(schema)) == schema


def fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """A JSON schema validator for the keywords that appear in ours."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    for union in ("anyOf", "oneOf"):
        if union in schema and not any(fits(value, option, root) for option in schema[union]):
            return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kinds = {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "number": number,
        "integer": number and isinstance(value, int),
        "boolean": isinstance(value, bool),
        "null": value is None,
    }
    if "type" in schema and not kinds[schema["type"]]:
        return False
    if number and not (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and (value > schema["exclusiveMinimum"] if "exclusiveMinimum" in schema else True)
        and (value < schema["exclusiveMaximum"] if "exclusiveMaximum" in schema else True)
    ):
        return False
    if isinstance(value, dict) and ("properties" in schema or "additionalProperties" in schema):
        properties, additional = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(
            fits(inner, properties[key], root)
            if key in properties
            else (additional if isinstance(additional, bool) else fits(inner, additional, root))
            for key, inner in value.items()
        )
    return not isinstance(value, list) or all(fits(item, schema.get("items", {}), root) for item in value)


GOOD: list[dict[str, Any]] = [
    {"model": "llama3-8b", "train": {"steps": 5, "global_batch": 1}},
    {"extends": "base.yaml", "plan": "auto", "cluster": "auto", "data": {"mix": "stdlib"}},
    {
        "plan": {"shard": 2, "layers": [{"range": "0-3", "recompute": "full"}]},
        "model": {"preset": None, "rope_scaling": {"factor": 2}},
    },
    {"train": {"clip_norm": "none"}, "data": {"mix": {"a": 1, "b": 0.5}}},
]
BAD: list[dict[str, Any]] = [
    {"model": "llama3-9b"},
    {"modle": "llama3-8b"},
    {"train": {"steps": 0}},
    {"train": {"steps": 1.5}},
    {"train": {"optimizer": {"beta1": 1.0}}},
    {"train": {"optimizer": {"name": "sgd", "beta1": 0.5}}},
    {"train": {"beta1": 0.5}},
    {"train": {"schedule": "cosin"}},
    {"plan": {"experts": 2}},
    {"data": {"mix": {"a": 0}}},
    {"data": 5},
    {"plan": {"layers": [{"rnge": "all"}]}},
]


def test_the_json_schema_takes_good_files_and_refuses_bad_ones() -> None:
    schema = json_schema()
    for sample in GOOD:
        assert fits(sample, schema, schema), sample
    for sample in BAD:
        assert not fits(sample, schema, schema), sample
    assert {"enum": list(MODEL_PRESETS)} in schema["properties"]["model"]["anyOf"]


def test_the_json_schema_takes_a_resolved_run() -> None:
    schema = json_schema()
    assert fits(
        to_plain(load_run(None, ["model=llama3-8b", "cluster.gpus_per_node=2", "plan.shard=2"])), schema, schema
    )


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (TrainSpec, "steps", "5"),
        (TrainSpec, "steps", True),
        (TrainSpec, "steps", 5.0),
        (TrainSpec, "steps", None),
        (TrainSpec, "learning_rate", "3e-4"),
        (TrainSpec, "learning_rate", True),
        (TrainSpec, "learning_rate", float("nan")),
        (TrainSpec, "learning_rate", float("inf")),
        (TrainSpec, "learning_rate", 10**400),
        (TrainSpec, "schedule", None),
        (PlanKeys, "reshard", 1),
        (PlanKeys, "reshard", "true"),
        (PlanKeys, "layers", {}),
        (ModelSection, "tied", 0),
    ],
)
def test_types_are_strict(cls: type, key: str, value: Any) -> None:
    _, wrongs = validate(cls, {key: value})
    assert [wrong.problem for wrong in wrongs if wrong.path == (key,)] == ["value"]


def test_accepted_conversions_of_values() -> None:
    values, wrongs = validate(TrainSpec, {"steps": 1, "global_batch": 1, "learning_rate": 1, "clip_norm": "none"})
    assert not wrongs
    assert values == {"steps": 1, "global_batch": 1, "learning_rate": 1.0, "clip_norm": None}
    assert isinstance(values["learning_rate"], float)
    assert validate(PlanKeys, {"recompute": "none", "shard": "none"})[0] == {"recompute": "none", "shard": None}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("train", "steps"), "integer (≥ 1)"),
        (("train", "clip_norm"), "number (> 0), or none"),
        (("plan",), "auto, a plan file, or a section of pins"),
        (("plan", "layers", 0, "recompute"), "none | selective | all_but_attention | full"),
        (("plan", "recompute"), "none | selective | all_but_attention | full"),
        (("data", "mix", "any"), "number (> 0, ≤ 1e+15)"),
        (("checkpoint",), "a section (every, keep, at_end, mode, …)"),
        (("observe", "wandb"), "a section (project, entity, name, tags, …), or none"),
        (("observe", "wandb", "entity"), "text, or none"),
    ],
)
def test_descriptions_of_accepted_values(path: tuple[str | int, ...], text: str) -> None:
    assert expected_text(annotation_at(RunSpec, path)) == text


@pytest.mark.parametrize(
    ("value", "good"),
    [(0, True), (5, True), ("auto", True), (-1, False), (1.5, False), ("often", False), (None, False), (True, False)],
)
def test_a_number_may_stand_beside_a_word(value: object, good: bool) -> None:
    values, wrong = validate(CheckpointSpec, {"every": value})
    assert values == ({"every": value} if good else {})
    assert [mistake.path for mistake in wrong] == ([] if good else [("every",)])
    assert expected_text(hints_of(CheckpointSpec)["every"]) == "integer (≥ 0) or auto"
