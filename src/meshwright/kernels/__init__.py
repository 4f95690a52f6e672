"""How fast one operation runs: each fast path beside its plain twin. Floor 1: imports `spec` only."""
