"""`meshwright schema`: the schemas of run files and of questions for a deployment, for editors and for people."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def schema(
    reference: Annotated[
        bool, typer.Option("--reference", help="Print the reference as Markdown instead (docs/reference/run-file.md).")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Print the HTTP server's reference instead (docs/reference/serve.md).")
    ] = False,
    deployment: Annotated[
        bool, typer.Option("--deployment", help="Print the schema of the file that asks `plan` for a deployment.")
    ] = False,
) -> None:
    """Print the JSON schema of the run file, for completion and checks in an editor.

    Example: `meshwright schema > meshwright.schema.json`, then put this on the first line of run.yaml:

        `# yaml-language-server: $schema=./meshwright.schema.json`
    """
    if serve:
        from meshwright.server.reference import serve_markdown

        print(serve_markdown(), end="")
        return
    if reference:
        from meshwright.config.reference import reference_markdown

        print(reference_markdown(), end="")
        return
    from meshwright.config.schema import json_schema
    from meshwright.spec.deployment import DeploymentSpec
    from meshwright.spec.run import RunSpec

    print(json.dumps(json_schema(DeploymentSpec if deployment else RunSpec), indent=1))
