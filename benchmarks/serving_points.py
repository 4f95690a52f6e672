"""Published serving measurements as questions to the cost model: model, devices, formats, deployment and load of each row.

A row that the model cannot express is refused with a reason. The file is ai-dynamo/aiconfigurator's silicon sample (Apache-2.0); what
its columns leave open is filled in here, and stated in `Point.assumed`.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, cast

from meshwright.costs.serve_costs import ServeCosts
from meshwright.costs.serving_software import ServingSoftware, software_table
from meshwright.families.registry import MODEL_PRESETS
from meshwright.planner.closed_loop import Latencies, Load, busy_prefills, loaded_latencies
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.deployment import Deployment, InstanceSpec, PricedFormat, Quantisation, ServingSoftwareName
from meshwright.spec.engine import EngineSettings
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec

FILE = Path(__file__).parent / "data" / "serving-points.csv.gz"
Row = dict[str, str]
CHIPS = {
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
}
PRESETS: dict[str, tuple[str, dict[str, object]]] = {
    "DeepSeek-R1": ("deepseek-v3", {}),
    "DeepSeek-R1-NVFP4": ("deepseek-v3", {}),
    "DeepSeek-V3": ("deepseek-v3", {}),
    "DeepSeek-V3.1-NVFP4": ("deepseek-v3", {}),
    "Kimi-K2.5": ("kimi-k2", {"vocab_size": 163840}),
    "Llama-3.1-70B": ("llama3-70b", {"vocab_size": 128256}),
    "Llama-3.1-8B-Instruct": ("llama3-8b", {"vocab_size": 128256}),
    "Qwen3-235B-A22B-FP8": ("qwen3-235b-a22b", {}),
    "Qwen3-32B": ("qwen3-32b", {}),
    "Qwen3-32B-NVFP4": ("qwen3-32b", {}),
    "gpt-oss-120b": ("gpt-oss-120b", {"vocab_size": 201088}),
}
"""Presets of the models, and keys that these leave open."""
TENSORS = {1, 2, 4, 8, 16}
"""Tensor degrees of servers. Other degrees of a row are sums over a whole deployment."""
PREFILL_DEVICES = {"fp4": 4, "fp8": 8}
"""Devices of a prefill instance in rows that state only the sum of all devices, by precision."""
MOST_FEW, MOST_FEW_LONG, LONG = 600, 110, 4096
"""Most requests at a time for which decodes divide layers where a row does not say so, with prompts below and from LONG tokens on."""
STEP_TOKENS = 4096
"""Prompt tokens of a step at most."""
FORMATS_BLACKWELL_FP8_CACHE: tuple[ServingSoftwareName, ...] = ("trtllm",)
"""Servers whose published runs of quantised models have an fp8 cache."""
Class = Literal["dense", "mixture", "latent"]


class Refused(Exception):
    """A row that is not priced, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A row: what was run, and what was measured."""

    name: str
    """The model's name in the file."""
    model: ModelSpec
    chip: str
    software: ServingSoftwareName
    release: str
    """The server's version."""
    formats: Quantisation
    deployment: Deployment
    load: Load
    ttft_seconds: float
    tpot_seconds: float
    assumed: bool
    """Whether the number of workers is an assumption, as the row lacks it; it then does not say either whether tokens were speculated."""

    @property
    def kind(self) -> Class:
        """The class of the model."""
        moe: Class = "mixture" if self.model.experts else "dense"
        return "latent" if self.model.kv_rank else moe

    @property
    def devices(self) -> int:
        return self.deployment.devices


def read_points(file: Path = FILE) -> tuple[list[Point], list[tuple[Row, str]]]:
    """The points in a file, and its other rows with the reason of each."""
    with gzip.open(file, "rt", encoding="utf-8", newline="") as lines:
        return points_of(csv.DictReader(lines))


def points_of(rows: Iterable[Row]) -> tuple[list[Point], list[tuple[Row, str]]]:
    """The points of rows, and the other rows with the reason of each."""
    points, refused = [], []
    for row in rows:
        try:
            point = _point(row)
            costs_of(point)  # raises what does not fit
            open_count = point.assumed and point.devices > _largest_degree(row)
            points.append(_with_enough_prefills(point) if open_count else point)
        except Refused as reason:
            refused.append((row, str(reason)))
    return points, refused


def predict(point: Point, software: ServingSoftware | None = None) -> Latencies:
    """The latencies that the cost model predicts, with the constants of the point's software or with others."""
    costs = costs_of(point, software)
    return loaded_latencies(point.deployment, point.load, costs.of)


def costs_of(point: Point, software: ServingSoftware | None = None) -> ServeCosts:
    """The costs of a point's instances. Raises Refused for a deployment that does not fit its devices."""
    sequences = 1 << max(8, math.ceil(math.log2(point.load.users)))
    context = point.load.input_tokens + point.load.output_tokens
    costs = _costs(
        point.name, point.chip, point.formats, context, sequences, software or software_table().software[point.software]
    )
    try:
        for instance in point.deployment.instances:
            costs.of(instance)
    except OutOfResources as error:
        raise Refused("does not fit the devices stated") from error
    except BadInput as error:
        raise Refused("degrees that cannot divide the model") from error
    return costs


@cache
def _model(name: str) -> ModelSpec:
    preset, keys = PRESETS[name]
    return from_plain(ModelSpec, {**MODEL_PRESETS[preset], **keys})


@cache
def _costs(
    name: str, chip: str, formats: Quantisation, context: int, sequences: int, software: ServingSoftware
) -> ServeCosts:
    cluster = ClusterSpec(gpu=chip, gpus_per_node=4 if chip.startswith("GB") else 8, nodes=16)
    settings = EngineSettings(context=context, sequences=sequences)
    return ServeCosts(replace(_model(name), max_seq_len=context), cluster, formats, settings, software=software)


def _largest_degree(row: Row) -> int:
    return max(_count(row.get(key, "")) for key in ("tp_size", "decode_tp_size"))


def _with_enough_prefills(point: Point) -> Point:
    """A point without numbers of workers or devices, with as many prefill instances as compute the prompts of full decode instances.

    That is what the rows do that state them: 7 for 8.1 of so much work, 10 for 10.4, 5 for 4.6. No measured value is used.
    """
    prefill, decode = point.deployment.instances
    costs = costs_of(point)
    needed = busy_prefills(prefill, decode, point.load, costs.of(prefill), costs.of(decode))
    instances = (replace(prefill, count=max(prefill.count, math.ceil(needed))), decode)
    return replace(point, deployment=replace(point.deployment, instances=instances))


def _point(row: Row) -> Point:
    name = row["model_path"].rpartition("/")[2]
    if name not in PRESETS:
        raise Refused(f"hybrid attention, which a model file cannot state: {name}")
    software = cast("ServingSoftwareName", row["backend"])
    users, instances, assumed = _deployment(row, bool(_model(name).experts))
    formats = _formats(row, name, software)
    return Point(
        name=name,
        model=_model(name),
        chip=CHIPS[row["system"]],
        software=software,
        release=row["backend_version"],
        formats=formats,
        deployment=Deployment(instances=tuple(instances), quantisation=formats, software=software),
        load=Load(users=users, input_tokens=_count(row["isl"]), output_tokens=_count(row["osl"])),
        ttft_seconds=float(row["silicon_ttft_ms"]) / 1e3,
        tpot_seconds=float(row["silicon_tpot_ms"]) / 1e3,
        assumed=assumed,
    )


def _formats(row: Row, name: str, software: ServingSoftwareName) -> Quantisation:
    """Published 4-bit folders of MoE models round experts alone, those of dense models all linear layers of the blocks."""
    routed, precision = bool(_model(name).experts), row["precision"]
    weights: PricedFormat | None = None
    experts: PricedFormat | None = None
    if name == "gpt-oss-120b":
        experts = "mxfp4"
    elif precision == "fp4":
        weights, experts = (None, "nvfp4") if routed else ("nvfp4", None)
    elif precision == "int4":
        experts = "int4"
    elif precision == "fp8" or name.endswith("FP8"):
        weights = "fp8"
    cached = software in FORMATS_BLACKWELL_FP8_CACHE and precision in ("fp8", "fp4")
    return Quantisation(weights=weights, experts=experts, kv_cache="fp8" if cached else None)


def _deployment(row: Row, routed: bool) -> tuple[int, list[InstanceSpec], bool]:
    """Requests at a time, the instances, and whether their number is assumed."""
    users = _count(row["concurrency"])
    if row["mode"] == "agg":
        tensor, groups, ranks = (_count(row[key]) for key in ("tp_size", "attention_dp_size", "moe_ep_size"))
        batch = _count(row["batch_size"])
        if not groups and batch and users > batch:
            groups = users // batch  # the column is empty, and each group has a batch of its own
            tensor = 1 if groups == tensor else tensor
        users = users or batch * max(1, groups)
        both = replace(_instance(tensor, groups, _count(row["moe_tp_size"]), ranks), token_budget=STEP_TOKENS)
        if both.tensor not in TENSORS:
            return _positive(users), _parts(row, both.tensor, users), True
        if not routed:
            both = replace(both, expert=1, count=both.expert)  # data parallelism of a dense model are copies of it
        return _positive(users), [both], False
    keys = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    prefill, decode = ([_count(row[f"{role}_{key}"]) for key in keys] for role in ("prefill", "decode"))
    workers = [_count(row[f"{role}_num_workers"]) for role in ("prefill", "decode")]
    users = users or _count(row["decode_batch_size"]) * workers[1] * max(1, decode[1])
    prompts, decodes = _instance(*prefill), _instance(*decode)
    if not workers[0] and prefill[0] == decode[0] > 8 and decode[3] <= 1:
        return _positive(users), _parts(row, decode[0], users), True
    if assumed := not workers[0]:
        several = decode[3] > 1 or decodes.devices > 8
        workers = [1, 1]
        if routed and decodes.devices > 1:
            decodes, workers[1] = _assumed_decoding(row, decodes.devices, several, users)
    if not {prompts.tensor, decodes.tensor} <= TENSORS:
        raise Refused("degrees that no server has")
    return _positive(users), _with_roles(prompts, workers[0], decodes, workers[1]), assumed


def _with_roles(prompts: InstanceSpec, prefills: int, decodes: InstanceSpec, count: int) -> list[InstanceSpec]:
    return [
        replace(prompts, role="prefill", count=prefills, token_budget=STEP_TOKENS),
        replace(decodes, role="decode", count=count),
    ]


def _instance(tensor: int, groups: int, expert_tensor: int, ranks: int) -> InstanceSpec:
    """The instance of the stated degrees.

    Some rows multiply degrees that name the same devices: tensor or attention data parallelism of n·n beside experts divided n × n is n
    devices, as equal measurements in rows with other degrees show.
    """
    groups, ranks = max(1, groups), max(1, ranks)
    square = expert_tensor == ranks > 1 and tensor * groups == ranks * ranks
    if square:
        tensor, groups = (ranks, 1) if tensor > 1 else (1, ranks)
    elif tensor == groups > 1 and ranks == tensor * groups:
        groups = 1
    elif tensor == groups == 1 and expert_tensor * ranks > 1:
        groups = expert_tensor * ranks
    return InstanceSpec(tensor=max(1, tensor), expert=groups)


def _assumed_decoding(row: Row, devices: int, several: bool, users: int) -> tuple[InstanceSpec, int]:
    """The decode instances of a row without numbers of workers, and how many there are.

    The rows of the same file that state them have one instance with attention data parallelism, but TensorRT-LLM at few requests four
    that divide layers; `several` says whether the row's experts are divided over groups.
    """
    few = users <= (MOST_FEW if _count(row["isl"]) < LONG else MOST_FEW_LONG)
    if row["backend"] == "trtllm" and devices <= 8 and few:
        return InstanceSpec(tensor=devices), 4 if users > 8 else 1
    return InstanceSpec(expert=devices) if several else InstanceSpec(tensor=devices), 1


def _parts(row: Row, devices: int, users: int) -> list[InstanceSpec]:
    """Instances of a row whose degree is the sum over a deployment with roles.

    The rows of the same file that state the parts have prefill instances of four or eight devices, and the largest power of two up to
    32 for decodes.
    """
    own = PREFILL_DEVICES.get(row["precision"], 8)
    rest = devices - own
    if rest < own:
        raise Refused("degrees that no server has")
    decoding = min(32, 1 << (rest.bit_length() - 1))
    few = users <= (MOST_FEW if _count(row["isl"]) < LONG else MOST_FEW_LONG)
    if row["backend"] == "trtllm" and few and rest % 8 == 0 and rest <= 32:
        return _with_roles(InstanceSpec(expert=own), 1, InstanceSpec(tensor=8), rest // 8)
    prefills = (devices - decoding) // own
    return _with_roles(InstanceSpec(expert=own), prefills, InstanceSpec(expert=decoding), 1)


def _positive(users: int) -> int:
    if users < 1:
        raise Refused("no number of requests at a time")
    return users


def _count(text: str) -> int:
    return int(text) if text else 0
