"""Codex and Claude Code, unchanged, complete a task with two calls on a scripted model: `make test-agents`.

    python -m tests.agents.check FOLDER      # FOLDER: where npm has installed tests/agents/package.json

Each runs with an empty environment, in a folder of its own. The model writes a file by its first call and reads it by the second. Prints a
line for each agent: requests, and the share of the tokens of a turn and its answer with which the prompt of the next one begins.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.server.helpers import NAME
from tests.server.test_agents import Script, scripted

TASK = "Write 42 into answer.txt, and read it."
COMMANDS = ("echo 42 > answer.txt", "cat answer.txt")
REPLY = "The file says 42."
LEAST_SHARED = 0.97
SECONDS = 240
CONFIG = """\
model = "{name}"
model_provider = "meshwright"

[model_providers.meshwright]
name = "meshwright"
base_url = "{url}/v1"
env_key = "MESHWRIGHT_API_KEY"
wire_api = "responses"
"""


class Agent(NamedTuple):
    """How an agent is started, and the tool by which it runs a command."""

    tool: str
    key: str
    command: Sequence[str]
    environment: Mapping[str, str]


def agents(programs: Path, url: str, home: Path) -> dict[str, Agent]:
    """The agents, by name; `home` is the folder of their settings."""
    (home / "config.toml").write_text(CONFIG.format(name=NAME, url=url))
    modules = programs / "node_modules"
    codex = ["node", str(modules / "@openai/codex/bin/codex.js"), "exec", "--skip-git-repo-check"]
    claude = [str(modules / "@anthropic-ai/claude-code-linux-x64/claude"), "-p", TASK, "--allowedTools", "Bash"]
    return {
        "codex": Agent(
            "exec_command",
            "cmd",
            [*codex, "--sandbox", "danger-full-access", TASK],
            {"CODEX_HOME": str(home), "MESHWRIGHT_API_KEY": "any"},
        ),
        "claude": Agent(
            "Bash",
            "command",
            claude,
            {
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_AUTH_TOKEN": "any",
                "ANTHROPIC_MODEL": NAME,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            },
        ),
    }


def run_agent(programs: Path, name: str, folder: Path) -> str | None:
    """What is wrong with the run of an agent in an empty folder; None if it completed the task."""
    answers: list[str] = []

    def answer(prompt: str) -> str:
        turn = prompt.count("<tool_response>")
        if turn < len(COMMANDS):
            call = {"name": agent.tool, "arguments": {agent.key: COMMANDS[turn]}}
            answers.append(f"<think>\nStep {turn}.\n</think>\n\nNow:\n<tool_call>\n{json.dumps(call)}\n</tool_call>")
        else:
            answers.append(REPLY)
        return answers[-1]

    script = Script(answer)
    home, work = folder / "home", folder / "work"
    for path in (home, work, folder / "model"):
        path.mkdir(parents=True)
    with scripted(folder / "model", script, max_body_bytes=8 << 20) as url:
        agent = agents(programs, url, home)[name]
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), **agent.environment}
        result = subprocess.run(
            agent.command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    if result.returncode or REPLY not in result.stdout:
        return f"code {result.returncode}: {result.stdout[-1000:]} {result.stderr[-1000:]}"
    if (work / "answer.txt").read_text() != "42\n":
        return "the file of the first call is not there"
    turns = [[*tokens, *script.tokenizer.encode(text).ids] for tokens, text in zip(script.tokens, answers, strict=True)]
    shared = [_shared(before, after) / len(before) for before, after in zip(turns, script.tokens[1:], strict=False)]
    print(
        f"{name}: {len(turns)} requests of {[*map(len, script.tokens)]} tokens, shared {[round(x, 4) for x in shared]}"
    )
    return None if min(shared) >= LEAST_SHARED else f"a turn shares {min(shared):.1%} only"


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def main() -> None:
    """Run both agents."""
    programs, failed = Path(sys.argv[1]).absolute(), []
    for name in ("codex", "claude"):
        with tempfile.TemporaryDirectory() as folder:
            if (found := run_agent(programs, name, Path(folder))) is not None:
                failed.append(f"{name}: {found}")
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
