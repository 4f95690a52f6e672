"""The benchmark of drafts by prediction modules on a tiny model: how many it keeps."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
from serve_mtp import engine_for, keep_drafts
from serve_speculation import measured

from tests.models.tiny import LLAMA
from tests.serve.helpers import tiny

OPTIONS = argparse.Namespace(prompt=6, new=9, requests=[2], temperature=0.0)


@pytest.mark.parametrize(("share", "steps"), [(0.0, 9), (1.0, 5)])
def test_a_step_keeps_the_asked_share_of_drafts(share: float, steps: int) -> None:
    """Nine tokens: one of the prompt's step, then one or two in each step."""
    engine = engine_for(tiny(replace(LLAMA, prediction_depth=1)), 1, OPTIONS)
    keep_drafts(engine._drafter, share)
    result = measured(engine, 2, OPTIONS)
    assert result["steps"] == steps and result["accepted"] == share * result["proposed"]
