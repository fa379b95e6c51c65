"""From inputs x and output gradients g to the factors of an expected Hessian: pure tensors, no model.

One token's Hessian of a linear `y = W x` is `(x x^T) (x) (g g^T)`. Its expectation is not a Kronecker product; each factorisation below is one way to stand
in for it. All but `sequence` differ only in how tokens are weighted:

    A = sum_t a_t x_t x_t^T          B = sum_t b_t g_t g_t^T

| name      | a_t         | b_t         | what it is |
|-----------|-------------|-------------|---|
| kfac      | 1           | 1           | x and g taken for independent (Martens and Grosse 2015) |
| shampoo   | |g_t|^2     | |x_t|^2     | one step from the identity (Birnick and Saab 2026, section 4) |
| shampoo:K | g_t^T B g_t | x_t^T A x_t | K such steps, each from the A and B of the one before: power iteration toward the nearest Kronecker product (Frobenius norm) |
| kl        | g_t^T P g_t | x_t^T Q x_t | the same with P, Q the damped inverses of B, A: flip-flop toward the least log-determinant (Bregman) divergence; kl:K, K steps |
| mixed     | |g_t|^2     | 1           | A of shampoo, B of kfac |

`sequence` takes the gradient of one sequence's loss, G_s = sum_t g_t x_t^T, and A = sum_s G_s^T G_s, B = sum_s G_s G_s^T: one step from the identity toward the
nearest Kronecker product of the Hessian of whole sequences, whose tokens need not be independent.

What each is exact for, up to a constant factor, which changes nothing (so sums are not divided by the number of tokens). kfac: independent x and g, as in deep
linear nets under squared error. shampoo, shampoo:K, kl: an expected Hessian that is a Kronecker product; sequence: the same of the Hessian of sequences. All: a
single token (sequence: a single sequence whose gradient has rank one).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LEAF = 256  # columns below which a symmetric product is done whole, and a packed triangle is stored whole
KL_DAMPING = 0.01  # share of each diagonal entry added before a factor is inverted


@dataclass(frozen=True)
class Weighting:
    """How a factorisation weighs tokens.

    Attributes:
        a_by_gradient: A weighs a token by its output gradient.
        b_by_input: B weighs a token by its input.
        steps: Steps from the identity; the first weighs by squared norms, later ones by the factors of the step before.
        inverse: Later steps weigh by the inverse factors.
        by_sequence: Gradients of whole sequences instead of weighted tokens.
    """

    a_by_gradient: bool
    b_by_input: bool
    steps: int = 1
    inverse: bool = False
    by_sequence: bool = False

    @property
    def b_key(self) -> dict[str, object]:
        """What the gradient pass depends on, as values that JSON can hold: runs with equal keys can share one."""
        return {"b_by_input": self.b_by_input, "steps": self.steps, "inverse": self.inverse, "by_sequence": self.by_sequence}


FACTORS: dict[str, Weighting] = {
    "kfac": Weighting(a_by_gradient=False, b_by_input=False),
    "shampoo": Weighting(a_by_gradient=True, b_by_input=True),
    "mixed": Weighting(a_by_gradient=True, b_by_input=False),
    "sequence": Weighting(a_by_gradient=True, b_by_input=True, by_sequence=True),
    "kl": Weighting(a_by_gradient=True, b_by_input=True, steps=3, inverse=True),
}


def weighting(name: str) -> Weighting:
    """The factorisation of a name: one of `FACTORS`, or `shampoo:K` or `kl:K` for K steps.

    Raises:
        ValueError: No such name.
    """
    if name in FACTORS:
        return FACTORS[name]
    if found := re.fullmatch(r"(shampoo|kl):([1-9]\d?)", name):
        return replace(FACTORS[found[1]], steps=int(found[2]))
    raise ValueError(f"{name!r} is no factorisation; known are {', '.join(FACTORS)}, shampoo:K and kl:K")


class Gram:
    """A running sum of `w_t z_t z_t^T` over tokens that computes one triangle.

    Args:
        size: Width of z.
        device: Where the sum is kept.
        dtype: Of products and sum, float32 or float64.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.tokens = 0
        self._sum = torch.zeros(size, size, dtype=dtype, device=device)

    def add(self, Z: Tensor, weight: Tensor | None = None) -> None:
        """Add the tokens of `Z [..., size]`, each weighted by `weight [...]` (>= 0)."""
        Z = Z.detach().reshape(-1, Z.shape[-1]).to(self._sum.dtype)
        if weight is not None:
            Z = Z * weight.reshape(-1, 1).to(Z).sqrt()
        _add_lower(self._sum, Z)
        self.tokens += Z.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the sum."""
        return self._sum.dtype

    @property
    def device(self) -> torch.device:
        """Where the sum is kept."""
        return self._sum.device

    @property
    def finite(self) -> bool:
        """Whether the sum is."""
        return bool(torch.isfinite(self._sum).all())

    def value(self) -> Tensor:
        """The whole symmetric sum, `[size, size]`, on the CPU."""
        lower = self._sum.cpu().tril()
        return lower + lower.tril(-1).T


class Step:
    """One step of a factorisation over a stream of tokens: running sums of a linear's factors.

    Args:
        shape: `(m, n)` of the linear.
        weighting: The factorisation.
        before: The step before, done; None weighs by squared norms.
        with_a: Also accumulate A. The gradient pass needs it of every step but the last: there A comes later, from other inputs with the same weights.
        device: Where sums are kept.
        dtype: Of the sums.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        weighting: Weighting,
        before: Step | None = None,
        *,
        with_a: bool = True,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        m, n = shape
        self.weighting = weighting
        self.tokens = 0
        self.B = Gram(m, device, dtype)
        self.A = Gram(n, device, dtype) if with_a or weighting.by_sequence else None
        self._metrics = None if before is None else before._metric_pair()

    def add(self, x: Tensor, g: Tensor) -> Tensor | None:
        """Add tokens.

        Args:
            x: Inputs `[b, T, n]`.
            g: Output gradients `[b, T, m]`.

        Returns:
            Weights a_t `[b, T]` of the tokens in A; None for `sequence`, whose A is no weighted sum.
        """
        self.tokens += x.shape[0] * x.shape[1]
        dtype = self.B.dtype
        if self.weighting.by_sequence:
            assert self.A is not None
            for gradient in g.to(dtype).mT @ x.to(dtype):  # one sequence after the other: [m, n] is as large as the weight
                self.A.add(gradient)
                self.B.add(gradient.T)
            return None
        of_x, of_g = self._metrics or (None, None)
        a = _quadratic(g.to(dtype), of_g)
        if self.A is not None:
            self.A.add(x, a if self.weighting.a_by_gradient else None)
        self.B.add(g, _quadratic(x.to(dtype), of_x) if self.weighting.b_by_input else None)
        return a

    @property
    def finite(self) -> bool:
        """Whether all sums are."""
        return self.B.finite and (self.A is None or self.A.finite)

    def _metric_pair(self) -> tuple[Tensor, Tensor]:
        """What the next step measures inputs and gradients with, [n, n] and [m, m]."""
        assert self.A is not None
        return _metric(self.A, self.weighting.inverse), _metric(self.B, self.weighting.inverse)


def _quadratic(z: Tensor, metric: Tensor | None) -> Tensor:
    """`z_t^T M z_t` of `[..., k]`, at least 0; M = None is the identity."""
    return z.square().sum(-1) if metric is None else ((z @ metric) * z).sum(-1).clamp_min(0)


def _metric(gram: Gram, inverse: bool) -> Tensor:
    """A factor, normalised to mean diagonal 1 so that steps neither grow nor vanish; or its damped inverse."""
    H = gram.value().to(gram.device)
    mean = H.diagonal().mean()
    H = H / mean if mean > 0 else H
    if not inverse:
        return H
    H = H.double()
    H.diagonal().mul_(1 + KL_DAMPING).add_(1e-6)
    P = torch.cholesky_inverse(torch.linalg.cholesky(H))
    return (P / P.diagonal().mean()).to(gram.dtype)


def _add_lower(total: Tensor, Z: Tensor) -> None:
    """`total += Z^T Z` in the lower triangle (and some of the upper): halves the columns until the products are small."""
    n = Z.shape[1]
    if n <= LEAF:
        total.addmm_(Z.T, Z)
        return
    half = n // 2
    total[half:, :half].addmm_(Z[:, half:].T, Z[:, :half])
    _add_lower(total[:half, :half], Z[:, :half])
    _add_lower(total[half:, half:], Z[:, half:])


def pack(H: Tensor) -> Tensor:
    """A symmetric `[n, n]` as a vector of little more than n(n + 1) / 2 entries: off-diagonal squares once, small diagonal squares whole."""
    n = H.shape[0]
    if n <= LEAF:
        return H.reshape(-1)
    half = n // 2
    return torch.cat([pack(H[:half, :half]), H[half:, :half].reshape(-1), pack(H[half:, half:])])


def unpack(packed: Tensor, n: int) -> Tensor:
    """The symmetric `[n, n]` that `pack` stored."""
    H = torch.empty(n, n, dtype=packed.dtype)
    end = _unpack(packed, 0, H)
    if end != packed.numel():
        raise ValueError(f"{packed.numel()} packed entries are not a symmetric matrix [{n}, {n}], which has {end}")
    return H


def _unpack(packed: Tensor, at: int, H: Tensor) -> int:
    n = H.shape[0]
    if n <= LEAF:
        H.copy_(packed[at : at + n * n].reshape(n, n))
        return at + n * n
    half = n // 2
    at = _unpack(packed, at, H[:half, :half])
    square = packed[at : at + (n - half) * half].reshape(n - half, half)
    H[half:, :half] = square
    H[:half, half:] = square.T
    return _unpack(packed, at + square.numel(), H[half:, half:])
