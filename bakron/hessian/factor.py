"""From inputs x and output gradients g to the factors of an expected Hessian: pure tensors, no model.

One token's Hessian of a linear `y = W x` is `(x x^T) (x) (g g^T)`. Its expectation is not a Kronecker product; each factorisation below is one way to stand
in for it, and differs only in how tokens are weighted:

    A = sum_t a_t x_t x_t^T          B = sum_t b_t g_t g_t^T

| name    | a_t     | b_t     | what it is |
|---------|---------|---------|---|
| kfac    | 1       | 1       | independence of x and g (Martens and Grosse 2015); exact when they are independent, and on one datum |
| shampoo | |g_t|^2 | |x_t|^2 | one step from the identity toward the nearest Kronecker product (Birnick and Saab 2026, section 4); exact on one datum |
| mixed   | |g_t|^2 | 1       | A of shampoo, B of kfac |

A constant factor on A or B changes nothing, so sums are not divided by the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAF = 256  # columns below which a symmetric product is done whole, and a packed triangle is stored whole


@dataclass(frozen=True)
class Weighting:
    """How a factorisation weighs tokens.

    Attributes:
        a_by_gradient: A weighs a token by the squared norm of its output gradient.
        b_by_input: B weighs a token by the squared norm of its input.
    """

    a_by_gradient: bool
    b_by_input: bool


FACTORS: dict[str, Weighting] = {
    "kfac": Weighting(a_by_gradient=False, b_by_input=False),
    "shampoo": Weighting(a_by_gradient=True, b_by_input=True),
    "mixed": Weighting(a_by_gradient=True, b_by_input=False),
}


class Gram:
    """A running sum of `w_t z_t z_t^T` over tokens, float32, that computes one triangle.

    Args:
        size: Width of z.
        device: Where the sum is kept.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self._sum = torch.zeros(size, size, dtype=torch.float32, device=device)

    def add(self, Z: Tensor, weight: Tensor | None = None) -> None:
        """Add the tokens of `Z [..., size]`, each weighted by `weight [...]` (>= 0)."""
        Z = Z.detach().reshape(-1, Z.shape[-1]).float()
        if weight is not None:
            Z = Z * weight.reshape(-1, 1).to(Z).sqrt()
        _add_lower(self._sum, Z)
        self.tokens += Z.shape[0]

    def value(self) -> Tensor:
        """The whole symmetric sum, `[size, size]` float32, on the CPU."""
        lower = self._sum.cpu().tril()
        return lower + lower.tril(-1).T


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
