"""Choice of the source of draft tokens for speculative decoding, and checks of its settings."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.models.decoder import Decoder
from meshwright.policies.drafting import CPU_STEP_COST, GPU_STEP_COST, DraftPauses, least_accepted
from meshwright.serve.batch_inputs import BatchInputs
from meshwright.serve.drafts import Drafter, LookupDrafter, ModelDrafter, NoDrafter
from meshwright.serve.kv_cache import KVCache, layer_groups
from meshwright.serve.model_runner import ModelRunner
from meshwright.serve.prediction_drafts import PredictionDrafter
from meshwright.serve.sampling import Sampler
from meshwright.spec.engine import EngineOptions, Speculation
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec
from meshwright.spec.serving_limits import predictions_error


def drafter_for(
    options: Speculation | None,
    draft_model: Decoder | None,
    model: Decoder,
    runner: ModelRunner,
    inputs: BatchInputs,
    sampler: Sampler,
    *,
    blocks: Sequence[int],
    context: int,
    graph_sizes: tuple[int, ...] = (),
) -> Drafter:
    """The drafter of an engine; `runner` computes the model.

    A draft model's cache has as many blocks in each group as the model's, `blocks`, and its steps have CUDA graphs for `graph_sizes`.
    """
    if options is None:
        return NoDrafter()
    # Prediction modules compute every step, with drafts or without.
    share = 0.0 if draft_model is None else _bytes_of(draft_model) / _bytes_of(model)
    cost = GPU_STEP_COST if inputs.device.type == "cuda" else CPU_STEP_COST
    least = least_accepted(options.tokens, cost, share) if options.least is None else options.least
    if options.mtp:
        return PredictionDrafter(options.tokens, DraftPauses(least), runner, inputs, sampler)
    if draft_model is None:
        return LookupDrafter(options, DraftPauses(least))
    check_draft_model(draft_model.spec, model.spec, context)
    weight = draft_model.embed.weight
    cache = KVCache(
        draft_model.spec,
        blocks,
        tokens_per_block=inputs.tokens_per_block,
        device=weight.device,
        dtype=weight.dtype,
    )
    drafting = ModelRunner(draft_model, cache, inputs, context=context, graph_sizes=graph_sizes)
    return ModelDrafter(options, DraftPauses(least), drafting, inputs, sampler)


def check_speculation(options: EngineOptions, spec: ModelSpec, draft_model: Decoder | None) -> None:
    """Raise BadInput for drafts that exclude each other, or that the engine's model has no modules for."""
    if options.invariant and (draft_model is not None or options.predictions):
        raise BadInput(
            "invariant results cannot have a draft model or mtp: which of their drafts are accepted depends on the batch",
            key="draft_model",
        )
    if draft_model is not None and options.predictions:
        raise BadInput("mtp: the model's own modules propose the drafts; leave out draft_model", key="draft_model")
    if error := predictions_error(spec, options.predictions):
        raise BadInput(error, key="speculate" if spec.prediction_depth else "draft_model")


def check_draft_model(draft: ModelSpec, spec: ModelSpec, context: int) -> None:
    """Raise BadInput if a model cannot be the draft model of another in sequences of up to `context` tokens."""
    if draft.vocab_size != spec.vocab_size:
        raise BadInput(
            f"draft model: expected the model's vocabulary of {spec.vocab_size} tokens, got {draft.vocab_size}; "
            "choose a model with the same tokenizer",
            key="draft_model",
        )
    if draft.max_seq_len < context:
        raise BadInput(
            f"draft model: its context of {draft.max_seq_len} tokens is shorter than the engine's of {context}; "
            f"give the engine a context of {draft.max_seq_len}",
            key="draft_model",
        )
    for ours, theirs in zip(layer_groups(draft), layer_groups(spec), strict=True):
        if theirs.window is not None and (ours.window is None or ours.window > theirs.window):
            raise BadInput(
                f"draft model: it attends to {ours.window or 'all'} tokens, but only {theirs.window} stay in the cache; "
                "choose a model with this window or a smaller one",
                key="draft_model",
            )


def _bytes_of(model: Decoder) -> int:
    """Bytes of the weights that a decode reads: all but embeddings, of which it reads single rows."""
    tied = model.head.weight is None
    return sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if tied or not name.startswith("embed.")
    )
