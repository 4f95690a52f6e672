"""The batch script of a run for Slurm's command `sbatch`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from meshwright.launch.scheduler_job import (
    AGENT_STARTS,
    LONGEST_NOTICE,
    REQUEUE_CODES,
    STOP_CODES,
    SchedulerJob,
    comment,
)
from meshwright.spec.errors import EXIT_INTERRUPTED
from meshwright.spec.job_token import TOKEN_VARIABLE
from meshwright.spec.rank_environment import COORDINATOR_VARIABLE

LEAST_NOTICE = 120
"""The run is asked to stop at least this many seconds before the time limit."""


def slurm_script(job: SchedulerJob) -> str:
    """Return the script, which runs one task on each node. Options on `sbatch`'s command line override those in the script."""
    return "\n".join([*_options(job), "", *_environment(job), "", *_agents(job), "", *_ending(job), ""])


def _options(job: SchedulerJob) -> Iterator[str]:
    """Yield the head of the script, with sbatch's options. Slurm sends USR1 before the time limit, so that the run saves."""
    notice = min(LONGEST_NOTICE, max(LEAST_NOTICE, job.stop_seconds))
    yield "#!/bin/bash"
    yield comment(job.summary)
    yield "# Submit in the folder of the run file, which all nodes share: sbatch --time=HH:MM:SS --partition=NAME FILE"
    yield f"#SBATCH --job-name={job.run.name}"  # letters, digits, '.', '_' and '-' (config/key_rules.py)
    yield f"#SBATCH --nodes={job.hosts}"
    yield "#SBATCH --ntasks-per-node=1"
    if job.gpu_vendor is not None:
        yield f"#SBATCH --gpus-per-node={job.run.cluster.gpus_per_node}"
    yield "#SBATCH --exclusive"
    yield "#SBATCH --mem=0"
    yield "#SBATCH --requeue"
    yield "#SBATCH --open-mode=append"
    yield "#SBATCH --output=%x-%j.log"
    yield f"#SBATCH --signal=USR1@{notice}"
    if job.survives_host_loss:
        yield "# The run continues without a lost node."
        yield "#SBATCH --no-kill"


def _environment(job: SchedulerJob) -> Iterator[str]:
    """Yield commands that set the coordinator's address and create the job's token, once for all restarts of the job."""
    yield "set -u"
    yield 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)'
    # Jobs that share a host get different ports.
    yield f'export {COORDINATOR_VARIABLE}="$head:$((20000 + SLURM_JOB_ID % 10000))"'
    yield f'export {TOKEN_VARIABLE}="$PWD/.meshwright-token.$SLURM_JOB_ID"'
    yield 'retries_file="$PWD/.meshwright-retries.$SLURM_JOB_ID"'
    yield f'if [ ! -s "${TOKEN_VARIABLE}" ]; then'
    yield f"  (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > \"${TOKEN_VARIABLE}\")"
    yield "fi"


def _agents(job: SchedulerJob) -> Iterator[str]:
    """Yield commands that start one agent on each node, and start it again if a signal has killed it."""
    command = shlex.join(["meshwright", *job.agent_arguments(job.arguments)])
    agent = (
        "",
        "trap : USR1 TERM",
        f"for start in {' '.join(map(str, range(1, AGENT_STARTS + 1)))}; do",
        f"  {command}",
        "  code=$?",
        f'  [ "$code" -gt 128 ] && [ "$code" -ne {EXIT_INTERRUPTED} ] || break',
        "done",
        'exit "$code"',
        "",
    )
    yield "# Slurm signals every process of a step. This shell survives that, and starts an agent again that a signal killed."
    yield f"agent={shlex.quote(chr(10).join(agent))}"
    no_kill = "--no-kill " if job.survives_host_loss else ""
    yield "code=0"
    yield (
        f"srun --nodes={job.hosts} --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 {no_kill}--cpu-bind=none "
        'bash -c "$agent" || code=$?'
    )


def _ending(job: SchedulerJob) -> Iterator[str]:
    """Yield commands that handle the exit code: requeue the job, count a failure, or end for good."""
    yield "# docs/reference/exit-codes.md"
    yield "requeue=no"
    yield 'case "$code" in'
    yield "  0) ;;"
    yield f'  {_pattern(REQUEUE_CODES)}) rm -f "$retries_file"; requeue=yes ;;'
    yield f'  {_pattern(STOP_CODES)}) echo "exit code $code: another start would not help" >&2 ;;'
    yield "  *)"
    yield '    retries=$(($(cat "$retries_file" 2>/dev/null || echo 0) + 1))'
    yield '    echo "$retries" > "$retries_file"'
    yield f'    if [ "$retries" -le {job.run.supervision.restarts} ]; then requeue=yes; fi ;;'
    yield "esac"
    yield 'if [ "$requeue" = yes ]; then'
    yield '  scontrol requeue "$SLURM_JOB_ID"'
    yield "else"
    yield f'  rm -f "$retries_file" "${TOKEN_VARIABLE}"'
    yield "fi"
    yield 'exit "$code"'


def _pattern(codes: tuple[int, ...]) -> str:
    return "|".join(map(str, codes))
