"""Every fault by its name. One file each."""

from __future__ import annotations

import importlib
import pkgutil

from chaos.faults.base import Fault


def all_faults() -> dict[str, type[Fault]]:
    """Found in this folder, so that a new file is enough."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return {fault.name: fault for fault in _subclasses(Fault) if "name" in vars(fault)}


def _subclasses(base: type[Fault]) -> list[type[Fault]]:
    direct = base.__subclasses__()
    return direct + [deeper for fault in direct for deeper in _subclasses(fault)]
