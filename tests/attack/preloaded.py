"""Imported once by the process from which attacked commands are forked: what every one of them would import and build."""

from meshwright.cli import coordinate, main, plan_words, train
from meshwright.config.schema import pydantic_model
from meshwright.launch import attempts, hosts, job, prepare
from meshwright.observe import closing
from meshwright.planner import search
from meshwright.spec.run import RunSpec
from tests.attack import injected

__all__ = [
    "attempts",
    "closing",
    "coordinate",
    "hosts",
    "injected",
    "job",
    "main",
    "plan_words",
    "prepare",
    "search",
    "train",
]
pydantic_model(RunSpec)
