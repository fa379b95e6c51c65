"""The benchmark certifies before it times, and says what grew how fast."""

from __future__ import annotations

import pytest
import torch

from bakron import bench
from bakron.errors import RecipeError
from bakron.grids import UniformGrid
from bakron.kron import Kron
from bakron.solver import METHODS, Swept, solve


def test_a_small_run_measures_every_schedule():
    lines = []
    found = bench.run([(48, 64), 64], repeats=1, report=lines.append)
    names = {row["name"] for row in found["rows"]}
    assert names == {"product", "reverse Cholesky, A and B", *METHODS, bench.ONE_SIDED, bench.TEXTBOOK} - {"auto", "naive"}
    assert len(lines) == len(found["rows"]) == 2 * len(names)
    assert all(row["violations"] == 0 for row in found["rows"] if "violations" in row)
    assert all(row["seconds"] > 0 and row["ratio"] > 0 for row in found["rows"])


def test_what_takes_too_long_is_left_out_and_said():
    lines = []
    found = bench.run([32, 48], ["antidiagonal"], repeats=1, limit=1e-9, report=lines.append)
    assert [row["m"] for row in found["rows"] if row["name"] == "antidiagonal"] == [32]
    assert any("left out" in line for line in lines)


def test_what_others_measure_stands_beside():
    def other(W, kron, grid):
        return [("another library", [3.0, 1.0, 2.0], {"version": "1.2", "shape": (*W.shape, len(kron.A.H), grid.levels)})]

    found = bench.run([(16, 32)], ["tiled"], repeats=1, report=lambda line: None, beside=other)
    product, row = found["rows"][0], found["rows"][-1]
    assert row["name"] == "another library" and row["version"] == "1.2" and row["shape"] == (16, 32, 32, 7)
    assert row["seconds"] == 2.0 and row["ratio"] == pytest.approx(2.0 / product["seconds"], rel=1e-3)


def test_a_wrong_schedule_is_not_timed(monkeypatch):
    def wrong(W, kron, grid):
        codes = solve(W, kron, grid).codes.clone()
        codes[0, 0] += 1 if codes[0, 0] < 0 else -1
        return Swept(codes, 0.0)

    monkeypatch.setitem(METHODS, "wrong", wrong)
    with pytest.raises(bench.CertificateError, match="wrong at 32 x 32"):
        bench.run([32], ["wrong"], repeats=1, report=lambda line: None)
    with pytest.raises(RecipeError, match="'fastest'"):
        bench.run([32], ["fastest"])


def test_exponents_are_slopes():
    rows = [{"m": n, "n": n, "name": "cubic", "seconds": 1e-9 * n**3} for n in (128, 256, 512, 1024)]
    assert bench.exponents(rows) == {"cubic": 3.0}


def test_the_textbook_row_is_gptq():
    W, kron, grid = bench.problem(16, 128)
    codes = bench.textbook_gptq(W.double(), kron.A.H, grid)
    assert torch.equal(codes, solve(W.double(), Kron(kron.A), grid, method="naive").codes)
    assert isinstance(grid, UniformGrid)
