"""Collects all families and presets, from the files in this folder."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import meshwright.families
from meshwright.families.format import Family, Preset

_SHARED = ("adapters", "format", "missing", "registry", "folder", "quantization", "text_part")
"""Files of this folder that do not define a family."""
_files = (module.name for module in iter_modules(meshwright.families.__path__) if not module.ispkg)
_names = sorted(name for name in _files if name not in _SHARED)
_modules = [import_module(f"{meshwright.families.__name__}.{name}") for name in _names]

FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _modules}
"""Every family by its `model_type`, which is also its name in run files."""
PRESETS: dict[str, Preset] = {
    name: preset for module in _modules for name, preset in getattr(module, "PRESETS", {}).items()
}
"""Every preset by its name."""
RELEASES: dict[str, tuple[str, ...]] = {
    module.FAMILY.model_type: getattr(module, "RELEASES", ()) for module in _modules
}
"""Names of some released models of every family, without the publisher. The docs list families with these names."""
MODEL_PRESETS: dict[str, dict[str, Any]] = {
    name: {
        "family": module.FAMILY.model_type,
        **module.FAMILY.values,
        **module.FAMILY.by_width(preset.model["hidden"]),
        **preset.model,
    }
    for module in _modules
    for name, preset in getattr(module, "PRESETS", {}).items()
}
"""The dimensions of every preset as plain ModelSpec fields, by its name (`model: NAME`)."""
