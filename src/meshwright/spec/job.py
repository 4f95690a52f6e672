"""Settings of a run: data, training, checkpoints, observation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from meshwright.spec.batch_sizes import BatchSizes, BatchStage
from meshwright.spec.fields import Bound, NotNegative, Positive
from meshwright.spec.optimizers import AdamWSpec, DecayGroup, LambSpec, MuonSpec, SgdSpec

EQUAL_LOADS = "uniform"
"""`train.expert_load` that gives all experts equal loads."""
STEPS_OF_EPOCHS = 1
"""`train.steps` of a run with `train.epochs` until a start has counted the steps from its data."""
Packing = Literal["stream", "none"]
Fraction = Annotated[float, Bound(at_least=0, at_most=1)]
MOST_VALIDATION_TOKENS = 1 << 20
"""Tokens that a validation reads at most without `data.validation_tokens`."""


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """Text that is read, tokenised and packed while the run trains."""

    files: str
    """Parquet files, or files of JSON lines (`.jsonl`, also as `.gz`, `.zst`, `.bz2`, `.xz`, `.lz4`): a path, a folder, or a pattern with
    `*`, `?` and `**`; or the URL of an object store, such as `s3://bucket/web/*.parquet`, with `*` and `**`."""
    text: str = "text"
    """Column or key of the text."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The data that the model reads."""

    mix: dict[str, Annotated[float, Bound(more_than=0, at_most=1e15)]] = field(default_factory=lambda: {"stdlib": 1.0})
    """Prepared data directories and their weights in sequences drawn; one directory may stand alone. `stdlib` is Python's own
    standard library, prepared on first use. `{files, text, weight}` in place of a weight is text that is not prepared (`streams`)."""
    streams: dict[str, StreamSpec] = field(default_factory=dict)
    """Sources of `mix` that are read without preparation, by name: `mix: {web: {files: "web/*.parquet", text: content, weight: 0.7}}` is
    `mix: {web: 0.7}` with `streams: {web: {files: "web/*.parquet", text: content}}`."""
    tokenizer: str | None = None
    """Tokenizer of `streams`: a `tokenizer.json` or a folder with one. none: that of the prepared data in `mix`."""
    lanes: Positive | None = None
    """Lanes into which each of `streams` is divided, the same for any number of ranks: a multiple of `train.global_batch`.
    none: the least such multiple of at least 256."""
    cache: str | None = None
    """Local folder of each host for the text of `streams`, tokenised. none: the user's cache."""
    cache_gib: Annotated[float, Bound(more_than=0)] = 50.0
    """Most GiB of files in `cache`; the least recently read are removed."""
    loaders: Positive = 2
    """Processes of each rank that read and tokenise `streams`."""
    validation: str | None = None
    """Prepared data directory for validation, or `{files, text}` as in `mix`: text of files, of which enough is prepared in `cache`.
    none takes `held_out` beside each source that has one."""
    validation_tokens: Positive | None = None
    """Tokens that a validation reads, the same for any batch, layout and number of ranks: as many of each source, spread evenly over its
    held-out documents. none: all, at most 1,048,576."""
    packing: Packing = "stream"
    """stream: documents end to end, cut into sequences of `train.seq_len` tokens; chats are packed whole.
    none: a document is a sample, cut where it is longer than `train.seq_len`; `train.global_batch_tokens` is the batch."""
    document_mask: bool | None = None
    """Tokens attend within their own document only, and positions restart at each document; always with `packing: none`.
    none: on where the data have chats, otherwise off."""
    max_epochs: Annotated[float, Bound(more_than=0)] | None = None
    """Most passes over a source, a fraction too: a run that reads one more often is refused. none: more than 4 are reported."""
    lengths: str | None = None
    """Lengths of samples, as `meshwright data lengths --json` writes them to a file.
    The planner then compares step times of layouts for samples of unequal lengths."""
    damaged: Literal["refuse", "skip"] = "refuse"
    """When a shard does not match its manifest at the start of a run: refuse stops, skip leaves it out and says so."""
    tokenizer_mismatch: Literal["refuse", "accept"] = "refuse"
    """When the weights of `model.init` come with another tokenizer than the corpus: refuse stops, accept warns and continues."""
    changed: Literal["refuse", "accept"] = "refuse"
    """When a run resumes and its corpus differs from its checkpoint's: refuse stops, accept warns and continues."""

    @property
    def streamed(self) -> dict[str, StreamSpec]:
        """The sources of `mix` that are read without preparation."""
        return {name: stream for name, stream in self.streams.items() if name in self.mix}


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Batch, optimizer and training schedule."""

    steps: Positive
    """Optimizer steps in the whole run; left out with `epochs`."""
    epochs: Annotated[float, Bound(more_than=0)] | None = None
    """In place of `steps`: passes over the sequences of all sources together, a fraction too. A start counts the steps from the data
    and rounds up; the run's config.yaml has them."""
    global_batch: Positive
    """Sequences in one step, over all ranks; left out with `global_batch_tokens`."""
    batch_ramp: tuple[BatchStage, ...] = ()
    """Smaller batches of the first steps, in order; `global_batch` follows. The plan is made for `global_batch`."""
    global_batch_tokens: Positive | None = None
    """With `data.packing: none`, in place of `global_batch`.
    A step takes the next samples, as many as have at most so many tokens."""
    seq_len: Positive = 2048
    """Tokens in one sequence; with `data.packing: none`, in the longest sample."""
    learning_rate: Annotated[float, Bound(more_than=0)] = 3e-4
    """Peak of the schedule."""
    min_learning_rate: Fraction = 0.1
    """End of the schedule as a fraction of the peak: 0, or 0.001 to 1. A learning rate such as 3e-5 is refused."""
    warmup_steps: NotNegative = 0
    """Steps of linear growth from 0 to the peak."""
    schedule: Literal["cosine", "linear", "wsd", "inverse_sqrt"] = "cosine"
    """Decay after warm-up; wsd stays at the peak and decays linearly at the end. inverse_sqrt falls with the root of the step."""
    decay_fraction: Fraction = 0.2
    """wsd: the last fraction of all steps that decays."""
    weight_decay: Annotated[float, Bound(at_least=0)] = 0.1
    """Decay of matrices, decoupled from the gradient; norms and biases are not decayed."""
    decay_groups: tuple[DecayGroup, ...] = ()
    """Parameters with another weight decay, by patterns of their names; of several groups the last that matches counts."""
    ema_decay: Annotated[float, Bound(more_than=0, less_than=1)] | None = None
    """Decay of an exponential moving average of the weights, kept in the stored dtype and in checkpoints; none keeps none."""
    optimizer: AdamWSpec | LambSpec | MuonSpec | SgdSpec = field(default_factory=AdamWSpec)
    """The optimizer, by `name`, and its own keys."""
    clip_norm: Annotated[float, Bound(more_than=0)] | None = 1.0
    """Gradients are scaled down to this global norm; none disables clipping."""
    balance_loss: Annotated[float, Bound(at_least=0)] = 0.001
    """Weight of the load-balancing loss, for each layer with experts; 0 disables it. It is the mean over sequences, or with
    `data.packing: none` over samples weighted by their trained tokens, with chats over sequences weighted by their tokens without fillers.
    A dense model has none."""
    balance_bias: Annotated[float, Bound(at_least=0)] = 0.001
    """Step by which each update moves the biases by which routers choose experts, towards equal loads; 0 keeps them."""
    expert_load: str | None = None
    """Loads of experts that the planner expects: `uniform`, or the file of recorded loads or the run that has them, as
    `--replay-routing` reads; none assumes up to 1.2 times the mean for the busiest expert rank."""
    prediction_loss: Annotated[float, Bound(at_least=0)] = 0.3
    """Weight of the mean loss of the modules that predict further tokens (`model.prediction_depth`)."""
    z_loss: Annotated[float, Bound(at_least=0)] = 0.0
    """Weight of the mean squared log-sum-exp of the logits, which keeps them near 0 (PaLM uses 1e-4); 0 disables it."""
    router_z_loss: Annotated[float, Bound(at_least=0)] = 0.0
    """Weight of the mean squared log-sum-exp of router logits, for each layer with experts (ST-MoE uses 1e-3)."""
    loss_chunk: Positive = 4096
    """Tokens whose logits are computed at a time."""
    on_nonfinite: Literal["stop", "skip", "rollback", "rollback_skip"] = "stop"
    """When a loss or gradient norm is not finite: stop (exit code 6), skip the update, go back to the newest checkpoint, or go
    back and leave out the samples of the step."""
    on_spike: Literal["ignore", "stop", "skip", "rollback", "rollback_skip"] = "ignore"
    """When a loss or gradient norm exceeds `spike_factor` times its median over the last 128 good steps; skip looks at the
    gradient norm only, which is known before the update."""
    spike_factor: Annotated[float, Bound(more_than=1)] = 10.0
    """Factor of the median above which a value is a spike."""
    validate_every: NotNegative = 0
    """Steps between validations; 0 validates only at the end."""
    gc_every: NotNegative = 100
    """Steps between Python garbage collections, on all ranks at once; 0 leaves Python's own timing."""
    deterministic: bool = False
    """Equal bits from run to run, and across a kill and resume, on the same kind of GPU with the same layout and versions.
    On GPUs it takes a few percent of the time; fewest with the package nvidia-cudnn-frontend (extra `deterministic`)."""
    keep_cores: bool = False
    """Pin each rank to processor cores of its own, near its GPU on a host with several NUMA nodes.
    On CPUs no spare then imports beside them: a restart imports anew."""
    timeout_seconds: Positive = 300
    """A collective that takes longer ends the run with exit code 5."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over all ranks; of samples of any length, the most."""
        return self.global_batch_tokens or self.global_batch * self.seq_len

    @property
    def tokens(self) -> int:
        """Tokens of all steps; of samples of any length, those that the planner assumes."""
        return self.batches.samples_before(self.steps) * self.seq_len

    @property
    def ramp_steps(self) -> int:
        """Steps before those of `global_batch`."""
        return self.batch_ramp[-1].until if self.batch_ramp else 0

    @property
    def batches(self) -> BatchSizes:
        """The sequences of each step; with `global_batch_tokens` those that the planner assumes."""
        return BatchSizes(self.global_batch, self.batch_ramp)

    @property
    def objective(self) -> bool:
        """Whether the loss is a function of log-probabilities, which the head computes before their gradients (`parallel.objective`)."""
        return False

    @property
    def further_forwards(self) -> int:
        """Forwards of each micro-batch in a step beside the one that is trained."""
        return 0


@dataclass(frozen=True, kw_only=True)
class ObjectiveSpec(TrainSpec):
    """The training of a run with `rl` or `preference`, whose prices need to know of its loss."""

    @property
    def objective(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class ComparedSpec(ObjectiveSpec):
    """The training of a run with the loss `kto`, which first computes how likely other answers are."""

    @property
    def further_forwards(self) -> int:
        return 1


def planned_sequences(tokens: int, seq_len: int, ranks: int) -> int:
    """`global_batch` that the planner assumes for `global_batch_tokens`: full sequences of equal number on each of `ranks`."""
    return -(-tokens // (seq_len * ranks)) * ranks


AUTO_FIRST_SECONDS = 600
AUTO_SECONDS = 1800
AUTO_LEAST_SECONDS = 60
"""`checkpoint.every: auto`: seconds from a start's first step to the first checkpoint, and the most and least between
checkpoints."""


ASYNC_BYTES = 32 << 20
"""`checkpoint.mode: auto` stops training to write smaller states of a rank, which takes less than arranging for more."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Times of checkpoints, and the number that is kept."""

    every: NotNegative | Literal["auto"] = "auto"
    """Steps between checkpoints; 0 writes only the last one.
    auto goes by time: 10 minutes after a start, then by the
    Young-Daly interval of what a checkpoint costs and how often hosts fail, at most 30 minutes."""
    keep: Positive = 3
    """Newest committed checkpoints kept."""
    at_end: bool = True
    """Write a checkpoint after the last step."""
    mode: Literal["auto", "async", "sync"] = "auto"
    """async overlaps the write with training, and refuses a run without host memory for it; sync pauses training.
    auto is async if a rank has at least 32 MB of state and host memory has space for a copy."""
    grace_seconds: Annotated[float, Bound(at_least=0)] = 25.0
    """Seconds that a run waits for its last checkpoint after a stop request; Slurm kills 30 s after its request."""
    mirror: str | None = None
    """Object store that each checkpoint is copied to beside training, as a URL that fsspec knows: s3://bucket/prefix.
    A start resumes from the newest complete checkpoint of folder and mirror. Credentials come from the environment."""
    partner: Literal["none", "host"] = "none"
    """host: another host keeps copies of each host's snapshots in its memory, from which a run resumes after a host is lost.
    Needs agents (`train --agent`); saves then overlap with training whatever the size of the state."""
    partner_every: Positive = 1
    """Saves from one that is copied to the partner host to the next."""


@dataclass(frozen=True, kw_only=True)
class WandbSpec:
    """A run on Weights & Biases."""

    project: str
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team that owns the project; none takes the default of the login."""
    name: str | None = None
    """Name shown there; none takes the name of the run's folder."""
    tags: tuple[str, ...] = ()
    """Tags to filter runs by."""
    notes: str | None = None
    """Description shown beside the run."""
    group: str | None = None
    """Group of runs that belong together; none takes the name of the sweep or, without one, of the run's folder."""
    job_type: str | None = None
    """Kind of the run inside its group, e.g. pretrain or tune."""


@dataclass(frozen=True, kw_only=True)
class ObserveSpec:
    """Measurements and their destinations, besides metrics.jsonl and report.html."""

    phases: bool = True
    """Time each phase of every step; without it a step line has only the duration of the whole step."""
    spans: bool = True
    """Record the spans of every rank in `spans/`."""
    prometheus: str | None = None
    """HOST:PORT at which the process that starts the ranks of a host serves Prometheus metrics; `:PORT` is 127.0.0.1, and
    port 0 any free port."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder (package `tensorboard`)."""
    wandb: WandbSpec | None = None
    """Logging to Weights & Biases (package `wandb`)."""


@dataclass(frozen=True, kw_only=True)
class SupervisionSpec:
    """Restarts after failures. Ranks that torchrun or a similar launcher started are not supervised."""

    restarts: NotNegative = 3
    """Restarts without a new checkpoint between them before the run ends; 0 ends it at the first failure."""
    on_repeated_failure: Literal["stop", "skip_data"] = "stop"
    """After the same failure at the same step twice: stop with exit code 7, or leave out the samples of that step.
    Before it stops, the run tries the older checkpoint once."""
    hang_seconds: Annotated[float, Bound(more_than=0)] | None = None
    """Seconds without progress that count as a hang, if 3 steps and 5 s take less; none takes 30 on GPUs and 5 on `cpu`."""
    spares: NotNegative = 0
    """Hosts beside `cluster.nodes` that wait to replace a host."""
    wait_seconds: Annotated[float, Bound(at_least=0)] | None = None
    """Seconds to wait for a lost host or its replacement before the run continues on the remaining hosts; none waits on."""
    lease: str | None = None
    """Where the coordinator of several hosts keeps its lease: a folder, or the URL of an object store such as
    `s3://bucket/prefix`; none takes the run's folder. All hosts must reach it. A folder needs hard links, an object store
    conditional writes."""
    health: bool | None = None
    """Read the health of the host and its GPUs every 3 s, and go on without a host that is not healthy; none reads it
    where ranks use GPUs. GPUs are read by the package `nvidia-ml-py`."""
    report_command: str | None = None
    """Command that is started on a host which is excluded, once, with a JSON object on its standard input: run, host, cause,
    time. It can ask the site to repair the host."""
    report_label: str | None = None
    """Label that the Kubernetes node of an excluded host gets, as KEY=VALUE. The pod's service account needs the right to
    patch nodes. For example `sagemaker.amazonaws.com/node-health-status=UnschedulablePendingReplacement`."""
    check_state_every: NotNegative = 0
    """Steps between checks of weights and moments for silent corruption, also before each checkpoint; 0 checks never.
    Corrupt state ends in a rollback to the newest checkpoint, and the rank that had it is named."""
