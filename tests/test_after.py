"""After the sweep: refitted scales and polished codes never raise the loss, and are the best where the best is known."""

from __future__ import annotations

import pytest
import torch
from problems import GRIDS, SCALAR_GRIDS, problem, spd

from bakron.errors import MethodError
from bakron.grids import CodebookGrid, E8Grid, UniformGrid
from bakron.kron import Kron
from bakron.solver import polish, refit, solve


def setting(grid, m=11, n=48, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(m, n, generator=g, dtype=torch.float64).to(dtype)
    return W, Kron(spd(n, g), spd(m, g)), GRIDS[grid](W)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reround", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_refit_never_raises_the_loss(grid, reround, dtype):
    W, kron, fitted = setting(grid, dtype=dtype)
    found = solve(W, kron, fitted)
    better, regridded = refit(found, W, kron, fitted, reround=reround)
    assert better.loss <= found.loss * (1 + 1e-6)
    assert torch.equal(better.values, regridded.values(better.codes, dtype))
    assert better.loss == pytest.approx(kron.loss(better.values.double() - W.double()), rel=1e-4)
    assert regridded.scale.dtype == fitted.scale.dtype and (regridded.scale > 0).all()
    if grid == "mxfp4":
        assert torch.equal(torch.log2(regridded.scale), torch.log2(regridded.scale).round())


def test_refit_is_the_closed_form_for_one_scale_a_row():
    p = problem(9, 20)
    grid = UniformGrid(p.grid.scale.double(), None, p.grid.low, p.grid.high)
    found = solve(p.W, p.kron, grid)
    better, regridded = refit(found, p.W, p.kron, grid)
    C, A, B = found.codes.double(), p.kron.A.H, p.kron.B.H
    best = torch.linalg.solve(B * (C @ A @ C.T), (B @ p.W @ A @ C.T).diagonal())
    torch.testing.assert_close(regridded.scale[:, 0], best, rtol=1e-6, atol=1e-9)
    assert better.loss < found.loss


def test_refit_with_groups_heads_and_without_b_lowers_the_loss():
    g = torch.Generator().manual_seed(0)
    W, A = torch.randn(12, 32, generator=g, dtype=torch.float64), spd(32, g)
    grid = UniformGrid.fit(W, 4, 8, "absmax", symmetric=False)
    for B in (None, spd(12, g), torch.stack([spd(4, g) for _ in range(3)])):
        found = solve(W, Kron(A, B), grid)
        assert refit(found, W, Kron(A, B), grid)[0].loss < 0.95 * found.loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grid", SCALAR_GRIDS)
@pytest.mark.parametrize("b", ["dense", "identity", "heads"])
def test_polish_never_raises_the_loss_and_stays_on_the_grid(grid, b, dtype):
    W, kron, fitted = setting(grid, m=12, dtype=dtype)
    B = {"dense": kron.B, "identity": None, "heads": torch.stack([spd(4, torch.Generator().manual_seed(k)) for k in range(3)])}[b]
    kron = Kron(kron.A, B)
    found = solve(W, kron, fitted)
    better = polish(found, W, kron, fitted, sweeps=2)
    assert better.loss <= found.loss and better.loss == pytest.approx(kron.loss(better.values.double() - W.double()), rel=1e-9)
    assert torch.equal(better.values, fitted.values(better.codes, dtype))
    assert int(better.codes.min()) >= fitted.low and int(better.codes.max()) <= fitted.high


def test_polish_ends_where_no_single_entry_can_improve(monkeypatch):
    from bakron.solver import after

    monkeypatch.setattr(after, "PANEL", 5)
    monkeypatch.setattr(after, "BLOCK", 7)
    p = problem(13, 23)
    found = solve(p.W, p.kron, p.grid)
    better = polish(found, p.W, p.kron, p.grid, sweeps=30)
    assert better.loss < found.loss
    assert polish(better, p.W, p.kron, p.grid) is better
    E, curvature = better.values - p.W, torch.outer(p.kron.B.H.diagonal(), p.kron.A.H.diagonal())
    best = better.values - (p.kron.B.H @ E @ p.kron.A.H) / curvature
    assert torch.equal(p.grid.project(best)[0], better.codes)
    whole = polish(found, p.W, p.kron, p.grid, sweeps=1).loss
    monkeypatch.setattr(after, "PANEL", 64)
    monkeypatch.setattr(after, "BLOCK", 64)
    assert whole == pytest.approx(polish(found, p.W, p.kron, p.grid).loss, rel=0.05)


def test_inputs_of_polish_and_refit_are_never_modified():
    W, kron, fitted = setting("uniform")
    found = solve(W, kron, fitted)
    held = [W, kron.A.H, kron.B.H, fitted.scale, found.values, found.codes]
    before = [x.clone() for x in held]
    polish(found, W, kron, fitted)
    refit(found, W, kron, fitted)
    assert all(torch.equal(x, y) for x, y in zip(held, before))


def test_dead_rows_and_columns_are_left_alone():
    W, kron, fitted = setting("uniform")
    A = kron.A.H.clone()
    A[3] = A[:, 3] = 0
    dead = Kron(A, kron.B)
    found = solve(W, dead, fitted)
    assert torch.equal(polish(found, W, dead, fitted).codes[:, 3], found.codes[:, 3])
    assert torch.isfinite(refit(found, W, dead, fitted)[1].scale).all()


def test_polish_of_a_vector_grid_is_refused():
    W, kron, fitted = setting("e8")
    assert isinstance(fitted, E8Grid)
    with pytest.raises(MethodError, match="E8Grid.*scalar grid"):
        polish(solve(W, kron, fitted), W, kron, fitted)


def test_scale_formats_survive_a_refit():
    W, kron, _ = setting("uniform")
    grid = CodebookGrid.fit(W, "e2m1", 16, scale_format="e4m3")
    _, regridded = refit(solve(W, kron, grid), W, kron, grid)
    small = regridded.scale / (regridded.scale.max() / 448)
    torch.testing.assert_close(small.to(torch.float8_e4m3fn).float(), small, rtol=1e-5, atol=0)
