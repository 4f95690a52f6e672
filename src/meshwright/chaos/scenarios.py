"""All scenarios, in the order in which `meshwright chaos --list` and `make test-faults` show them."""

from __future__ import annotations

from meshwright.chaos.process_faults import PROCESS_FAULTS
from meshwright.chaos.storage_faults import STORAGE_FAULTS

SCENARIOS = (*PROCESS_FAULTS, *STORAGE_FAULTS)
