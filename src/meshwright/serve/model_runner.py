"""The forward pass of one step. It computes the logits from which new tokens are drawn.

The host launches the kernels of a small step more slowly than a GPU runs them. So on CUDA, the runner replays CUDA graphs:

- A step that has only decodes is one graph. There are graphs for some batch sizes, and a step is padded to the next larger batch size.
  Decodes with drafts have other graphs than decodes without drafts.
- In a step with prompts, the host launches attention, and everything between two attentions is a graph (`serve.prompt_graphs`).
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.kernels.expert_decode import most_tokens
from meshwright.models.block import Block
from meshwright.models.decoder import Decoder
from meshwright.models.latent_attention import LatentAttention
from meshwright.models.moe import MoELayer
from meshwright.models.prediction import PredictionModule
from meshwright.policies.drafting import most_drafting
from meshwright.serve.batch_inputs import BatchInputs, PackedStep, StepInputs
from meshwright.serve.blocks import Delta, add_and_norm, block_forward, residual_stream, selected
from meshwright.serve.cached_attention import use_cached_attention
from meshwright.serve.graphs import Graphs
from meshwright.serve.host_decode import HostDecode
from meshwright.serve.kv_cache import KVCache
from meshwright.serve.prompt_graphs import PromptGraphs
from meshwright.spec.errors import BadInput

log = logging.getLogger("meshwright.server")


class ModelRunner:
    """Runs the model on steps. It replaces the model's attention, so that only this runner can use the model.

    - `context`: largest number of tokens of a sequence.
    - `graph_sizes`: batch sizes of decodes that get a CUDA graph, ascending.
    - `prompt_sizes`: numbers of tokens of steps with prompts that get CUDA graphs, ascending.
    - `invariant`: whether the results of a request do not depend on the other requests of the step.
    - `predictions`: number of the model's prediction modules that are used.
    """

    uniform_drafts = True
    """Whether decodes with drafts may be padded to the same number of tokens; see `uniform` of `BatchInputs.pack`."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        inputs: BatchInputs,
        *,
        context: int,
        graph_sizes: tuple[int, ...] = (),
        prompt_sizes: tuple[int, ...] = (),
        invariant: bool = False,
        predictions: int = 0,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._predictions = predictions
        self._step = use_cached_attention(model, cache, context, invariant=invariant, predictions=predictions)
        usual = not invariant and not predictions and not prompt_sizes and HostDecode.supports(model, cache)
        self._host_decode = HostDecode(model, cache, context) if usual else None
        self.decode_sizes = graph_sizes
        """Batch sizes of decodes that have a CUDA graph, ascending."""
        self.prompt_sizes = prompt_sizes
        """Numbers of tokens for which steps with prompts have CUDA graphs, ascending. Steps are padded to the next of them."""
        weight = model.embed.weight
        normed = weight.new_empty(1, max(prompt_sizes, default=0), model.spec.hidden)
        self._prompt_graphs = PromptGraphs(self._step, self._compute_normed, prompt_sizes, inputs.groups, normed)
        self._graphs = Graphs()
        self._graph_logits = torch.empty(0)
        self.normed = self._graph_normed = torch.empty(0)
        """`(1, tokens, hidden)`: the model's output after the last norm, for all tokens of the last step.

        It is kept only if prediction modules or log probabilities of prompts need it.
        """

    def expand_latents(self) -> None:
        """From now on, let decodes expand keys and values from the cached latents (see `CurrentStep.absorbs`).

        Raises BadInput for a model without latent attention.
        """
        if not any(isinstance(module, LatentAttention) for module in self._model.modules()):
            raise BadInput("absorb: only latent attention has a form that does not absorb", key="absorb")
        self._step.absorbs = False

    def logits(self, packed: PackedStep) -> Tensor:
        """Compute a packed step. Returns its logits `(samples, vocab)`, which are valid until the next call."""
        size = packed.decode_size
        queries = packed.decode_queries
        if size is not None and self._graphs.replay((size, queries)):
            logits = self._graph_logits[: size * queries]
            if self._predictions:
                self.normed = self.graph_normed(size * queries)
        elif self._host_decode is not None and size == queries == 1:
            return self._host_decode.logits(self._inputs, packed)
        else:
            logits = self.forward(self._inputs.resolve(packed))
        return logits[: len(packed.sampled_rows)] if packed.sampled_tokens is None else logits[packed.sampled_tokens]

    def fill_cache(self, packed: PackedStep) -> None:
        """Compute the keys and values of a packed step and write them into the cache, without logits."""
        self.write_cache(self._inputs.resolve(packed))

    def write_cache(self, inputs: StepInputs) -> None:
        """Compute the keys and values of a step's tokens and write them into the cache, without logits."""
        self._residual(inputs)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture all CUDA graphs: for steps with prompts, and for each batch size of decodes without and with drafts.

        The captured steps have only padding, so they write nothing into the cache.
        """
        self._capture_prompts()
        shapes = [(size, 1) for size in self.decode_sizes]
        drafts = self._inputs.drafts
        if drafts:
            shapes += [(size, 1 + drafts) for size in drafted_sizes(self.decode_sizes, drafts)]
        for size, queries in sorted(shapes, key=math.prod, reverse=True):
            packed = self._inputs.pack_padding(size, queries)
            if not self._graph_logits.numel():
                self._graph_logits = torch.empty_like(self.forward(self._inputs.resolve(packed)))
                if self._predictions:
                    self._graph_normed = torch.empty_like(self.normed)
            # All graphs write into one tensor. If each had its own logits, they would stay allocated.
            self._graphs.capture((size, queries), partial(self._compute_into_graph_logits, packed, size * queries))

    def _capture_prompts(self) -> None:
        """Capture the graphs of steps with prompts. If that fails, an engine of one rank works without them and logs a warning."""
        try:
            self._prompt_graphs.capture(self._graphs)
        except RuntimeError as error:  # CUDA raises it, also if memory is not enough.
            if dist.is_initialized():
                raise  # The other ranks have these graphs; they would wait for this rank in their collectives.
            self._prompt_graphs.clear()
            self.prompt_sizes = ()
            log.warning("the host launches prompts without CUDA graphs: %s", str(error).partition("\n")[0])

    def _compute_into_graph_logits(self, packed: PackedStep, count: int) -> None:
        self._graph_logits[:count].copy_(self.forward(self._inputs.resolve(packed)))
        if self._predictions:
            self._graph_normed[:, :count].copy_(self.normed)

    def graph_normed(self, count: int) -> Tensor:
        """Return the memory into which the graph of a step of `count` tokens writes `normed`. Only with prediction modules."""
        return self._graph_normed[:, :count]

    def release_graphs(self) -> None:
        """Free all graphs. This must happen before a process group is destroyed: NCCL waits until no graph has its collectives."""
        self._prompt_graphs.clear()
        self._graphs.clear()

    @property
    def few_tokens(self) -> tuple[int, ...]:
        """Numbers of tokens for which MoE layers use different variants of their kernel for few tokens, ascending.

        Example: if the kernel supports up to 24 tokens, the result is 1, 2, 4, 8, 16, 24; steps of 9 to 16 tokens use the same variant. The
        result is empty on a CPU, and for a model without MoE layers.
        """
        moe_layers = [module for module in self._model.modules() if isinstance(module, MoELayer)]
        if not self._model.embed.weight.is_cuda or not moe_layers:
            return ()
        most = most_tokens(moe_layers[0].count, moe_layers[0].per_token)
        return (*(size for size in map((2).__pow__, range(most.bit_length())) if size < most), most)

    @torch.inference_mode()
    def warm_prompt(self, tokens: int) -> None:
        """Run the first block, and the first block with experts, on a prompt of `tokens` padding tokens. Nothing is written into the cache.

        This compiles kernels, and lets cuDNN plan its attention for this number of tokens, before a request needs them.
        """
        inputs = self._inputs
        device = self._model.embed.weight.device
        positions = torch.arange(tokens, dtype=torch.int32, device=device)
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        self._step.inputs = StepInputs(
            tokens=positions,
            positions=positions,
            slots=torch.full((inputs.groups, tokens), -1, dtype=torch.int32, device=device),
            block_tables=tuple(table[:1] for table in inputs.tables),
            context_lengths=ends[1:],
            query_starts=ends,
            decodes=0,
            prompts=(tokens,),
            sampled=None,
        )
        blocks = cast("list[Block]", list(self._model.layers.values()))
        routed = next((block for block in blocks if block.routed), blocks[0])
        hidden = torch.zeros(1, tokens, self._model.spec.hidden, dtype=self._model.embed.weight.dtype, device=device)
        for block in {blocks[0]: None, routed: None}:
            block_forward(block, hidden, None)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Compute the logits of a step's samples, `(samples, vocab)`. Also writes the keys and values of all tokens into the cache."""
        # If `sampled` is None, the step has only decodes, and all its tokens need logits.
        normed = None if inputs.sampled is None else self._prompt_graphs.run(inputs)
        if normed is not None:
            self.normed = normed
            return self.head(normed[:, inputs.sampled])
        x, delta = self._residual(inputs)
        keeps = bool(self._predictions) or inputs.scored
        if inputs.sampled is not None and not keeps:
            x, delta = selected(x, delta, inputs.sampled)
        if self._step.invariant:
            # The last norm is not fused with the addition, so that it is the trainer's operator: this gives the bits of the trainer's exact
            # forward.
            x = add_and_norm(x, delta, None)[0]
            delta = None
        normed = cast("Tensor", add_and_norm(x, delta, self._model.norm)[1])
        if keeps:
            self.normed = normed
            normed = normed if inputs.sampled is None else normed[:, inputs.sampled]
        return self.head(normed)

    def head(self, normed: Tensor) -> Tensor:
        """Return the logits `(tokens, vocab)` of the normed outputs `(1, tokens, hidden)`."""
        tied = self._model.embed.weight if self._model.spec.tied else None
        return self._model.head(normed, None, tied)[0]

    def predict(self, inputs: StepInputs, depth: int, normed: Tensor, following: Tensor) -> Tensor:
        """Run prediction module number `depth` (from 0) on a step. Returns its normed output, `(1, tokens, hidden)`.

        It also writes the module's keys and values into the cache. `normed` is the normed output of module `depth` - 1, or of the model if
        `depth` is 0. `following` `(tokens,)` has, for each token of the step, the token that is `depth + 1` positions after it.
        """
        self._step.inputs = inputs
        module = cast("PredictionModule", self._model.predictions[depth])
        joined = module.join(normed, self._model.scaled_embedding(following[None]))
        return cast("Tensor", add_and_norm(*block_forward(cast("Block", module.block), joined, None), module.norm)[1])

    def _compute_normed(self, inputs: StepInputs) -> Tensor:
        """Return the model's output after the last norm for all tokens, `(1, tokens, hidden)`."""
        return cast("Tensor", add_and_norm(*self._residual(inputs), self._model.norm)[1])

    def _residual(self, inputs: StepInputs) -> tuple[Tensor, Delta | None]:
        """Return the residual stream `(1, tokens, hidden)` after all layers, and the last layer's output, which is not added to it yet."""
        self._step.inputs = inputs
        if self._host_decode is not None:
            self._host_decode.forget_text()
        return residual_stream(self._model, inputs.tokens, inputs.positions)


def graph_sizes(sequences: int) -> tuple[int, ...]:
    """Return the batch sizes that get CUDA graphs, up to `sequences`, ascending.

    They are 1, 2, 4, the multiples of 8 up to 256, the multiples of 32 from 288 on, and `sequences` itself.
    """
    sizes = {1, 2, 4, *range(8, 257, 8), *range(288, sequences + 1, 32), sequences}
    return tuple(sorted(size for size in sizes if size <= sequences))


def drafted_sizes(sizes: Sequence[int], drafts: int) -> tuple[int, ...]:
    """Return the batch sizes to which decodes are padded if each may have `drafts` drafts.

    They are the first of `sizes`, up to the first that is at least the largest number of decodes that may have drafts (`most_drafting`).
    """
    return tuple(sizes[: bisect_left(sizes, most_drafting(drafts)) + 1])
