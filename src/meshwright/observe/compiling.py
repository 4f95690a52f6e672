"""Reads how much torch's compiler has worked in this process, from its own counters."""

from __future__ import annotations

import sys


def compiler_work() -> dict[str, float]:
    """Return the numbers of graphs `compiled` and loaded from the disk cache (`from_cache`), and the `seconds` spent on
    both.

    A forward pass and its backward pass are two graphs. Empty if nothing was compiled.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return {}
    counters = utils.counters["inductor"]
    compiled = counters["fxgraph_cache_miss"] + counters["fxgraph_cache_bypass"]
    seconds = utils.calculate_time_spent().get("total_wall_time", 0.0)
    return {"compiled": compiled, "from_cache": counters["fxgraph_cache_hit"], "seconds": seconds}
