"""Grids: one rounding definition, scale fits that do what they say, stored scales, degenerate groups."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from problems import problem

from bakron.errors import RecipeError, ShapeError
from bakron.grids import TABLES, CodebookGrid, E8Grid, UniformGrid, check_group, code_range
from bakron.grids.codebook import lloyd_max
from bakron.grids.scales import fit_scale, snapper
from bakron.kron import Kron


def weight(m=8, n=64, seed=0):
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed))


def error(grid, W, weights=1.0):
    return float((weights * (grid.project(W)[1] - W).square()).sum())


def plain(step=1.0, low=-3, high=3, zero=None, rows=1):
    zeros = None if zero is None else torch.full((rows, 1), zero, dtype=torch.int32)
    return UniformGrid(torch.full((rows, 1), step), zeros, low, high)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_half_to_even_and_clips_at_the_edges(dtype):
    T = torch.tensor([[-9.0, -3.5, -3.0, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.0, 3.5, 9.0]], dtype=dtype)
    codes, values = plain().project(T)
    assert codes.tolist() == [[-3, -3, -3, -2, -2, 0, 0, 2, 2, 3, 3, 3]] and codes.dtype == torch.int32
    assert torch.equal(values, codes.to(dtype))
    codes, values = plain(low=0, high=7, zero=4).project(T)
    assert codes.tolist() == [[0, 0, 1, 2, 2, 4, 4, 6, 6, 7, 7, 7]]
    assert torch.equal(values, codes.to(dtype) - 4)


def test_project_takes_blocks_and_equals_values_of_codes():
    p = problem(6, 20, group_size=5, symmetric=False)
    codes, values = p.grid.project(p.W)
    block, block_values = p.grid.project(p.W[2:4, 3:12], slice(2, 4), slice(3, 12), 20)
    assert torch.equal(block, codes[2:4, 3:12]) and torch.equal(block_values, values[2:4, 3:12])
    assert torch.equal(p.grid.values(codes, torch.float64), values)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 32])
def test_search_never_loses_to_absmax_and_absmax_covers(bits, symmetric, group_size):
    W = weight()
    absmax = UniformGrid.fit(W, bits=bits, group_size=group_size, scale="absmax", symmetric=symmetric)
    mse = UniformGrid.fit(W, bits=bits, group_size=group_size, scale="mse", symmetric=symmetric)
    assert absmax.levels == mse.levels == 2**bits and absmax.symmetric is symmetric
    for row in range(len(W)):
        per = [float((g.project(W)[1] - W)[row].square().sum()) for g in (mse, absmax)]
        assert per[0] <= per[1] * (1 + 1e-6)
    worst = (absmax.project(W)[1] - W).abs() / absmax.expand(64)[0]
    assert float(worst.max()) <= (0.5 if symmetric else 1.0) * (1 + 1e-5)  # asymmetric: the integer zero costs up to half a step at one end
    assert mse.scale.shape == (8, 1 if group_size is None else 2)


@pytest.mark.parametrize("levels", [2, 3, 4, 7, 8, 15, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_curvature_lowers_the_pivot_weighted_error(levels, symmetric):
    p = problem(16, 48, group_size=12)
    W, weights = p.W.float(), p.kron.A.pivots.float()
    mse, curvature = (UniformGrid.fit(W, levels, 12, rule, symmetric, p.kron) for rule in ("mse", "curvature"))
    assert error(curvature, W, weights) < error(mse, W, weights)
    assert error(mse, W) <= error(curvature, W) * (1 + 1e-6)


@pytest.mark.parametrize("codes", [(-3, 3), (-4, 3), (-8, 7)])
@pytest.mark.parametrize(("rows", "groups", "size"), [(6, 3, 16), (4, 1, 40), (9, 2, 7)])
def test_the_compiled_search_finds_what_the_plain_one_finds(codes, rows, groups, size):
    W = weight(rows, groups * size).reshape(rows, groups, size)
    W[0], W[1] = 0, W[1] * 1e-30
    weights = torch.rand(1, groups, size, generator=torch.Generator().manual_seed(1)) + 0.01
    widest = W.abs().amax(-1, keepdim=True) / -codes[0]
    snap = snapper("float", torch.bfloat16, widest)

    def cost(scale):
        scale = scale[..., None]
        unit = widest + (widest == 0)
        return (weights * (((W / scale).round().clamp(*codes) * scale - W) / unit).square()).sum(-1)

    rounding = lambda x: x.round_().clamp_(*codes)  # noqa: E731
    plain, compiled = (fit_scale(W, weights, widest, rounding, snap, True, which) for which in (None, codes))
    assert torch.allclose(cost(compiled), cost(plain), rtol=1e-4)
    assert (cost(compiled)[1:] < cost(snap(widest)[..., 0])[1:]).any()


def test_curvature_needs_the_kron_and_survives_groups_of_dead_inputs():
    W = weight(4, 8)
    with pytest.raises(RecipeError, match="without kron"):
        UniformGrid.fit(W, 7, scale="curvature")
    with pytest.raises(ShapeError):
        UniformGrid.fit(W, 7, scale="curvature", kron=Kron(torch.eye(6)))
    A = torch.eye(8)
    A[:4] = 0
    grid = UniformGrid.fit(W, 7, 4, "curvature", kron=Kron(A))
    assert torch.allclose(grid.scale[:, 0], UniformGrid.fit(W, 7, 4, "mse").scale[:, 0])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale", ["absmax", "mse", "curvature"])
@pytest.mark.parametrize("group_size", [None, 32])
def test_zero_groups_and_constant_rows(bits, symmetric, scale, group_size):
    W = weight()
    W[2], W[3], W[4, :32], W[5] = 0, 0.37, 0, -0.37
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grid = UniformGrid.fit(W, None, group_size, scale, symmetric, Kron(torch.eye(64)), bits=bits)
        codes, values = grid.project(W)
    assert torch.isfinite(grid.scale).all() and (grid.scale > 0).all() and torch.isfinite(values).all()
    assert not values[2].any() and not values[4, :32].any()
    torch.testing.assert_close(values[5], W[5], rtol=1e-6, atol=0)
    if not symmetric or scale != "absmax":
        torch.testing.assert_close(values[3], W[3], rtol=1e-6, atol=0)
    assert int(codes.min()) >= grid.low and int(codes.max()) <= grid.high


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_are_held_in_the_dtype_that_is_stored(dtype, symmetric):
    W = weight()
    W[0] *= 1e4
    W[1] *= 1e-3
    W = W.to(dtype)
    grid = UniformGrid.fit(W, 15, 16, symmetric=symmetric)
    assert grid.scale.dtype == dtype and torch.isfinite(grid.scale).all() and (grid.scale > 0).all()
    codes, values = grid.project(W.float())
    zero = 0 if grid.zero is None else grid.zero.repeat_interleave(16, 1)
    assert torch.equal((codes - zero) * grid.scale.float().repeat_interleave(16, 1), values)
    assert UniformGrid.fit(W.double(), 15).scale.dtype == torch.float32
    assert UniformGrid.fit(W, 15, dtype=torch.float16).scale.dtype == torch.float16


def test_scales_stay_in_the_range_of_their_dtype():
    W = torch.stack([torch.linspace(-1e6, 1e6, 16), torch.linspace(-1e-7, 1e-7, 16)])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        grid = UniformGrid.fit(W, 7, dtype=dtype)
        assert torch.isfinite(grid.scale).all() and (grid.scale > 0).all()
        assert torch.isfinite(grid.project(W)[1]).all()


def test_code_ranges():
    assert code_range(7, None, True) == (-3, 3)
    assert code_range(8, None, True) == code_range(None, 3, True) == (-4, 3)
    assert code_range(None, 4, False) == (0, 15)
    for levels, bits, words in [
        (None, None, "neither"),
        (7, 3, "one of the two"),
        (1, None, "2 to 256"),
        (257, None, "2 to 256"),
        (None, 9, "2 to 256"),
    ]:
        with pytest.raises(RecipeError, match=words):
            code_range(levels, bits, True)


def test_what_cannot_be_fitted_is_refused_in_words():
    W = weight(3, 48)
    with pytest.raises(RecipeError, match=r"group size 32 does not divide the 48 inputs.*\[16\]"):
        UniformGrid.fit(W, 7, 32)
    with pytest.raises(RecipeError, match="group_size=None"):
        check_group(7, 3)
    with pytest.raises(RecipeError, match="of q_proj"):
        check_group(48, 0, "q_proj")
    with pytest.raises(RecipeError, match="absmax, mse, curvature"):
        UniformGrid.fit(W, 7, scale="best")
    with pytest.raises(ShapeError, match="int64"):
        UniformGrid.fit(W.long(), 7)
    W[1, 5] = float("nan")
    with pytest.raises(ShapeError, match=r"nan at \[1, 5\]"):
        UniformGrid.fit(W, 7)


def test_a_grid_knows_the_weight_it_was_fitted_for():
    grid = UniformGrid.fit(weight(3, 48), 7, 16)
    grid.check(weight(3, 48))
    for shape in [(4, 48), (3, 32)]:
        with pytest.raises(ShapeError, match=r"\[3, 48\]"):
            grid.check(weight(*shape))
    with pytest.raises(ShapeError, match=r"\[3, n\]"):
        UniformGrid.fit(weight(3, 48), 7).check(weight(2, 48))


def test_codebook_ties_go_to_the_even_level_from_zero():
    grid = CodebookGrid(torch.ones(1, 1), None, 0, 14, None, None, TABLES["e2m1"]())
    T = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -9.0]])
    for dtype in (torch.float32, torch.float64):
        _, values = grid.project(T.to(dtype))
        assert values[0].tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 0, -1, -1, -2, -2, -4, -4, -6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("table", TABLES)
def test_thresholds_split_the_line_exactly(table, dtype):
    levels = TABLES[table]()
    grid = CodebookGrid(torch.ones(1, 1), None, 0, len(levels) - 1, None, None, levels)
    middle = ((levels[1:] + levels[:-1]) / 2).to(dtype)
    far = torch.full_like(middle, torch.inf)
    x = torch.cat([middle, torch.nextafter(middle, far), torch.nextafter(middle, -far), levels.to(dtype)])
    distance = (x.double()[:, None] - levels).abs()
    codes = grid.levels_of(x).long()
    torch.testing.assert_close(distance.gather(1, codes[:, None])[:, 0], distance.min(1).values, rtol=0, atol=1e-15 * float(levels[-1]))
    assert torch.equal(codes[-len(levels) :], torch.arange(len(levels)))


# Mean squared error on a standard normal weight: published, or from algorithms.md section 6; tolerance for the sample.
ERRORS = {"lloyd-max-4": 0.1177, "lloyd-max-7": 0.0440, "lloyd-max-8": 0.0345, "lloyd-max-16": 0.0095}


@pytest.mark.parametrize("table", ERRORS)
def test_lloyd_max_tables_have_the_published_error(table):
    W = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    grid = CodebookGrid(torch.ones(64, 1), None, 0, len(TABLES[table]()) - 1, None, None, TABLES[table]())
    assert error(grid, W) / W.numel() == pytest.approx(ERRORS[table], rel=0.03)


def test_nf4_is_the_published_table():
    published = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
                 0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]  # fmt: skip
    torch.testing.assert_close(TABLES["nf4"](), torch.tensor(published, dtype=torch.float64), rtol=0, atol=2e-7)


@pytest.mark.parametrize(("form", "group"), [("e8m0", 32), ("e4m3", 16)])
def test_scales_lie_in_their_format_and_beat_the_format_s_own_rule(form, group):
    W = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    grid = CodebookGrid.fit(W, "e2m1", group, scale_format=form)
    largest = W.view(32, -1, group).abs().amax(-1)
    if form == "e8m0":
        assert torch.equal(torch.log2(grid.scale), torch.log2(grid.scale).round())
        plain = torch.exp2(torch.floor(torch.log2(largest)) - 2)  # the rule of the OCP specification
    else:
        tensor_scale = largest.max() / 6 / 448
        small = grid.scale / tensor_scale
        torch.testing.assert_close(small.to(torch.float8_e4m3fn).float(), small, rtol=1e-6, atol=0)
        plain = (largest / 6 / tensor_scale).to(torch.float8_e4m3fn).float() * tensor_scale
    assert error(grid, W) <= error(replace(grid, scale=plain), W)
    assert grid.scale.dtype == torch.float32


@pytest.mark.parametrize("group_size", [None, 12])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric", "codebook"])
def test_quadratic_scales_lower_the_row_s_quadratic(kind, group_size):
    p = problem(16, 48)
    W = p.W.float()

    def fit(rule):
        if kind == "codebook":
            return CodebookGrid.fit(W, "nf4", group_size, rule, p.kron)
        return UniformGrid.fit(W, 7, group_size, rule, kind == "symmetric", p.kron)

    def quadratic(grid):
        E = (grid.project(W)[1] - W).double()
        return (E @ p.kron.A.H * E).sum(1)

    assert (quadratic(fit("quadratic")) <= quadratic(fit("diagonal")) * (1 + 1e-5)).all()
    assert quadratic(fit("quadratic")).sum() < 0.97 * quadratic(fit("diagonal")).sum()
    weights = p.kron.A.H.diagonal().float()
    assert error(fit("diagonal"), W, weights) <= error(fit("absmax"), W, weights)
    assert error(fit("diagonal"), W, weights) <= 1.03 * error(fit("mse"), W, weights)  # refinement ends in a local minimum of each


def test_codebooks_that_cannot_be_meant_are_refused():
    W = weight(3, 48)
    with pytest.raises(RecipeError, match=r"'nf5'.*nf4, e2m1"):
        CodebookGrid.fit(W, "nf5")
    with pytest.raises(RecipeError, match="strictly increasing"):
        CodebookGrid.fit(W, torch.tensor([1.0, 0.0, 2.0]))
    with pytest.raises(RecipeError, match="both signs"):
        CodebookGrid.fit(W, torch.tensor([1.0, 2.0]))
    with pytest.raises(RecipeError, match="float, e8m0, e4m3"):
        CodebookGrid.fit(W, "e2m1", 16, scale_format="e5m2")
    with pytest.raises(RecipeError, match="2 to 256"):
        lloyd_max(1)
    with pytest.raises(ShapeError, match="multiple of 8"):
        E8Grid.fit(weight(3, 20))
    with pytest.raises(RecipeError, match="rms or mse"):
        E8Grid.fit(W, "absmax")


def test_e8_is_a_lattice_codebook_of_two_bits_a_weight():
    from bakron.grids.e8 import _decode, _encode, absolutes

    assert absolutes().shape == (256, 8)
    codes = torch.arange(2**16, dtype=torch.int32)
    points = _decode(codes, torch.float64)
    assert len(torch.unique(points, dim=0)) == 2**16 and torch.equal(_encode(points[::37]), codes[::37])
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close((_decode(_encode(x), torch.float64) - x).norm(dim=1), torch.cdist(x, points).amin(1))
    W = weight(16, 256)
    grid = E8Grid.fit(W)
    assert float((grid.project(W)[1] - W).square().mean()) == pytest.approx(0.0915, rel=0.06)
    codes, values = grid.project(W)
    assert torch.equal(grid.values(codes), values) and grid.spread(256).shape == W.shape


def test_reordered_grids_keep_every_weight_s_scale():
    W = weight(6, 24)
    rows, columns = (
        torch.randperm(6, generator=torch.Generator().manual_seed(0)),
        torch.randperm(24, generator=torch.Generator().manual_seed(1)),
    )
    for grid in (UniformGrid.fit(W, 7, 8, symmetric=False), CodebookGrid.fit(W, "nf4", 8)):
        codes, values = grid.project(W)
        moved = grid.reorder(rows, columns)
        found, moved_values = moved.project(W[rows][:, columns])
        assert torch.equal(found, codes[rows][:, columns]) and torch.equal(moved_values, values[rows][:, columns])
        assert torch.equal(moved.values(found), moved_values)


@pytest.mark.parametrize("table", ["iq4_nl", "lloyd-max-8"])
def test_zero_groups_of_tables_without_a_zero_come_out_as_near_zero_as_can_be_stored(table):
    W = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    W[1] = 0
    _, values = CodebookGrid.fit(W, table).project(W)
    assert float(values[1].abs().max()) < 1e-30


def test_float16_scales_may_be_subnormal():
    W = (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 3e-5).half()
    _, values = UniformGrid.fit(W, 15, 16).project(W.float())
    assert float((values - W.float()).norm() / W.float().norm()) < 0.15
