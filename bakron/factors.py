"""One side of a Kronecker-factored Hessian: symmetric positive semi-definite matrices and their reverse Cholesky factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from bakron.errors import FactorError, ShapeError

Rule = Literal["diagonal", "mean"]
T = TypeVar("T")
BLOCK = 256  # rows a step of the factorisation
SYMMETRY_TOLERANCE = 1e-4  # of the largest entry; sums in float32 over many tokens stay well below


class Factor:
    """One side of a Kronecker-factored Hessian: a symmetric positive semi-definite matrix and, once asked for, its reverse Cholesky factor.

    A Factor is immutable, so several `Kron`s may share one (q, k and v see the same inputs): it is factored once, and damped once an
    amount.

    Args:
        H: Symmetric positive semi-definite, `[k, k]`, any floating dtype. Never modified. Only read, so do not modify it afterwards.
        damping: What has been added already, as recorded by `damp`.

    Attributes:
        damping: `(amount, rule)` pairs added so far.
        dead: Indices with a zero diagonal, `[d]` long: such a row has no curvature at all and is rounded to nearest.

    Raises:
        ShapeError: H is not square.
        FactorError: H is not finite, not symmetric, or has a negative diagonal entry.
    """

    def __init__(self, H: Tensor, *, damping: tuple[tuple[float, str], ...] = ()) -> None:
        if not isinstance(H, Tensor):
            raise ShapeError(f"a Hessian factor that is a {type(H).__name__}", "a torch tensor [k, k]", "Use torch.as_tensor")
        if H.ndim != 2 or H.shape[0] != H.shape[1] or H.shape[0] == 0:
            raise ShapeError(f"a Hessian factor of shape {list(H.shape)}", "a square matrix [k, k]")
        if not H.is_floating_point():
            raise FactorError(f"a Hessian factor of dtype {H.dtype}", "a floating point dtype")
        self.H, self.damping = H.detach(), damping
        if not damping:  # what `damp` makes of a checked factor needs no second check
            _check(self.H)
        self.dead = (self.H.diagonal() == 0).nonzero().flatten()
        self._unit: Tensor | None = None
        self._pivots: Tensor | None = None
        self._memo: dict[Hashable, Any] = {}
        self._damped: dict[tuple[float, str], Factor] = {}

    @property
    def size(self) -> int:
        """Number of rows, k."""
        return self.H.shape[0]

    def damp(self, amount: float, rule: Rule = "diagonal") -> Factor:
        """Normalise to mean diagonal 1, then add `amount * diag(H)` (rule "diagonal") or `amount * I` (rule "mean").

        The diagonal rule shrinks correlations, `H_ij / (1 + amount)` relative to the diagonal, and does not let a few outlier channels set
        the level for all the others.

        Args:
            amount: Non-negative; a share of each diagonal entry, or of the mean diagonal.
            rule: "diagonal" or "mean".

        Returns:
            A new Factor in float64, remembered: the same amount and rule give the same object.

        Raises:
            FactorError: The amount is negative or not finite, the rule is unknown.
        """
        if not (math.isfinite(amount) and amount >= 0):
            raise FactorError(f"damping {amount}", "a finite number >= 0")
        if rule not in ("diagonal", "mean"):
            raise FactorError(f"damping rule {rule!r}", "'diagonal' or 'mean'")
        key = (float(amount), rule)
        if key not in self._damped:
            mean = float(self.H.diagonal().double().mean())
            H = self.H.to(torch.float64, copy=True)
            H /= mean if mean > 0 else 1.0
            diagonal = H.diagonal()
            diagonal += amount * (diagonal.clone() if rule == "diagonal" else 1.0)
            self._damped[key] = Factor(H, damping=(*self.damping, key))
        return self._damped[key]

    @property
    def heads(self) -> tuple[Factor, ...]:
        """The blocks of a block-diagonal factor; the factor itself where there is one block."""
        return (self,)

    def times(self, E: Tensor) -> Tensor:
        """`H E` in float64, for E `[k, ...]`."""
        return self.H.double() @ E.double()

    @property
    def factored(self) -> bool:
        """Whether the reverse Cholesky factor exists already."""
        return self._unit is not None

    @property
    def unit(self) -> Tensor:
        """Unit lower triangular N of `H = N^T diag(d) N`, `[k, k]` float64."""
        self._factorise()
        assert self._unit is not None
        return self._unit

    @property
    def pivots(self) -> Tensor:
        """Pivots d of `H = N^T diag(d) N`, `[k]` float64; 0 where the index is dead."""
        self._factorise()
        assert self._pivots is not None
        return self._pivots

    def unit_as(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The unit factor in another dtype and on another device, contiguous and remembered."""
        if self.unit.dtype == dtype and self.unit.device == device:
            return self.unit
        return self.memo(("unit", dtype, device), lambda: self.unit.to(dtype=dtype, device=device))

    def block_unit(self, unit: int) -> tuple[Tensor, Tensor]:
        """Block factors for grids whose units are `unit` long: `H = N^T D N`, N with identity blocks on its diagonal, D block-diagonal.

        Returns:
            N `[k, k]` and the blocks of D `[k / unit, unit, unit]`, float64, remembered; for `unit=1` the unit factor and its pivots.

        Raises:
            ShapeError: `unit` does not divide the size.
        """
        if unit == 1:
            return self.unit, self.pivots[:, None, None]
        if self.size % unit:
            raise ShapeError(f"a factor of size {self.size}", f"a multiple of the grid's unit {unit}")
        return self.memo(("blocks", unit), lambda: self._blocks(unit))

    def _blocks(self, unit: int) -> tuple[Tensor, Tensor]:
        alive = self.pivots.sqrt()
        pivots = torch.where(alive > 0, alive, torch.ones_like(alive))  # a dead index decouples, whatever its pivot
        L = self.unit * pivots[:, None]
        corners = torch.stack([L[i : i + unit, i : i + unit] for i in range(0, self.size, unit)])
        N = torch.linalg.solve_triangular(corners, L.view(-1, unit, self.size), upper=False).reshape(L.shape)
        live = (alive > 0).to(L.dtype).view(-1, unit)
        return N, corners.mT @ corners * live[:, :, None] * live[:, None, :]

    def permuted(self, order: Tensor) -> Factor:
        """The factor of the same matrix with its rows and columns in another order, remembered."""
        key = ("order", order.cpu().numpy().tobytes())
        return self.memo(key, lambda: Factor(self.H[order][:, order], damping=self.damping))

    def memo(self, key: Hashable, make: Callable[[], T]) -> T:
        """Something derived from this factor, such as a kernel's layout of it: made on the first call with this key, then remembered."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def forget(self) -> None:
        """Drop what `memo` remembers; factors and pivots stay. Frees a kernel's layouts once a weight is solved."""
        self._memo.clear()

    @property
    def rho(self) -> float:
        """`tr(D) / tr(H)` in (0, 1]: how much of the trace is left in the pivots. 1 = diagonal, nothing for feedback to gain."""
        trace = self.H.double().diagonal(dim1=-2, dim2=-1).sum()
        return float(self.pivots.sum() / trace.clamp_min(torch.finfo(torch.float64).tiny))

    def top_share(self, share: float) -> float:
        """Share of the trace in the largest `share` of the eigenvalues (rounded up to a whole number of them; one symmetric eigenvalue problem)."""
        values = torch.linalg.eigvalsh(self.H).clamp_min(0).double().flatten().sort().values
        return float(values[-math.ceil(share * self.size) :].sum() / values.sum().clamp_min(torch.finfo(torch.float64).tiny))

    def smallest_damping(self) -> float:
        """The smallest `amount` for rule "mean" that makes H safely positive definite (one symmetric eigenvalue problem)."""
        H = self.H.double()
        mean = float(H.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny))
        low, high = torch.linalg.eigvalsh(H)[[0, -1]].tolist()
        return max(0.0, -low / mean) + 1e-10 * max(1.0, high / mean)

    def _factorise(self) -> None:
        if self._unit is not None:
            return
        L, index = _reverse_cholesky(self.H, self.dead)
        if index is not None:
            needed = self.smallest_damping()
            raise FactorError(
                f"a Hessian factor [{self.size}, {self.size}] that is not positive definite: elimination stops at index {index}",
                "a positive definite matrix",
                f"Damp it by at least {needed:.2g} of its mean diagonal, or use more tokens than rows to estimate it",
                index=index,
                damping=needed,
            )
        diagonal = L.diagonal().clone()
        L /= diagonal[:, None]
        self._unit, self._pivots = L, diagonal.square()
        self._pivots[self.dead] = 0.0


class HeadFactor(Factor):
    """A block-diagonal output factor, one block a head: h problems that do not see each other.

    Args:
        H: `[h, k, k]`, each block as `Factor` wants it; the factor of the h k rows, head after head.
        damping: What has been added already.

    Raises:
        ShapeError: H is not `[h, k, k]`.
        FactorError: A block is not finite, not symmetric, or has a negative diagonal entry.
    """

    def __init__(self, H: Tensor, *, damping: tuple[tuple[float, str], ...] = ()) -> None:
        if H.ndim != 3 or H.shape[1] != H.shape[2] or H.numel() == 0:
            raise ShapeError(f"a block-diagonal factor of shape {list(H.shape)}", "one square matrix a head, [h, k, k]")
        self.H, self.damping = H.detach(), damping
        self._heads = tuple(Factor(head, damping=damping) for head in self.H)
        self.dead = torch.cat([head.dead + number * H.shape[1] for number, head in enumerate(self._heads)])
        self._unit, self._pivots, self._memo, self._damped = None, None, {}, {}

    @property
    def size(self) -> int:
        """Number of rows, h k."""
        return self.H.shape[0] * self.H.shape[1]

    @property
    def heads(self) -> tuple[Factor, ...]:
        """The blocks."""
        return self._heads

    def times(self, E: Tensor) -> Tensor:
        """`H E` in float64, for E `[h k, ...]`."""
        return (self.H.double() @ E.double().view(*self.H.shape[:2], -1)).view(E.shape)

    def permuted(self, order: Tensor) -> Factor:
        """The factor with each head's rows in another order; `order` keeps heads together."""
        number = torch.arange(len(self._heads), device=self.H.device)[:, None, None]
        within = order.view(self.H.shape[:2]) - number[..., 0] * self.H.shape[1]
        return HeadFactor(self.H[number, within[:, :, None], within[:, None, :]], damping=self.damping)

    def smallest_damping(self) -> float:
        """The smallest `amount` for rule "mean" that makes every head safely positive definite."""
        return max(head.smallest_damping() for head in self._heads)

    def damp(self, amount: float, rule: Rule = "diagonal") -> Factor:
        """As `Factor.damp`: normalised by the mean diagonal of all heads, so that they keep their weights; "mean" is each head's own."""
        key = (float(amount), rule)
        if key not in self._damped:
            mean = float(self.H.diagonal(dim1=1, dim2=2).double().mean())
            own = [float(head.H.diagonal().double().mean()) / (mean if mean > 0 else 1.0) for head in self._heads]
            blocks = [head.damp(amount, rule).H * share for head, share in zip(self._heads, own)]
            self._damped[key] = HeadFactor(torch.stack(blocks), damping=(*self.damping, key))
        return self._damped[key]

    def _factorise(self) -> None:
        if self._unit is not None:
            return
        for number, head in enumerate(self._heads):
            try:
                head._factorise()
            except FactorError as error:
                where = None if error.index is None else error.index + number * head.size
                raise FactorError(f"head {number}: {error.saw}", error.expected, error.do, index=where, damping=error.damping) from error
        self._unit = torch.block_diag(*[head.unit for head in self._heads])  # type: ignore[no-untyped-call]
        self._pivots = torch.cat([head.pivots for head in self._heads])


def _check(H: Tensor) -> None:
    finite = torch.isfinite(H)
    if not bool(finite.all()):
        i, j = (~finite).nonzero()[0].tolist()
        raise FactorError(
            f"a Hessian factor with {float(H[i, j])} at [{i}, {j}]",
            "finite entries",
            "Damping cannot cure this: look for overflow in the activations or gradients it was made from",
            index=i,
        )
    diagonal = H.diagonal()
    if bool((diagonal < 0).any()):
        i = int((diagonal < 0).nonzero()[0])
        raise FactorError(f"a Hessian factor with {float(diagonal[i]):.3g} on its diagonal at index {i}", "a diagonal >= 0", index=i)
    gap, i, j = _asymmetry(H)
    if gap > SYMMETRY_TOLERANCE * max(float(H.max()), -float(H.min())):
        raise FactorError(
            f"a Hessian factor that is not symmetric: {float(H[i, j]):.6g} at [{i}, {j}] but {float(H[j, i]):.6g} at [{j}, {i}]",
            "a symmetric matrix",
            "Pass (H + H.T) / 2 if the difference is rounding",
            index=i,
        )
    for i in (diagonal == 0).nonzero().flatten().tolist():
        if bool(H[i].any()):
            raise FactorError(
                f"a Hessian factor with zero diagonal but non-zero row at index {i}", "a positive semi-definite matrix", index=i
            )


def _asymmetry(H: Tensor) -> tuple[float, int, int]:
    """Largest `|H_ij - H_ji|` and where; block by block, since reading a large matrix along its columns is slow."""
    worst = (0.0, 0, 0)
    for i in range(0, H.shape[0], BLOCK):
        for j in range(0, i + 1, BLOCK):
            gap = (H[i : i + BLOCK, j : j + BLOCK] - H[j : j + BLOCK, i : i + BLOCK].T).abs()
            if float(gap.max()) > worst[0]:
                row, column = divmod(int(gap.argmax()), gap.shape[1])
                worst = (float(gap.max()), i + row, j + column)
    return worst


def _reverse_cholesky(H: Tensor, dead: Tensor) -> tuple[Tensor, int | None]:
    """`H = L^T L`, L lower triangular, in float64: block rows from the last to the first, each from the finished ones by one product.

    Without the flips and copies that turn a library's Cholesky round, and near the speed of a product.

    Args:
        H: Symmetric up to rounding, `[k, k]`; the mean of both triangles counts.
        dead: Indices whose row and column are zeros; their pivot is taken as 1.

    Returns:
        L, and the index at which elimination met a pivot that is not positive beyond rounding, if any.
    """
    k = H.shape[0]
    L = torch.from_numpy(np.zeros((k, k))).to(H.device)  # numpy asks for huge pages
    noise = k * torch.finfo(torch.float64).eps * H.diagonal().double()  # a pivot this small is rounding, of either sign
    noise[dead] = 0.0
    for stop in range(k, 0, -BLOCK):
        start = max(stop - BLOCK, 0)
        S = (H[start:stop, :stop].double() + H[:stop, start:stop].double().T) / 2
        S[:, start:].diagonal()[dead[(dead >= start) & (dead < stop)] - start] = 1.0
        if stop < k:
            S.addmm_(L[stop:, start:stop].T, L[stop:, :stop], alpha=-1)
        flipped, failed = torch.linalg.cholesky_ex(S[:, start:].flip(0, 1))
        corner = flipped.flip(0, 1).T
        lost = ~(corner.diagonal().square() > noise[start:stop])
        if int(failed) or bool(lost.any()):
            return L, stop - int(failed) if int(failed) else start + int(lost.nonzero()[-1])
        L[start:stop, start:stop] = corner
        if start:
            L[start:stop, :start] = torch.linalg.solve_triangular(corner.T, S[:, :start], upper=True)
    return L, None
