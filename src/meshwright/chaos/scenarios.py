"""All scenarios, in the order in which `meshwright chaos --list` and `make test-faults` show them."""

from __future__ import annotations

from meshwright.chaos.code_faults import CODE_FAULTS
from meshwright.chaos.health_faults import HEALTH_FAULTS
from meshwright.chaos.host_faults import HOST_FAULTS
from meshwright.chaos.process_faults import PROCESS_FAULTS
from meshwright.chaos.storage_faults import STORAGE_FAULTS

SCENARIOS = (*PROCESS_FAULTS, *STORAGE_FAULTS, *CODE_FAULTS, *HOST_FAULTS, *HEALTH_FAULTS)
