"""Kronecker-factored Hessians `A (x) B` and their reverse Cholesky factors.

`A [n, n]` belongs to the inputs of a linear layer `W [m, n]`, `B [m, m]` to its outputs, and the loss of an error `E = V - W` is

    L(E) = tr(B E A E^T) = vec(E)^T (A (x) B) vec(E)                (column-major vec)

With `H = L^T L`, L lower triangular (the *reverse* Cholesky factorisation), the loss is `||L_B E L_A^T||_F^2`, and front-to-back rounding
needs only the unit lower `N = diag(L)^-1 L` and the pivots `d = diag(L)^2` of each side: `H = N^T diag(d) N`.
"""

from __future__ import annotations

from torch import Tensor

from bakron.errors import ShapeError
from bakron.factors import Factor, HeadFactor, Rule

__all__ = ["Factor", "HeadFactor", "Kron", "Rule"]


class Kron:
    """The Hessian `A (x) B` of one linear layer `W [m, n]` (Birnick and Saab 2026, section 2).

    Args:
        A: Input factor `[n, n]`, a tensor or a `Factor` (several Krons may share one).
        B: Output factor: `[m, m]`; `[h, m / h, m / h]`, block-diagonal by head; a `Factor`; or None, the identity, which makes everything
            below *be* GPTQ.

    Raises:
        ShapeError: A factor is not square.
        FactorError: A factor is not finite, not symmetric, or has a negative diagonal entry.
    """

    def __init__(self, A: Tensor | Factor, B: Tensor | Factor | None = None) -> None:
        self.A = A if isinstance(A, Factor) else Factor(A)
        self.B = B if isinstance(B, Factor) or B is None else HeadFactor(B) if getattr(B, "ndim", 2) == 3 else Factor(B)

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
        left = E if self.B is None else self.B.times(E)
        return float((left * right).sum())

    def bound(self, step: float, m: int | None = None) -> float:
        """Largest loss of rounding to an unclipped grid of this step: `step^2 / 4 tr(D_A) tr(D_B)` (Birnick and Saab 2026, Cor. 3.4).

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
