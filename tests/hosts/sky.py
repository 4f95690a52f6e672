"""What SkyPilot's own loader reads from a task file, and what its command line takes: it runs in an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PYTHON = os.environ.get("SKY_PYTHON", "")
"""The interpreter of an environment with SkyPilot; `make test-hosts` makes one."""
TOKEN = "5" * 64
_LOAD = """
import json, os, sys, yaml
import sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
secret = [("MESHWRIGHT_TOKEN", os.environ["MESHWRIGHT_TOKEN"])]  # as `sky jobs launch --secret MESHWRIGHT_TOKEN`
given = sky.Task.from_yaml_config(yaml.safe_load(open(sys.argv[1])), secrets_overrides=secret)
print(json.dumps({
    "name": task.name, "nodes": task.num_nodes, "run": task.run, "volumes": task.volumes,
    "secrets": {name: value.get_secret_value() for name, value in given.secrets.items()},
    "accelerators": resources.accelerators, "cpus": resources.cpus, "image": resources.image_id,
    "recovery": resources.job_recovery,
}))
"""
_PARSE = """
import json, sys
from sky.client.cli import command
group, words = command.cli, sys.argv[1:]
while words and words[0] in getattr(group, "commands", {}):
    group = group.commands[words.pop(0)]
print(json.dumps({"command": group.name, **group.make_context(group.name, words).params}, default=str))
"""


def sky_obstacle() -> str | None:
    """Why SkyPilot cannot be asked; None if it can."""
    return None if PYTHON and shutil.which(PYTHON) else "SKY_PYTHON names no interpreter with skypilot"


def loaded(file: Path, home: Path) -> dict[str, Any]:
    """The task of a file as SkyPilot reads it. Raises AssertionError with its message if it refuses the file."""
    return json.loads(_run(_LOAD, [str(file)], home).splitlines()[-1])


def parsed(arguments: Sequence[str], home: Path) -> dict[str, Any]:
    """The command that `sky` finds in its arguments, and its parameters."""
    return json.loads(_run(_PARSE, arguments, home).splitlines()[-1])


def _run(code: str, arguments: Sequence[str], home: Path) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "MESHWRIGHT_TOKEN": TOKEN}
    env |= {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    answer = subprocess.run(
        [PYTHON, "-c", code, *arguments], env=env, cwd=home, capture_output=True, text=True, timeout=120, check=False
    )
    assert answer.returncode == 0, answer.stderr + answer.stdout
    return answer.stdout
