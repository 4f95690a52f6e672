"""The model at the start of a run. A KL penalty compares the trained model's log-probabilities with those of this model."""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.checkpoint.models.initial import initial_weights
from meshwright.checkpoint.models.single_device import allocate
from meshwright.data.loader import MicroBatch
from meshwright.kernels.loss import token_log_probabilities
from meshwright.models.decoder import Decoder
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec, parameters, without_adapter

CHUNK = 1024
"""Tokens whose logits are in memory at the same time."""


class ReferenceModel:
    """A frozen copy of the whole model that `init` names, without adapters, on each rank.

    Raises BadInput if `init` names no model, and whatever reading the model raises.
    """

    def __init__(self, spec: ModelSpec, init: str, device: torch.device, dtype: torch.dtype) -> None:
        spec = without_adapter(spec)
        with torch.device("meta"):
            self._model = Decoder(spec)
        allocate(self._model.to(dtype).requires_grad_(False), device)
        values = dict(self._model.named_parameters())
        with initial_weights(spec, init) as initial, torch.no_grad():
            if initial is None:
                raise BadInput("rl.kl.weight: expected 0, as model.init is scratch", key="rl.kl.weight")
            for parameter in parameters(spec):
                values[parameter.name].copy_(initial.read_rows(parameter, 0, parameter.shape[0]))

    @torch.no_grad()
    def add_to(self, batch: MicroBatch, temperature: float) -> MicroBatch:
        """The micro-batch with a further column `reference`: log-probabilities of its targets, after dividing logits by `temperature`."""
        model = self._model
        device = self._model.embed.weight.device
        tokens = batch.tokens.to(device)
        targets = batch.targets
        assert targets is not None and batch.positions is not None and batch.documents is not None
        hidden = model.hidden(tokens, batch.positions.to(device), batch.documents.to(device))
        weight = model.embed.weight if model.head.weight is None else model.head.weight
        rows = model.head.scaled(hidden).flatten(0, 1) / temperature
        values = token_log_probabilities(rows, weight, targets.to(device).flatten(), CHUNK, cap=model.head.cap)
        return replace(batch, columns={**batch.columns, "reference": values.view(targets.shape).cpu()})
