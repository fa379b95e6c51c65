"""Kronecker-factored Hessians `A (x) B` and their reverse Cholesky factors.

`A [n, n]` belongs to the inputs of a linear layer `W [m, n]`, `B [m, m]` to its outputs, and the loss of an error `E = V - W` is

    L(E) = tr(B E A E^T) = vec(E)^T (A (x) B) vec(E)                (column-major vec)

With `H = L^T L`, L lower triangular (the *reverse* Cholesky factorisation), the loss is `||L_B E L_A^T||_F^2`, and front-to-back rounding needs
only the unit lower `N = diag(L)^-1 L` and the pivots `d = diag(L)^2` of each side: `H = N^T diag(d) N`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from bakron.errors import FactorError, ShapeError

Rule = Literal["diagonal", "mean"]
SYMMETRY_TOLERANCE = 1e-4  # of the largest entry; sums in float32 over many tokens stay well below


class Factor:
    """One side of a Kronecker-factored Hessian: a symmetric positive semi-definite matrix and, once asked for, its reverse Cholesky factor.

    A Factor is immutable, so several `Kron`s may share one (q, k and v see the same inputs): it is factored once, and damped once an amount.

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
        if H.ndim != 2 or H.shape[0] != H.shape[1] or H.shape[0] == 0:
            raise ShapeError(f"a Hessian factor of shape {list(H.shape)}", "a square matrix [k, k]")
        if not H.is_floating_point():
            raise FactorError(f"a Hessian factor of dtype {H.dtype}", "a floating point dtype")
        self.H, self.damping = H.detach(), damping
        self._check()
        self.dead = (self.H.diagonal() == 0).nonzero().flatten()
        self._unit: Tensor | None = None
        self._pivots: Tensor | None = None
        self._cast: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._damped: dict[tuple[float, str], Factor] = {}

    @property
    def size(self) -> int:
        """Number of rows, k."""
        return self.H.shape[0]

    def damp(self, amount: float, rule: Rule = "diagonal") -> Factor:
        """Normalise to mean diagonal 1, then add `amount * diag(H)` (rule "diagonal") or `amount * I` (rule "mean").

        The diagonal rule shrinks correlations, `H_ij / (1 + amount)` relative to the diagonal, and does not let a few outlier channels set the level
        for all the others.

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
            H = self.H.double()
            mean = H.diagonal().mean()
            H = H / mean if mean > 0 else H.clone()
            diagonal = H.diagonal()
            diagonal += amount * (diagonal.clone() if rule == "diagonal" else 1.0)
            self._damped[key] = Factor(H, damping=(*self.damping, key))
        return self._damped[key]

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
        key = (dtype, device)
        if key not in self._cast:
            self._cast[key] = self.unit.to(dtype=dtype, device=device).contiguous()
        return self._cast[key]

    @property
    def rho(self) -> float:
        """`tr(D) / tr(H)` in (0, 1]: how much of the trace is left in the pivots. 1 = diagonal, nothing for feedback to gain."""
        return float(self.pivots.sum() / self.H.double().diagonal().sum().clamp_min(torch.finfo(torch.float64).tiny))

    def top_share(self, share: float) -> float:
        """Share of the trace in the largest `share` of the eigenvalues (rounded up to a whole number of them; one symmetric eigenvalue problem)."""
        values = torch.linalg.eigvalsh(self.H).clamp_min(0).double()
        return float(values[-math.ceil(share * self.size) :].sum() / values.sum().clamp_min(torch.finfo(torch.float64).tiny))

    def smallest_damping(self) -> float:
        """The smallest `amount` for rule "mean" that makes H safely positive definite (one symmetric eigenvalue problem)."""
        H = self.H.double()
        mean = float(H.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny))
        low, high = torch.linalg.eigvalsh(H)[[0, -1]].tolist()
        return max(0.0, -low / mean) + 1e-10 * max(1.0, high / mean)

    def _check(self) -> None:
        H = self.H
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
        gap = (H - H.T).abs()
        if float(gap.max()) > SYMMETRY_TOLERANCE * float(H.abs().max()):
            i, j = divmod(int(gap.argmax()), H.shape[0])
            raise FactorError(
                f"a Hessian factor that is not symmetric: {float(H[i, j]):.6g} at [{i}, {j}] but {float(H[j, i]):.6g} at [{j}, {i}]",
                "a symmetric matrix",
                "Pass (H + H.T) / 2 if the difference is rounding",
                index=i,
            )
        if bool((diagonal == 0).any()):
            i = int((diagonal == 0).nonzero()[0])
            if bool((H[(diagonal == 0)] != 0).any()):
                raise FactorError(
                    f"a Hessian factor with zero diagonal but non-zero row at index {i}", "a positive semi-definite matrix", index=i
                )

    def _factorise(self) -> None:
        if self._unit is not None:
            return
        H = self.H.double()
        H = (H + H.T) / 2
        H.diagonal()[self.dead] = 1.0  # a dead row is all zeros: it decouples, and its pivot is set to 0 below
        flipped, failed = torch.linalg.cholesky_ex(H.flip(0, 1))
        L = flipped.flip(0, 1).T.contiguous()
        diagonal = L.diagonal().clone()
        if int(failed) or not bool((diagonal > 0).all()) or not bool(torch.isfinite(diagonal).all()):
            index = H.shape[0] - int(failed) if int(failed) else int((~(diagonal > 0)).nonzero()[0])
            needed = self.smallest_damping()
            raise FactorError(
                f"a Hessian factor [{H.shape[0]}, {H.shape[0]}] that is not positive definite: elimination stops at index {index}",
                "a positive definite matrix",
                f"Damp it by at least {needed:.2g} of its mean diagonal, or use more tokens than rows to estimate it",
                index=index,
                damping=needed,
            )
        self._unit = L / diagonal[:, None]
        self._pivots = diagonal.square()
        self._pivots[self.dead] = 0.0


class Kron:
    """The Hessian `A (x) B` of one linear layer `W [m, n]` (Birnick and Saab 2026, section 2).

    Args:
        A: Input factor `[n, n]`, a tensor or a `Factor` (several Krons may share one).
        B: Output factor `[m, m]`, a tensor or a `Factor`; None is the identity, which makes everything below *be* GPTQ.

    Raises:
        ShapeError: A factor is not square.
        FactorError: A factor is not finite, not symmetric, or has a negative diagonal entry.
    """

    def __init__(self, A: Tensor | Factor, B: Tensor | Factor | None = None) -> None:
        self.A = A if isinstance(A, Factor) else Factor(A)
        self.B = B if isinstance(B, Factor) or B is None else Factor(B)

    def __repr__(self) -> str:
        """One line: sizes and damping."""
        b = "I" if self.B is None else f"[{self.B.size}, {self.B.size}] damped {self.B.damping}"
        return f"Kron(A=[{self.A.size}, {self.A.size}] damped {self.A.damping}, B={b})"

    @property
    def damping(self) -> dict[str, tuple[tuple[float, str], ...]]:
        """What has been added to each factor, as `(amount, rule)` pairs."""
        return {"a": self.A.damping, "b": () if self.B is None else self.B.damping}

    def damp(self, a: float = 0.1, b: float = 1.0, rule: Rule = "diagonal") -> Kron:
        """A new Kron whose factors are normalised to mean diagonal 1 and then damped.

        Args:
            a: Amount for A.
            b: Amount for B; without effect when B is the identity.
            rule: "diagonal": H + amount * diag(H). "mean": H + amount * I.

        Returns:
            A new Kron; this one is unchanged, and Krons that share A still share the damped A.

        Raises:
            FactorError: An amount is negative or not finite, the rule is unknown.
        """
        return Kron(self.A.damp(a, rule), None if self.B is None else self.B.damp(b, rule))

    def factor(self) -> None:
        """Compute both reverse Cholesky factors now, so that a later solve times the sweep alone.

        Raises:
            FactorError: A factor is not positive definite.
        """
        _ = self.A.unit
        if self.B is not None:
            _ = self.B.unit

    def check(self, W: Tensor) -> None:
        """Refuse a weight that does not belong to this Hessian.

        Raises:
            ShapeError: `W` is not `[m, n]` with n the size of A and m the size of B.
        """
        m = None if self.B is None else self.B.size
        if W.ndim != 2 or W.shape[1] != self.A.size or (m is not None and W.shape[0] != m):
            raise ShapeError(f"a weight of shape {list(W.shape)}", f"[{'m' if m is None else m}, {self.A.size}] for this Kron")

    def loss(self, E: Tensor) -> float:
        """`tr(B E A E^T)`, in float64, straight from the definition.

        Args:
            E: Error `V - W`, `[m, n]`.

        Raises:
            ShapeError: E has another shape.
        """
        self.check(E)
        E = E.detach().double()
        right = E @ self.A.H.double()
        left = E if self.B is None else self.B.H.double() @ E
        return float((left * right).sum())

    def bound(self, step: float, m: int | None = None) -> float:
        """Largest loss that rounding to an unclipped grid of this step can have: `step^2 / 4 tr(D_A) tr(D_B)` (Birnick and Saab 2026, Cor. 3.4).

        Args:
            step: Distance of neighbouring grid points, the same everywhere.
            m: Number of output rows; needed only when B is the identity.

        Raises:
            ShapeError: B is the identity and m is missing.
        """
        if self.B is None and m is None:
            raise ShapeError("B is the identity of unknown size", "the number of rows m")
        trace_b = float(m) if self.B is None else float(self.B.pivots.sum())  # type: ignore[arg-type]
        return step * step / 4 * float(self.A.pivots.sum()) * trace_b
