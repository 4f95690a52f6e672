"""`meshwright schema`: the schemas of run files and of questions for a deployment, for editors and for people."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def schema(
    reference: Annotated[
        bool, typer.Option("--reference", help="Print the reference as Markdown instead (docs/reference/run-file.md).")
    ] = False,
    commands: Annotated[
        bool, typer.Option("--commands", help="Print the reference of commands instead (docs/reference/cli.md).")
    ] = False,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster", help="Print the reference of cluster files instead (docs/reference/cluster-file.md)."
        ),
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Print the HTTP server's reference instead (docs/reference/serve.md).")
    ] = False,
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
    if serve:
        from meshwright.server.reference import serve_markdown

        print(serve_markdown(), end="")
    elif reference:
        from meshwright.config.reference import reference_markdown

        print(reference_markdown(), end="")
    elif commands:
        from meshwright.cli.reference import commands_markdown

        print(commands_markdown(), end="")
    elif cluster:
        from meshwright.config.cluster_reference import cluster_markdown

        print(cluster_markdown(), end="")
    else:
        from meshwright.config.schema import json_schema
        from meshwright.spec.deployment import DeploymentSpec
        from meshwright.spec.run import RunSpec
        from meshwright.spec.sweep import SweepSpec

        described = DeploymentSpec if deployment else SweepSpec if sweep else RunSpec
        print(json.dumps(json_schema(described), indent=1))
