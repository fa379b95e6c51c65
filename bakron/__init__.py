"""Quantize language models against a two-sided (Kronecker-factored) Hessian, exactly, at the cost of GPTQ.

Importing this package imports nothing heavy: each public name is loaded from its room when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bakron.api import prepare, quantize
    from bakron.config import Recipe
    from bakron.errors import BakronError
    from bakron.export import FORMATS
    from bakron.grids import CodebookGrid, E8Grid, UniformGrid
    from bakron.hessian import ESTIMATORS, FACTORS
    from bakron.kron import Factor, Kron
    from bakron.measure import evaluate
    from bakron.modules import collect, quantize_linear_
    from bakron.recheck import certify_run
    from bakron.reexport import export_run
    from bakron.shards import solve_shard
    from bakron.solver import METHODS, Certificate, Solution, certify, polish, refit, solve

__version__ = "0.1.0"

__all__ = [
    "ESTIMATORS",
    "FACTORS",
    "FORMATS",
    "METHODS",
    "BakronError",
    "Certificate",
    "CodebookGrid",
    "E8Grid",
    "Factor",
    "Kron",
    "Recipe",
    "Solution",
    "UniformGrid",
    "certify",
    "certify_run",
    "collect",
    "evaluate",
    "export_run",
    "polish",
    "prepare",
    "quantize",
    "quantize_linear_",
    "refit",
    "solve",
    "solve_shard",
]

_ROOMS = {
    "bakron.api": ["prepare", "quantize"],
    "bakron.config": ["Recipe"],
    "bakron.errors": ["BakronError"],
    "bakron.export": ["FORMATS"],
    "bakron.grids": ["CodebookGrid", "E8Grid", "UniformGrid"],
    "bakron.hessian": ["ESTIMATORS", "FACTORS"],
    "bakron.kron": ["Factor", "Kron"],
    "bakron.measure": ["evaluate"],
    "bakron.modules": ["collect", "quantize_linear_"],
    "bakron.recheck": ["certify_run"],
    "bakron.reexport": ["export_run"],
    "bakron.shards": ["solve_shard"],
    "bakron.solver": ["METHODS", "Certificate", "Solution", "certify", "polish", "refit", "solve"],
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'bakron' has no attribute {name!r}")
    value = getattr(import_module(_ROOM_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
