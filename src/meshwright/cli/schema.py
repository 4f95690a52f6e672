"""`meshwright schema`: prints JSON schemas for editors: of run files, of questions for a deployment, and of sweep files."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def schema(
    deployment: Annotated[
        bool, typer.Option("--deployment", help="Print the schema of the file that asks `plan` for a deployment.")
    ] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Print the schema of the file of `sweep`.")] = False,
) -> None:
    """Print the JSON schema of the run file, for completion and checks in an editor.

    Example:

        meshwright schema > meshwright.schema.json

    The first line of run.yaml names the file:

        `# yaml-language-server: $schema=./meshwright.schema.json`
    """
    from meshwright.config.schema import json_schema
    from meshwright.spec.deployment import DeploymentSpec
    from meshwright.spec.run import RunSpec
    from meshwright.spec.sweep import SweepSpec

    described: type = RunSpec
    if deployment:
        described = DeploymentSpec
    elif sweep:
        described = SweepSpec
    print(json.dumps(json_schema(described), indent=1))
