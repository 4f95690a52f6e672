"""Adds Llama 3.2 1B and 3B to torchtitan 0.2.2, its Llama 3 70B cut to 16 layers, and its Qwen3-30B-A3B cut to 4.

Options: `--experimental.custom_import small_llama --model.name small_llama`, or `--model.name cut_llama --model.flavor 70B-16`, or
`--model.name cut_qwen3 --model.flavor 30B-A3B-4`.

The models are its own Llama with the head tied to the embedding, as theirs is. Under FSDP both ends are one unit that stays gathered after
forward: a weight in two units would be two weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torchtitan.models.llama3.infra.parallelize as infra
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.models.llama3 import Transformer, TransformerModelArgs, get_train_spec, llama3_args
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.qwen3 import get_train_spec as qwen3_spec
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

SHARED: dict[str, Any] = {
    "n_kv_heads": 8,
    "rope_theta": 500000,
    "rope_scaling_args": RoPEScalingArgs(scaling_factor=32.0),
}
FLAVORS = {
    "1B": TransformerModelArgs(dim=2048, n_layers=16, n_heads=32, ffn_dim_multiplier=1.5, **SHARED),
    "3B": TransformerModelArgs(dim=3072, n_layers=28, n_heads=24, **SHARED),
}


class TiedTransformer(Transformer):
    """A Llama whose head is its embedding."""

    def __init__(self, model_args: TransformerModelArgs) -> None:
        super().__init__(model_args)
        self.output.weight = self.tok_embeddings.weight

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        self.output.weight = self.tok_embeddings.weight  # giving memory to a model made on `meta` unties it
        super().init_weights(buffer_device)


def parallelize(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
    """As torchtitan parallelizes its Llama, with both ends of the model in one FSDP unit."""
    original = infra.apply_fsdp
    infra.apply_fsdp = apply_fsdp
    try:
        return infra.parallelize_llama(model, parallel_dims, job_config)
    finally:
        infra.apply_fsdp = original


def apply_fsdp(
    model: Any,
    dp_mesh: Any,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    pp_enabled: bool,
    cpu_offload: bool = False,
    reshard_after_forward_policy: str = "default",
) -> None:
    """FSDP2 over every block, and over both ends together."""
    if pp_enabled or cpu_offload:
        raise ValueError("a tied model is measured without pipeline and without offload")
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    reshard = reshard_after_forward_policy != "never"
    for block in model.layers.values():
        fully_shard(block, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=reshard)
    ends = [model.tok_embeddings, model.norm, model.output]
    fully_shard(ends, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=dp_mesh, mp_policy=policy)
    infra.disable_fsdp_gradient_division(model)


def train_spec() -> TrainSpec:
    spec = get_train_spec()
    spec.model_cls, spec.model_args, spec.parallelize_fn = TiedTransformer, FLAVORS, parallelize
    return spec


def cut_spec() -> TrainSpec:
    spec = get_train_spec()
    spec.model_args = {"70B-16": replace(llama3_args["70B"], n_layers=16)}
    return spec


def cut_qwen3_spec() -> TrainSpec:
    spec = qwen3_spec()
    spec.model_args = {"30B-A3B-4": replace(qwen3_args["30B-A3B"], n_layers=4)}
    return spec


register_train_spec("small_llama", train_spec())
register_train_spec("cut_llama", cut_spec())
register_train_spec("cut_qwen3", cut_qwen3_spec())
