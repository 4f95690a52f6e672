"""Reads a public trace: a Parquet file of operations, and a YAML file that describes the job.

The format is defined by the artifact of "Understanding Stragglers in Large Model Training Using What-if Analysis"
(OSDI'25).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.diagnosis.operations import OperationTable, operation_table
from meshwright.spec.errors import BadInput, nearest

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc", "mb_id")
"""Columns that the Parquet file must have."""
SIZES = ("dp_size", "pp_size", "tp_size", "dsp_size", "vpp_size", "world_size")
"""Keys of the YAML file that are read."""


@dataclass(frozen=True, slots=True)
class TraceJob:
    """Sizes of the traced job. Of each tensor- and sequence-parallel group, one rank is recorded."""

    dp_size: int = 1
    """Data-parallel ranks."""
    pp_size: int = 1
    """Pipeline ranks."""
    tp_size: int = 1
    """Tensor ranks."""
    dsp_size: int = 1
    """Ranks that divide sequences."""
    vpp_size: int = 1
    """Model chunks on each pipeline rank."""
    world_size: int = 1
    """Number of all ranks."""

    @property
    def ranks_per_worker(self) -> int:
        """Return the number of ranks that one recorded rank represents."""
        return self.tp_size * self.dsp_size


def read_job(path: Path) -> TraceJob:
    """Return the sizes in a YAML file. Raises BadInput with the file and the key."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"cannot read {path}: {error.strerror}; expected the YAML file that describes the job"
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInput(f"{path} is not a YAML file: {error}") from error
    if not isinstance(values, dict):
        raise BadInput(f"{path}: expected keys such as dp_size and pp_size")
    for key in ("dp_size", "pp_size"):
        if key not in values:
            near = nearest(key, [str(name) for name in values])
            raise BadInput(f"{path}: key {key!r} is missing{f'; did you mean {near!r}?' if near else ''}")
    sizes = {key: values[key] for key in SIZES if key in values}
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadInput(f"{path}: {key}: expected a positive integer, got {value!r}")
    job = TraceJob(**sizes)
    product = job.dp_size * job.pp_size * job.tp_size * job.dsp_size
    if "world_size" in sizes and product != job.world_size:
        raise BadInput(f"{path}: world_size is {job.world_size}, but the sizes of its axes multiply to {product}")
    return job


def read_trace(path: Path, job: TraceJob) -> OperationTable:
    """Return the operations of a Parquet file.

    Raises BadInput with file and column if it does not have the format or does not fit the job.
    """
    columns = _columns(path)
    for name in ("dp_rank", "stage", "step", "start_ts", "duration"):
        if not np.isfinite(np.asarray(columns[name], dtype=np.float64)).all():
            raise BadInput(f"{path}: column {name!r} has values that are not finite")
    for name, size, key in (("dp_rank", job.dp_size, "dp_size"), ("stage", job.pp_size, "pp_size")):
        highest = int(columns[name].max()) + 1
        if highest != size:
            raise BadInput(f"{path}: column {name!r} has values up to {highest - 1}, but the job's {key} is {size}")
    return operation_table(
        type_names=columns["optype"],
        rank=columns["rank"],
        dp=columns["dp_rank"],
        stage=columns["stage"],
        step=columns["step"],
        chunk=columns["mc"],
        virtual_stage=columns["gmc"],
        microbatch=columns["mb_id"],
        sequence=columns["seq_id"],
        start_ns=_nanoseconds(columns["start_ts"]),
        duration_ns=_nanoseconds(columns["duration"]),
    )


def _nanoseconds(seconds: np.ndarray) -> np.ndarray:
    """Return nanoseconds as int64."""
    return np.rint(np.asarray(seconds, dtype=np.float64) * 1e9).astype(np.int64)


def _columns(path: Path) -> dict[str, Any]:
    """Return the columns of a Parquet file by name.

    Raises BadInput if the file cannot be read or a column is missing.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise BadInput(f"{path.name}: reading .parquet needs pyarrow: pip install pyarrow") from error
    try:
        table = pyarrow.parquet.read_table(path)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}; expected a Parquet file") from error
    except pyarrow.ArrowException as error:
        raise BadInput(f"{path} is not a Parquet file: {error}") from error
    missing = next((name for name in COLUMNS if name not in table.column_names), None)
    if missing:
        near = nearest(missing, table.column_names)
        raise BadInput(f"{path}: column {missing!r} is missing{f'; did you mean {near!r}?' if near else ''}")
    if not table.num_rows:
        raise BadInput(f"{path}: the trace has no operations")
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        column = table[name]
        if name in ("mc", "gmc", "mb_id"):  # these columns are -1 or empty where they do not apply
            column = column.fill_null(-1)
        elif column.null_count:
            raise BadInput(f"{path}: column {name!r} has {column.null_count} empty values")
        columns[name] = column.to_pylist() if name == "optype" else column.to_numpy()
    return columns
