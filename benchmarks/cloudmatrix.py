"""Predicts DeepSeek-R1 in INT8 on a CloudMatrix384 from operator figures of its paper, beside the paper's end-to-end figures.

    python benchmarks/cloudmatrix.py [--out FILE]

All constants are in `benchmarks/cloudmatrix.yaml`. Every operator takes the longer of its memory and its compute time, at the shares of
the peaks that the paper measured. A transfer between dies takes a fixed time, which is the measured one less that of its bytes at the
fabric's rate, and the time of its bytes. Operators without figures (norms, gates, rounding, gaps) take the same time for every token:
what the paper's latency of one layer leaves for them at batch 96. Nothing is fitted to end-to-end figures.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2, prod
from pathlib import Path
from typing import Any

import yaml

from meshwright.config.presets import MODEL_PRESETS
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec, parameters

FILE = Path(__file__).with_suffix(".yaml")
MODEL = from_plain(ModelSpec, MODEL_PRESETS["deepseek-v3"])
DIES = 2
"""Dies of an NPU."""
LAYER_BATCH, LAYER_POSITIONS = 96, 4096
"""Batch of an NPU and positions for which the paper gives the latency of a layer."""


@dataclass(frozen=True)
class Weights:
    """Numbers of the model's matrices by layer; a byte each in INT8."""

    attention: int
    expert: int
    dense: int
    head: int

    @classmethod
    def of(cls, spec: ModelSpec) -> Weights:
        """Count them in a dense and a routed layer."""
        counts: dict[str, int] = {}
        for parameter in parameters(spec):
            if len(parameter.shape) > 1:
                counts[parameter.name] = prod(parameter.shape)
        routed, dense = f"layers.{spec.first_dense_layers}.", "layers.0."
        return cls(
            attention=sum(count for name, count in counts.items() if name.startswith(f"{routed}attention.")),
            expert=sum(counts[f"{routed}moe.experts.{part}"] for part in ("gate_up", "down")) // spec.experts,
            dense=sum(count for name, count in counts.items() if name.startswith(f"{dense}mlp.")),
            head=counts["head.weight"],
        )


class Operators:
    """Seconds of operators on one die."""

    def __init__(self, figures: Mapping[str, Any], deployment: Mapping[str, Any]) -> None:
        self.figures, self.deployment, self.weights = figures, deployment, Weights.of(MODEL)
        self._memory = figures["memory_bytes_per_s"] * figures["memory_share"]
        self._matmuls = figures["int8_flops"] * sum(figures["product_share"]) / 2
        self._attention = figures["bf16_flops"] * figures["attention_compute_share"]

    def matmuls(self, weights: float, tokens: float, cores: float = 1.0) -> float:
        """Matmuls of tokens with so many INT8 weights, on a share of the cores."""
        return max(weights / self._memory, 2 * weights * tokens / (self._matmuls * cores))

    def decode_attention(self, requests: float, tokens: float, positions: float, cores: float = 1.0) -> float:
        """Attention of decodes on latents; `tokens` of all requests."""
        latent, rope = MODEL.kv_rank, MODEL.rope_head_dim
        read = 2 * requests * positions * (latent + rope)
        flops = 2 * tokens * positions * MODEL.heads * (2 * latent + rope)
        return max(read / self._memory, flops / (self._attention * cores))

    def prompt_attention(self, tokens: float, length: float, cached: float = 0.0) -> float:
        """Causal attention of the tokens of prompts behind their `cached` positions."""
        pairs = tokens * (length + cached) / 2
        return 2 * pairs * MODEL.heads * (MODEL.head_dim + MODEL.value_head_dim) / self._attention

    def exchange(self, name: str, tokens: float, ranks: int, copies: float) -> float:
        """Dispatch or combine of tokens that each go to `copies` experts."""
        figures, size = self.figures, self.figures[f"{name}_bytes"]
        few, many = (log2(count) for count in figures["exchange_ranks"])
        near, far = figures[f"{name}_seconds"]
        measured = near + (far - near) * min(1.0, (log2(ranks) - few) / (many - few))
        sent = figures["exchange_tokens"] * MODEL.experts_per_token * size
        fixed = measured - sent / figures["fabric_bytes_per_s"]
        return fixed + tokens * copies * size / figures["fabric_bytes_per_s"]


class Decode:
    """Steps of a decode instance: every die has its own requests and one expert."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        tokens = LAYER_BATCH / DIES * 2
        layer = operators.figures["layer_seconds"]
        self.other_seconds = (layer - self._routed(tokens / 2, tokens, LAYER_POSITIONS)) / tokens
        """Seconds of a token in operators of a layer without figures."""

    def layer_seconds(self, batch: float, positions: float, *, mtp: bool = True, in_flight: int | None = None) -> float:
        """A routed layer for a batch of an NPU with one or two micro-batches in flight; None for the faster."""
        tokens = batch / DIES * (2 if mtp else 1)
        return self._routed(batch / DIES, tokens, positions, in_flight) + tokens * self.other_seconds

    def token_seconds(self, batch: float, positions: float, *, mtp: bool = True, in_flight: int | None = None) -> float:
        """Seconds of an output token of a request."""
        operators, weights = self._operators, self._operators.weights
        requests = batch / DIES
        tokens = requests * (2 if mtp else 1)
        routed = self.layer_seconds(batch, positions, mtp=mtp, in_flight=in_flight)
        dense = operators.matmuls(weights.attention + weights.dense, tokens)
        dense += operators.decode_attention(requests, tokens, positions) + tokens * self.other_seconds
        layers = MODEL.layers - MODEL.first_dense_layers
        step = layers * routed + MODEL.first_dense_layers * dense + operators.matmuls(weights.head, tokens)
        if not mtp:
            return step
        # The module that speculates: two hidden vectors to one, a layer, and the head.
        module = operators.matmuls(2 * MODEL.hidden**2, requests) + routed + operators.matmuls(weights.head, requests)
        return (step + module) / (1 + operators.figures["accepted"])

    def _routed(self, requests: float, tokens: float, positions: float, in_flight: int | None = None) -> float:
        """Seconds of the operators of a layer that have figures."""
        alone = sum(self._streams(requests, tokens, positions, 1.0, 1.0))
        share = self._operators.figures["attention_cores"] / self._operators.figures["cube_cores"]
        beside = 2 * max(self._streams(requests / 2, tokens / 2, positions, share, 1 - share))
        return min(alone, beside) if in_flight is None else {1: alone, 2: beside}[in_flight]

    def _streams(
        self, requests: float, tokens: float, positions: float, attention_cores: float, expert_cores: float
    ) -> tuple[float, float]:
        """Seconds of the attention's and of the experts' operators, on shares of the cores."""
        operators, deployment, weights = self._operators, self._operators.deployment, self._operators.weights
        ranks = deployment["decode_ranks"]
        attention = operators.matmuls(weights.attention, tokens, attention_cores)
        attention += operators.decode_attention(requests, tokens, positions, attention_cores)
        routed = tokens * ranks * MODEL.experts_per_token / deployment["decode_routed"]
        shared = tokens * ranks / deployment["decode_shared"]
        experts = operators.matmuls(weights.expert, max(routed, shared), expert_cores)
        for name in ("dispatch", "combine"):
            experts += operators.exchange(name, tokens, ranks, MODEL.experts_per_token + 1)
        return attention, experts


def prefill_rate(
    operators: Operators, other_seconds: float, *, in_flight: bool = True, cached_share: float = 0.0
) -> float:
    """Prompt tokens/s of an NPU, those of cached prefixes included; transfers are hidden if two micro-batches are in flight."""
    deployment, weights, ranks = operators.deployment, operators.weights, operators.deployment["prefill_ranks"]
    length, cached = deployment["prefill_length"], cached_share * deployment["prefill_length"]
    prompts = deployment["prefill_tokens"] / DIES
    tokens = (1 - cached_share) * prompts
    experts = (MODEL.experts_per_token + 1) * weights.expert
    computed = operators.matmuls(weights.attention + experts, tokens)
    computed += operators.prompt_attention(tokens, length, cached) + tokens * other_seconds
    moved = sum(
        operators.exchange(name, tokens, ranks, MODEL.experts_per_token + 1) for name in ("dispatch", "combine")
    )
    # Latents to all ranks, which attend with some of the heads each, and the heads' values back.
    latents = 2 * (MODEL.q_rank + MODEL.kv_rank + MODEL.rope_head_dim) * tokens * (ranks - 1)
    values = 2 * MODEL.heads * MODEL.value_head_dim * tokens * (ranks - 1) / ranks
    moved += (latents + values) / operators.figures["fabric_bytes_per_s"]
    routed = max(computed, moved) if in_flight else computed + moved
    return DIES * prompts / (MODEL.layers * routed)


def table(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Predicted beside published figures, and the ablations."""
    operators, published = Operators(figures["operators"], figures["deployment"]), figures["published"]
    decode = Decode(operators)
    other = decode.other_seconds
    prefill = prefill_rate(operators, other)
    lines = [_line(f"prefill, {name}", prefill, rate) for name, rate in published["prefill"].items()]
    for batch, prompt, new, seconds, rate in published["decode"]:
        predicted = decode.token_seconds(batch, prompt + new / 2)
        line = _line(f"decode, batch {batch}, {prompt} + {new} tokens", batch / predicted, rate)
        lines.append(line | {"predicted_ms": 1e3 * predicted, "published_ms": 1e3 * seconds})
    return {
        "benchmark": "cloudmatrix",
        "model": "deepseek-v3 (the dimensions of DeepSeek-R1), INT8",
        "other_microseconds_of_a_token_and_layer": 1e6 * other,
        "tokens_per_s_of_an_npu": lines,
        "layer_without_mtp_us": {
            "predicted": 1e6 * decode.layer_seconds(LAYER_BATCH, LAYER_POSITIONS, mtp=False),
            "published": 1e6 * published["layer_without_mtp"],
        },
        "ablations": _ablations(operators, decode, published),
        "operators": dict(figures["operators"]),
        "deployment": dict(figures["deployment"]),
    }


def _line(name: str, predicted: float, published: float) -> dict[str, Any]:
    return {"name": name, "predicted": predicted, "published": published, "error": predicted / published - 1}


def _ablations(operators: Operators, decode: Decode, published: Mapping[str, Any]) -> dict[str, Any]:
    """Gains of single measures: predicted beside published."""
    positions, other = LAYER_POSITIONS, decode.other_seconds

    def seconds(batch: float, *, mtp: bool = True, in_flight: int | None = None) -> float:
        return decode.token_seconds(batch, positions, mtp=mtp, in_flight=in_flight)

    prefill = prefill_rate(operators, other)
    prefixes = published["prefix_gain"]
    return {
        "two micro-batches in flight, decode": {
            batch: [seconds(batch, in_flight=1) / seconds(batch, in_flight=2) - 1, gain]
            for batch, gain in published["micro_batch_gain"].items()
        },
        "two micro-batches in flight, prefill": [
            prefill / prefill_rate(operators, other, in_flight=False) - 1,
            published["prefill_micro_batch_gain"],
        ],
        "MTP by batch": [
            {batch: seconds(batch, mtp=False) / seconds(batch) - 1 for batch in (8, 24, 96)},
            published["mtp_gain"],
        ],
        "cached prefix": {
            share: [prefill_rate(operators, other, cached_share=share) / prefill, gain]
            for share, gain in prefixes.items()
        },
    }


def main() -> None:
    """Print the table, and write it to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = json.dumps(table(yaml.safe_load(FILE.read_text(encoding="utf-8"))), indent=1)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
