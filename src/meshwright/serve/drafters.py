"""`drafter_for` makes the drafter that the settings of speculative decoding ask for; the other functions check these settings."""

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
    """Make the drafter of an engine.

    | `options` | drafter |
    |---|---|
    | None | no drafts |
    | with `mtp` | the model's prediction modules |
    | with a `draft_model` | the draft model |
    | otherwise | prompt lookup |

    - `model`, `runner`: the main model, and the object that computes its steps.
    - `blocks`: number of cache blocks of each group of layers. The draft model's cache has the same numbers.
    - `context`: largest number of tokens of a sequence.
    - `graph_sizes`: batch sizes for which the draft model gets CUDA graphs.
    """
    if options is None:
        return NoDrafter()
    # The share is 0 for prediction modules: they compute every step, with drafts or without, so drafts cost nothing more.
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
    """Check the settings of speculative decoding.

    Raises BadInput if a draft model or prediction modules are combined with `invariant`, if both are asked for, or if the model has fewer
    prediction modules than `options.predictions`.
    """
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
    """Raise BadInput if the model `draft` cannot be the draft model of the model `spec`, for sequences of up to `context` tokens.

    The draft model needs the same vocabulary, a context of at least `context` tokens, and in each group of layers a window that is not
    larger than the window of the main model.
    """
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
    """Return the bytes of the weights that a decode reads: all weights but the embedding, of which a decode reads only single rows.

    If the head is tied to the embedding, the embedding counts too.
    """
    tied = model.head.weight is None
    return sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if tied or not name.startswith("embed.")
    )
