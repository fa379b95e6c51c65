"""The solver's benchmark: every schedule beside one matrix product, certified before it is timed."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bakron.errors import BakronError, RecipeError
from bakron.grids import UniformGrid
from bakron.kron import Factor, Kron
from bakron.solver import METHODS, certify, solve

SIZES = (256, 512, 1024, 2048, 4096)
SHAPES = ((576, 1536), (1536, 576), (4096, 1024))  # outputs x inputs of real models' linears
ONE_SIDED, TEXTBOOK = "tiled, B = I", "textbook GPTQ, one-sided"
SMALLEST_OF_FIT = 256
Beside = Callable[[Tensor, Kron, UniformGrid], Iterable[tuple[str, list[float], dict[str, Any]]]]


class CertificateError(BakronError):
    """A schedule returned something that is no nearest-plane rounding, so its time means nothing."""


def run(
    sizes: Iterable[int | tuple[int, int]] = (*SIZES, *SHAPES),
    methods: Sequence[str] | None = None,
    *,
    repeats: int = 5,
    limit: float = 60.0,
    report: Callable[[str], None] = print,
    beside: Beside | None = None,
) -> dict[str, Any]:
    """Time every schedule at every size, in float32, on torch's threads.

    Args:
        sizes: Square sizes, or (m, n).
        methods: Names in `bakron.METHODS`; default: all but "auto" and "naive".
        repeats: Runs a median is taken of; one where a run takes more than five seconds.
        limit: Seconds; a schedule that is expected to take longer at a size is left out there.
        report: Called with one line a measurement.
        beside: Called with weight, damped factors and grid at each size; measures others and returns name, seconds of each run, more columns.

    Returns:
        `{"rows": [...], "exponents": {...}}`, a row a measurement: m, n, name, seconds (median), runs, ratio (to `product` at that size),
        violations, loss, and for solves `extra_arrays`: peak memory beyond inputs and outputs in float32 arrays of m x n.

    Raises:
        RecipeError: A method is not in `bakron.METHODS`.
        CertificateError: A result is not certified.
    """
    names = [name for name in METHODS if name not in ("auto", "naive")] if methods is None else list(methods)
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise RecipeError(f"solver method {unknown[0]!r}", f"one of {', '.join(METHODS)}")
    rows: list[dict[str, Any]] = []
    for size in sizes:
        m, n = (size, size) if isinstance(size, int) else size
        _measure(m, n, names, rows, repeats, limit, report, beside)
    return {"rows": rows, "exponents": exponents(rows)}


def _measure(
    m: int,
    n: int,
    names: list[str],
    rows: list[dict[str, Any]],
    repeats: int,
    limit: float,
    report: Callable[[str], None],
    beside: Beside | None,
) -> None:
    """Add the rows of one size."""
    W, kron, grid = problem(m, n)
    products = _timed(_product(m, n), repeats)
    unit = statistics.median(products)

    def add(name: str, runs: list[float], **more: Any) -> None:
        seconds = statistics.median(runs)
        rows.append({"m": m, "n": n, "name": name, "seconds": seconds, "ratio": round(seconds / unit, 3), "runs": runs, **more})
        report(f"{m:5} x {n:5}  {name:31} {seconds:10.4f} s  {seconds / unit:8.2f} products")

    add("product", products)
    add("reverse Cholesky, A and B", _timed(lambda: _stopwatch(_fresh(kron).factor), repeats))
    kron.factor()
    for name in [*names, ONE_SIDED, TEXTBOOK]:
        if _expected(rows, name, m, n) > limit:
            report(f"{m:5} x {n:5}  {name:31} left out: expected to take more than {limit:g} s")
            continue
        if name == TEXTBOOK:
            add(name, _timed(lambda: _stopwatch(lambda: textbook_gptq(W, kron.A.H.float(), grid)), repeats))
            continue
        method, against = ("tiled", Kron(kron.A)) if name == ONE_SIDED else (name, kron)
        found = solve(W, against, grid, method=method)
        proof = certify(found.values, W, against, grid)
        if proof.violations:
            raise CertificateError(f"{name} at {m} x {n}: {proof.violations} entries are not nearest to their targets", "none")
        if found.seconds > 5:
            add(name, [found.seconds], violations=proof.violations, loss=found.loss)
            continue
        extra = _extra_memory(W, against, grid, method)
        arrays = None if extra is None else round(extra / (4 * m * n), 2)
        runs = _sweeps(W, against, grid, method, repeats)
        add(name, runs, violations=proof.violations, loss=found.loss, extra_arrays=arrays)
    for name, runs, more in beside(W, kron, grid) if beside else ():
        add(name, runs, **more)


def problem(m: int, n: int, seed: int = 0) -> tuple[Tensor, Kron, UniformGrid]:
    """A weight, damped factors with the decaying spectra of real ones, and a grid of 7 levels in groups of 64."""
    generator = torch.Generator().manual_seed(seed)

    def covariance(k: int) -> Tensor:
        X = torch.randn(2 * k, k, generator=generator) * torch.arange(1, k + 1) ** -0.5
        mixed = X @ (torch.randn(k, k, generator=generator) / k**0.5)
        return mixed.T @ mixed

    W = torch.randn(m, n, generator=generator)
    kron = Kron(covariance(n), covariance(m)).damp(0.1, 1.0)
    return W, kron, UniformGrid.fit(W, 7, 64 if n % 64 == 0 else None, "absmax")


def textbook_gptq(W: Tensor, A: Tensor, grid: UniformGrid, block: int = 128) -> Tensor:
    """One-sided GPTQ as its paper has it, in plain torch: Cholesky, inverse, Cholesky; columns in lazy blocks (Frantar et al. 2023)."""
    W, codes = W.clone(), torch.empty(W.shape, dtype=torch.int32)
    U = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(A)), upper=True)
    scale = grid.spread(W.shape[1], W.dtype)
    for start in range(0, W.shape[1], block):
        stop = min(start + block, W.shape[1])
        part, errors = W[:, start:stop].clone(), W.new_empty(len(W), stop - start)
        for j in range(stop - start):
            step = scale[:, start + j]
            code = (part[:, j] / step).round_().clamp_(grid.low, grid.high)
            codes[:, start + j] = code
            errors[:, j] = (part[:, j] - code * step) / U[start + j, start + j]
            part[:, j:] -= errors[:, j : j + 1] * U[start + j, start + j : stop]
        W[:, stop:] -= errors @ U[start:stop, stop:]
    return codes


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Slope of log seconds over log size of each name, from square sizes of SMALLEST_OF_FIT and up, where there are two or more."""
    fitted = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        points = [(math.log(r["m"]), math.log(r["seconds"])) for r in rows if r["name"] == name and r["m"] == r["n"] >= SMALLEST_OF_FIT]
        if len(points) > 1:
            x, y = zip(*points)
            fitted[name] = round(statistics.linear_regression(x, y).slope, 2)
    return fitted


def _product(m: int, n: int) -> Callable[[], float]:
    """Half a product with each factor: as many flops as a solve of m x n; one product where m = n."""
    W, A, B = torch.randn(m, n), torch.randn(n, n), torch.randn(m, m)
    out = torch.empty(m, n)

    def once() -> float:
        start = time.perf_counter()
        torch.mm(W, A, out=out)
        if m == n:
            return time.perf_counter() - start
        torch.mm(B, W, out=out)
        return (time.perf_counter() - start) / 2

    return once


def _fresh(kron: Kron) -> Any:
    """A Kron that has computed nothing yet."""
    assert kron.B is not None
    return Kron(Factor(kron.A.H, damping=kron.A.damping), Factor(kron.B.H, damping=kron.B.damping))


def _stopwatch(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _timed(once: Callable[[], float], repeats: int) -> list[float]:
    """Seconds of `repeats` runs, after a first one that does not count."""
    once()
    return [once() for _ in range(repeats)]


def _forget(kron: Kron) -> None:
    for factor in (kron.A, kron.B):
        if factor is not None:
            factor.forget()


def _sweeps(W: Tensor, kron: Kron, grid: UniformGrid, method: str, repeats: int) -> list[float]:
    """Seconds of sweeps that find the factors computed but no kernel's layout of them made."""
    seconds = []
    for _ in range(repeats):
        _forget(kron)
        seconds.append(solve(W, kron, grid, method=method).seconds)
    return seconds


def _extra_memory(W: Tensor, kron: Kron, grid: UniformGrid, method: str) -> float | None:
    """By how many bytes resident memory rises above its start and the result during a solve; None where the system does not tell."""
    statm = Path("/proc/self/statm")
    _forget(kron)
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free already must not hide what is asked for
    except (OSError, AttributeError):
        return None
    peak, done = 0, threading.Event()

    def resident() -> int:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident())
            done.wait(0.002)

    before = resident()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    found = solve(W, kron, grid, method=method)
    done.set()
    watcher.join()
    return max(0.0, peak - before - found.values.nbytes - found.codes.nbytes)


def _expected(rows: list[dict[str, Any]], name: str, m: int, n: int) -> float:
    """Seconds that a schedule should take, from its largest measurement so far; unmeasured: 0."""
    known = [row for row in rows if row["name"] == name]
    if not known:
        return 0.0
    last = max(known, key=lambda row: row["m"] * row["n"] * (row["m"] + row["n"]))
    work = m * n * (m + n) / (last["m"] * last["n"] * (last["m"] + last["n"]))
    return float(last["seconds"] * work ** (4 / 3 if name in ("antidiagonal", "recursive") else 1))
