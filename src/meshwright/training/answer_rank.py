"""Process of a locally launched rank that computes one answer, such as a profile or an evaluation, instead of training.

`python -m meshwright.training.answer_rank MODULE JOB ANSWER` imports MODULE and calls its `main`.
"""

from __future__ import annotations

import sys
from importlib import import_module

from meshwright.training.rank import uncollected


def main() -> None:
    name = sys.argv.pop(1)
    with uncollected():
        module = import_module(name)
    module.main()


if __name__ == "__main__":
    main()
