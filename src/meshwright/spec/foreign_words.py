"""Names of settings in torchtitan, Hugging Face's Trainer, TRL, verl, axolotl and vLLM, and what to write here instead.

The check of run files and settings uses these tables, and so does the command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_FOLDER = "a run is written to RUNS/NAME: set NAME with the key name, and RUNS with --runs"
_ACCUMULATION = "the planner divides train.global_batch into micro-batches; plan.micro_batch pins a rank's sequences of a micro-batch"
_BATCH_OF_RANK = (
    "give the whole step's sequences as train.global_batch; plan.micro_batch pins a rank's sequences of a micro-batch"
)
_PRECISION = "weights and optimizer are fp32; plan.compute pins forward and backward, bf16 where GPUs have it"
_FP8 = "plan.linear=fp8_rowwise or fp8_tensorwise"
_NOT_QUANTISED = "weights are trained in bf16 or fp32: neither quantised weights nor adapters of them are trained"
_NO_DOWNLOAD = "nothing is downloaded; download the folder first and name it"
_MODEL = "model=PRESET for the dimensions; model.init=hf:DIR starts from the weights in a folder"
_CORPUS = "`meshwright data prepare INPUT --out DIR` makes a corpus, which is data.mix=DIR"
_PRINTED = "every step is written to metrics.jsonl"
_RESUME = "the same command continues a run; --fresh starts it anew"
_ATTENTION = "the fastest attention kernel of the device is used always"
_WORKERS = "the loader needs no workers: shards are mapped into memory"
_FOLDER_TOKENIZER = "the tokenizer is the one in the model's folder"
_DEVICES = (
    "one server has one model on --tensor devices; `meshwright plan` of a file with `serve` plans several servers"
)
_TLS = "put a proxy with TLS in front"


class Meaning(NamedTuple):
    """What a word of another program means here."""

    key: str | None = None
    """The key with this meaning; None if there is only advice."""
    advice: str | None = None
    """What to write; None if the key takes the same values as in the other program."""


TRAINING = {
    # Hugging Face's Trainer and TRL
    "output_dir": Meaning("name", _FOLDER),
    "run_name": Meaning("name"),
    "max_steps": Meaning("train.steps"),
    "num_train_epochs": Meaning("train.epochs"),
    "lr_scheduler_type": Meaning("train.schedule"),
    "lr": Meaning("train.learning_rate"),
    "min_lr": Meaning("train.min_learning_rate", "train.min_learning_rate is a fraction of the peak"),
    "warmup_ratio": Meaning("train.warmup_steps", "a number of steps"),
    "adam_beta1": Meaning("train.optimizer.beta1"),
    "adam_beta2": Meaning("train.optimizer.beta2"),
    "adam_epsilon": Meaning("train.optimizer.epsilon"),
    "optim": Meaning("train.optimizer.name"),
    "max_grad_norm": Meaning("train.clip_norm"),
    "grad_clip": Meaning("train.clip_norm"),
    "per_device_train_batch_size": Meaning("train.global_batch", _BATCH_OF_RANK),
    "train_batch_size": Meaning("train.global_batch"),
    "batch_size": Meaning("train.global_batch"),
    "rampup_batch_size": Meaning(
        "train.batch_ramp", "a list of {until: STEP, batch: SEQUENCES}; after these steps, train.global_batch is used"
    ),
    "gradient_accumulation_steps": Meaning("plan.micro_batch", _ACCUMULATION),
    "gradient_checkpointing": Meaning("plan.recompute"),
    "bf16": Meaning("plan.compute", _PRECISION),
    "fp16": Meaning("plan.compute", _PRECISION),
    "tf32": Meaning("plan.compute", _PRECISION),
    "torch_compile": Meaning("plan.compile"),
    "fsdp": Meaning("plan.shard", "a number of ranks; the planner chooses it"),
    "fsdp_config": Meaning("plan", "the planner chooses the layout; sections of `plan` pin it"),
    "deepspeed": Meaning(
        "plan",
        "the planner chooses the layout; plan.shard, plan.reshard and plan.offload pin what ZeRO and its offload set",
    ),
    "ddp_backend": Meaning(None, "NCCL on GPUs, Gloo on cpu"),
    "full_determinism": Meaning("train.deterministic"),
    "save_steps": Meaning("checkpoint.every"),
    "save_total_limit": Meaning("checkpoint.keep"),
    "save_strategy": Meaning("checkpoint.every", "steps, or auto"),
    "eval_steps": Meaning("train.validate_every"),
    "eval_strategy": Meaning("train.validate_every", "steps between validations"),
    "logging_steps": Meaning(None, _PRINTED),
    "logging_dir": Meaning("observe.tensorboard", "true writes its events into the run's folder"),
    "report_to": Meaning("observe", "observe.wandb=PROJECT, observe.tensorboard=true"),
    "resume_from_checkpoint": Meaning(None, _RESUME),
    "model_name_or_path": Meaning("model", _MODEL),
    "dataset_name": Meaning("data.mix", _CORPUS),
    "dataset_text_field": Meaning("data.mix", "`meshwright data prepare --text-key KEY` reads that column"),
    "max_length": Meaning("train.seq_len"),
    "max_seq_length": Meaning("train.seq_len"),
    "dataloader_num_workers": Meaning(None, _WORKERS),
    "push_to_hub": Meaning(None, "nothing is sent; `meshwright checkpoint to-hf` writes a folder to upload"),
    "attn_implementation": Meaning(None, _ATTENTION),
    "peft_config": Meaning("model.adapter"),
    # TRL's DPO, KTO and GRPO, and verl
    "loss_type": Meaning("preference.loss"),
    "ref_model": Meaning("preference.reference", "start, hf:DIR or checkpoint:DIR"),
    "reference_model": Meaning("preference.reference", "start, hf:DIR or checkpoint:DIR"),
    "precompute_ref_log_probs": Meaning(
        None, "log-probabilities of the reference are computed before the first step always"
    ),
    "rpo_alpha": Meaning("preference.sft"),
    "simpo_gamma": Meaning("preference.margin"),
    "desirable_weight": Meaning("preference.desirable"),
    "undesirable_weight": Meaning("preference.undesirable"),
    "center_rewards_coefficient": Meaning("preference.center"),
    "num_generations": Meaning("rl.samples"),
    "rollout_n": Meaning("rl.samples"),
    "group_size": Meaning("rl.samples"),
    "max_completion_length": Meaning("rl.new_tokens"),
    "max_response_length": Meaning("rl.new_tokens"),
    "max_new_tokens": Meaning("rl.new_tokens"),
    "max_prompt_length": Meaning("train.seq_len", "train.seq_len holds a question and its answer"),
    "reward_funcs": Meaning("rl.reward", "file: FILE.py with a function, or model: DIR of a reward model"),
    "reward_function": Meaning("rl.reward.function", "its name in rl.reward.file"),
    "reward_model": Meaning("rl.reward.model"),
    "num_iterations": Meaning(
        "rl.updates", "a number of steps: their answers are sampled together, and each step is one update"
    ),
    "ppo_mini_batch_size": Meaning(
        "rl.updates", "a number of steps of train.global_batch questions: their answers are sampled together"
    ),
    "epsilon_high": Meaning("rl.clip_above"),
    "clip_ratio": Meaning("rl.clip_above", "and rl.clip_below"),
    "clip_ratio_low": Meaning("rl.clip_below"),
    "clip_ratio_high": Meaning("rl.clip_above"),
    "kl_coef": Meaning("rl.kl.weight"),
    "kl_loss_coef": Meaning("rl.kl.weight"),
    "adv_estimator": Meaning("rl.policy"),
    "loss_agg_mode": Meaning("rl.divisor"),
    "mask_truncated_completions": Meaning("rl.train_truncated", "false leaves them out"),
    "importance_sampling_level": Meaning("rl.policy", "ratios are those of tokens"),
    "use_vllm": Meaning(None, "answers are sampled by this program's own engine"),
    "vllm_mode": Meaning(None, "answers are sampled by this program's own engine"),
    # axolotl
    "base_model": Meaning("model", _MODEL),
    "datasets": Meaning("data.mix", _CORPUS),
    "dataset": Meaning("data.mix", _CORPUS),
    "path": Meaning("data.mix", _CORPUS),
    "dataset_prepared_path": Meaning("data.mix", _CORPUS),
    "chat_template": Meaning(
        "data.mix", "`meshwright data prepare --chat` reads the tokenizer's template, or --chat-template FILE"
    ),
    "val_set_size": Meaning("data.validation", "`meshwright data prepare --held-out FRACTION` holds text out"),
    "sequence_len": Meaning("train.seq_len"),
    "sequence_length": Meaning("train.seq_len"),
    "sample_packing": Meaning("data.packing"),
    "num_epochs": Meaning("train.epochs"),
    "micro_batch_size": Meaning("plan.micro_batch", _BATCH_OF_RANK),
    "lr_scheduler": Meaning("train.schedule"),
    "wandb_project": Meaning("observe.wandb.project"),
    "wandb_entity": Meaning("observe.wandb.entity"),
    "wandb_name": Meaning("observe.wandb.name"),
    "wandb_run_id": Meaning("observe.wandb.name"),
    "saves_per_epoch": Meaning("checkpoint.every", "steps, or auto"),
    "evals_per_epoch": Meaning("train.validate_every", "steps between validations"),
    "flash_attention": Meaning(None, _ATTENTION),
    "lora_r": Meaning("model.adapter.rank"),
    "lora_alpha": Meaning("model.adapter.alpha"),
    "target_modules": Meaning("model.adapter.targets"),
    "lora_dropout": Meaning(None, "adapters are trained without dropout"),
    "load_in_8bit": Meaning(None, _NOT_QUANTISED),
    "load_in_4bit": Meaning(None, _NOT_QUANTISED),
    "tensor_parallel_size": Meaning("plan.tensor"),
    "context_parallel_size": Meaning("plan.context_ring", "or plan.context_ulysses"),
    "dp_shard_size": Meaning("plan.shard"),
    "dp_replicate_size": Meaning("plan.replicate"),
    # torchtitan
    "training": Meaning("train", "its keys here: steps, global_batch, seq_len, clip_norm"),
    "local_batch_size": Meaning("plan.micro_batch", _BATCH_OF_RANK),
    "global_batch_size": Meaning("train.global_batch"),
    "max_norm": Meaning("train.clip_norm"),
    "mixed_precision_param": Meaning("plan.compute"),
    "mixed_precision_reduce": Meaning("plan.reduce"),
    "parallelism": Meaning(
        "plan", "the planner chooses the layout; keys of plan pin it: shard, replicate, tensor, pipeline, context_ring"
    ),
    "data_parallel_shard_degree": Meaning("plan.shard"),
    "data_parallel_replicate_degree": Meaning("plan.replicate"),
    "tensor_parallel_degree": Meaning("plan.tensor"),
    "pipeline_parallel_degree": Meaning("plan.pipeline"),
    "pipeline_parallel_schedule": Meaning("plan.schedule"),
    "context_parallel_degree": Meaning("plan.context_ring", "or plan.context_ulysses"),
    "expert_parallel_degree": Meaning("plan.expert"),
    "fsdp_reshard_after_forward": Meaning("plan.reshard"),
    "activation_checkpoint": Meaning("plan.recompute"),
    "decay_ratio": Meaning("train.decay_fraction"),
    "min_lr_factor": Meaning("train.min_learning_rate"),
    "interval": Meaning("checkpoint.every"),
    "keep_latest_k": Meaning("checkpoint.keep"),
    "async_mode": Meaning("checkpoint.mode"),
    "enable_wandb": Meaning("observe.wandb", "a project's name"),
    "enable_tensorboard": Meaning("observe.tensorboard"),
    "log_freq": Meaning(None, _PRINTED),
    "profiling": Meaning(None, "`meshwright train --profile-steps` records steps for the PyTorch profiler"),
    "metrics": Meaning("observe"),
    "job": Meaning("name", _FOLDER),
    "dump_folder": Meaning("name", _FOLDER),
    "config_file": Meaning(None, "name the run file without an option: meshwright train run.yaml"),
    "flavor": Meaning("model", _MODEL),
    "hf_assets_path": Meaning("model.init", _MODEL),
    "float8": Meaning("plan.linear", _FP8),
    "fp8": Meaning("plan.linear", _FP8),
    "precision": Meaning("plan.compute", _PRECISION),
    "dtype": Meaning("plan.compute", _PRECISION),
    # devices, as torchrun and Lightning name them
    "device": Meaning("cluster", "`cluster: auto` is the devices of this machine"),
    "devices": Meaning("cluster.gpus_per_node"),
    "gpus": Meaning("cluster.gpus_per_node"),
    "num_gpus": Meaning("cluster.gpus_per_node"),
    "nproc_per_node": Meaning("cluster.gpus_per_node"),
    "num_nodes": Meaning("cluster.nodes"),
    "nnodes": Meaning("cluster.nodes"),
    # config.json of Hugging Face's models
    "hidden_size": Meaning("model.hidden"),
    "intermediate_size": Meaning("model.ffn_hidden"),
    "num_hidden_layers": Meaning("model.layers"),
    "num_attention_heads": Meaning("model.heads"),
    "num_key_value_heads": Meaning("model.kv_heads"),
    "max_position_embeddings": Meaning("model.max_seq_len"),
    "num_experts": Meaning("model.experts"),
    "num_local_experts": Meaning("model.experts"),
    "num_experts_per_tok": Meaning("model.experts_per_token"),
    "moe_intermediate_size": Meaning("model.expert_hidden"),
    "first_k_dense_replace": Meaning("model.first_dense_layers"),
    "tie_word_embeddings": Meaning("model.tied"),
}
"""Name of a setting for training in another program → its meaning here, with the dotted key of a run file."""

SERVING = {
    "model": Meaning(None, "name the folder without an option: meshwright serve DIR"),
    "tensor_parallel_size": Meaning("tensor"),
    "tp": Meaning("tensor"),
    "pipeline_parallel_size": Meaning(None, _DEVICES),
    "data_parallel_size": Meaning(None, _DEVICES),
    "max_model_len": Meaning("context"),
    "max_num_seqs": Meaning("sequences"),
    "max_num_batched_tokens": Meaning("step_tokens"),
    "block_size": Meaning("tokens_per_block"),
    "num_gpu_blocks_override": Meaning("cache_blocks"),
    "gpu_memory_utilization": Meaning(
        "cache_blocks", "the cache takes the memory that is free; cache_blocks bounds it"
    ),
    "enable_prefix_caching": Meaning("prefix_cache"),
    "enable_chunked_prefill": Meaning("step_tokens", "long prompts are always cut into chunks of at most step_tokens"),
    "quantization": Meaning("weights"),
    "kv_cache_dtype": Meaning("kv_cache"),
    "dtype": Meaning("weights", "the dtype is the model's own; weights=fp8 or int8 computes the blocks in that format"),
    "served_model_name": Meaning("name"),
    "tool_call_parser": Meaning("notation"),
    "reasoning_parser": Meaning("notation", "a notation says how both reasoning and tool calls are marked"),
    "enable_auto_tool_choice": Meaning("notation", "tool calls are recognised by default"),
    "speculative_model": Meaning("draft_model"),
    "num_speculative_tokens": Meaning("speculate"),
    "speculative_config": Meaning(
        "speculate", "a number of draft tokens; draft_model names the model that proposes them"
    ),
    "kv_transfer_config": Meaning("role", "role, transfer_address and prefill_engines"),
    "disable_log_requests": Meaning("log_requests", "log_requests: false, or --no-log-requests"),
    "tokenizer": Meaning(None, _FOLDER_TOKENIZER),
    "trust_remote_code": Meaning(
        None, "no code of a model's folder is run; docs/reference/models.md lists the families"
    ),
    "enforce_eager": Meaning(None, "leave it out: it is a setting of CUDA graphs, which the engine captures by itself"),
    "swap_space": Meaning(None, "a request that does not fit waits or is computed again; none is moved to host memory"),
    "cpu_offload_gb": Meaning("tensor", "weights stay on the devices; tensor divides them over several"),
    "enable_lora": Meaning("adapter"),
    "lora_modules": Meaning("adapter"),
    "download_dir": Meaning(None, _NO_DOWNLOAD),
    "revision": Meaning(None, _NO_DOWNLOAD),
    "ssl_keyfile": Meaning(None, _TLS),
    "ssl_certfile": Meaning(None, _TLS),
    "seed": Meaning(None, "`seed` is a field of a request"),
}
"""Name of a setting for serving in another program → its meaning here, with the key of the settings of `serve`."""

OTHER_OPTIONS = {
    "max_tokens": "tokens",
    "max_new_tokens": "tokens",
    "tensor_parallel_size": "tensor",
    "tp": "tensor",
    "expert_parallel_size": "expert",
    "batch_size": "batch",
    "dataset": "data",
    "max_seq_length": "seq-len",
    "max_length": "seq-len",
    "output_dir": "runs",
    "output": "out",
    "resume": "fresh",
}
"""Name of an option in another program → the option with this meaning, for commands that take no keys and do not serve."""

THIS_MACHINE = {"auto", "cuda", "device", "gpu", "gpus", "nvidia"}
"""Values of `cluster.gpu` that people write if they mean the devices of this machine."""


def normalized(word: str) -> str:
    """Return a word in the form of the tables: `--Max-Steps` becomes `max_steps`."""
    return word.lstrip("-").lower().replace("-", "_")


def option_hint(word: str, options: frozenset[str], is_key: Callable[[str], bool], takes_keys: bool) -> str | None:
    """Return what to write instead of the unknown option `word` of a command; None if the word is not known.

    `options` are the command's own options, without dashes. `takes_keys` is true if the command takes KEY=VALUE
    arguments; `is_key` returns whether a key is valid.
    """
    name = normalized(word)
    if takes_keys:
        dotted = word.lstrip("-").replace("-", "_")
        if is_key(dotted):
            return f"write {dotted}=VALUE"
        key, advice = TRAINING.get(name) or TRAINING.get(name.rpartition(".")[2]) or Meaning()
        if advice is not None:
            return advice
        return f"write {key}=VALUE" if key is not None else None
    if "prefix_cache" in {normalized(option) for option in options} and name in SERVING:
        key, advice = SERVING[name]
        return advice or f"write --{key.replace('_', '-')}" if key is not None else advice
    ours = OTHER_OPTIONS.get(name)
    return f"write --{ours}" if ours in options else None


def no_folder_hint(text: str, *, dataset: bool = False) -> str:
    """Return what to do if `text` was given as a folder but is none. The result is the end of a message; it is empty if
    nothing is known about `text`.

    A text ORG/NAME without a folder ORG is taken for a model or a data set of a hub; a name with `.gguf` is a GGUF
    file.
    """
    path = Path(text)
    if path.suffix.lower() == ".gguf":
        return (
            "; a GGUF file is converted first: transformers' AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME)"
            ".save_pretrained(DIR), and the same of AutoTokenizer"
        )
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) and not path.parent.exists():
        kind = "--repo-type dataset " if dataset else ""
        return f"; nothing is downloaded from a hub: `hf download {text} {kind}--local-dir DIR` does, then name DIR"
    return ""
