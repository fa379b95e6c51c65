"""From inputs x and output gradients g to the factors of an expected Hessian: pure tensors, no model.

One token's Hessian of a linear `y = W x` is `(x x^T) (x) (g g^T)`. Its expectation is not a Kronecker product; each factorisation below is one way to stand
in for it. All but `sequence` differ only in how tokens are weighted:

    A = sum_t a_t x_t x_t^T          B = sum_t b_t g_t g_t^T

| name      | a_t         | b_t         | what it is |
|-----------|-------------|-------------|---|
| kfac      | 1           | 1           | x and g taken for independent (Martens and Grosse 2015) |
| shampoo   | |g_t|^2     | |x_t|^2     | one step from the identity (Birnick and Saab 2026, section 4) |
| shampoo:K | g_t^T B g_t | x_t^T A x_t | K such steps, each from the A and B of the one before: power iteration toward the nearest Kronecker product |
| kl        | g_t^T P g_t | x_t^T Q x_t | the same with P, Q the damped inverses of B, A: flip-flop toward the least log-determinant divergence; kl:K |
| mixed     | |g_t|^2     | 1           | A of shampoo, B of kfac |

`sequence` takes the gradient of one sequence's loss, G_s = sum_t g_t x_t^T, and A = sum_s G_s^T G_s, B = sum_s G_s G_s^T: one step from the identity toward the
nearest Kronecker product of the Hessian of whole sequences, whose tokens need not be independent.

What each is exact for, up to a constant factor, which changes nothing (so sums are not divided by the number of tokens). kfac: independent x and g, as in deep
linear nets under squared error. shampoo, shampoo:K, kl: an expected Hessian that is a Kronecker product; sequence: the same of the Hessian of sequences. All: a
single token (sequence: a single sequence whose gradient has rank one).
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bakron import ranks

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

    Attributes:
        sizes: What tokens added to the trace, batch by batch; for who adds them to keep here.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.tokens = 0
        self.sizes: list[Tensor] = []
        self._sum = torch.zeros(size, size, dtype=dtype, device=device)
        self._weights = torch.zeros(2, dtype=torch.float64, device=device)  # sums of w and w^2

    def add(self, Z: Tensor, weight: Tensor | None = None) -> Tensor:
        """Add the tokens of `Z [..., size]`, each weighted by `weight [...]` (>= 0); returns what each added to the trace, `[...]`.

        Zeros, as of tokens that do not reach an expert, are no tokens.
        """
        shape = Z.shape[:-1]
        Z = Z.detach().reshape(-1, Z.shape[-1]).to(self._sum.dtype)
        if weight is not None:
            weight = weight.detach().reshape(-1, 1).to(Z)
            Z = Z * weight.sqrt()
            self._weights += torch.stack([weight.double().sum(), weight.double().square().sum()])
        sizes = Z.square().sum(-1)
        if not bool((counted := Z.any(-1)).all()):
            Z = Z[counted]
        if weight is None:
            self._weights += Z.shape[0]
        _add_lower(self._sum, Z)
        self.tokens += Z.shape[0]
        return sizes.view(shape)

    def plus(self, other: Gram) -> Gram:
        """The sum over the tokens of both, those of this one first."""
        both = Gram(len(self._sum), self.device, self.dtype)
        torch.add(self._sum, other._sum, out=both._sum)
        both._weights, both.tokens, both.sizes = self._weights + other._weights, self.tokens + other.tokens, self.sizes + other.sizes
        return both

    @property
    def effective(self) -> float:
        """Effective sample size of the weights, (sum w)^2 / sum w^2: the number of tokens if all weigh the same, 1 if one outweighs all."""
        total, squares = self._weights.tolist()
        return total * total / squares if squares > 0 else 0.0

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

    def collect(self, at: int | None = None) -> None:
        """Become the sum over all processes, with their tokens in order; on process `at` only, if it is given: elsewhere it is of no more use."""
        if ranks.size() == 1:
            return
        packed = ranks.sum_(pack(self._sum), at)
        counts = ranks.sum_(torch.cat([self._weights.cpu(), torch.tensor([self.tokens], dtype=torch.float64)]), at)
        sizes = ranks.gather(self.sizes, at)
        if at is None or at == ranks.rank():
            self._sum, self._weights = unpack(packed, len(self._sum)), counts[:2].to(self.device)
            self.tokens, self.sizes = int(counts[2]), [one for part in sizes for one in part]

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
        limits: Largest weights of a token in A and in B (sequence: of a sequence in both), larger ones are lowered to it; None for no limit.
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
        limits: tuple[float, float] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        m, n = shape
        self.weighting, self.limits = weighting, limits
        self._sequences = torch.zeros(2, dtype=torch.float64, device=device)
        self.B = Gram(m, device, dtype)
        self.A = Gram(n, device, dtype) if with_a or weighting.by_sequence else None
        self._metrics = None if before is None else before._metric_pair()

    def add(self, x: Tensor, g: Tensor) -> tuple[Tensor | None, Tensor]:
        """Add tokens.

        Args:
            x: Inputs `[b, T, n]`.
            g: Output gradients `[b, T, m]`.

        Returns:
            Weights a_t `[b, T]` of the tokens in A, before any limit, None for `sequence`, whose A is no weighted sum; and what each token added to the trace
            of B, `[b, T]`, by sequence what each sequence added, `[b]`.
        """
        if self.weighting.by_sequence:
            return None, self._add_sequences(x, g)
        a, b = self.weights(x, g)
        limit_a, limit_b = self.limits or (math.inf, math.inf)
        if self.A is not None:
            self.A.add(x, a.clamp_max(limit_a) if self.weighting.a_by_gradient else None)
        return a, self.B.add(g, None if b is None else b.clamp_max(limit_b))

    def weights(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights a_t and b_t `[b, T]` before any limit, b = None if B is not weighted; by sequence |G_s|^2 `[b]`, twice."""
        dtype = self.B.dtype
        if self.weighting.by_sequence:
            size = torch.stack([gradient.square().sum() for gradient in self._gradients(x, g)])
            return size, size
        of_x, of_g = self._metrics or (None, None)
        return _quadratic(g.to(dtype), of_g), _quadratic(x.to(dtype), of_x) if self.weighting.b_by_input else None

    @property
    def effective(self) -> float:
        """Effective sample size behind B: of tokens, or of sequences."""
        if not self.weighting.by_sequence:
            return self.B.effective
        total, squares = self._sequences.tolist()
        return total * total / squares if squares > 0 else 0.0

    def _gradients(self, x: Tensor, g: Tensor) -> Iterator[Tensor]:
        """G_s `[m, n]` of one sequence after the other: each is as large as the weight."""
        for one, other in zip(g, x, strict=True):
            yield one.to(self.B.dtype).T @ other.to(self.B.dtype)

    def _add_sequences(self, x: Tensor, g: Tensor) -> Tensor:
        assert self.A is not None
        sizes = torch.zeros(len(g), dtype=self.B.dtype, device=self.B.device)
        for index, gradient in enumerate(self._gradients(x, g)):
            size = gradient.square().sum()
            if self.limits is not None:
                kept = size.clamp_max(self.limits[0])
                gradient, size = gradient * (kept / size.clamp_min(torch.finfo(size.dtype).tiny)).sqrt(), kept
            self._sequences += torch.stack([size.double(), size.double().square()])
            self.A.add(gradient)
            self.B.add(gradient.T)
            sizes[index] = size
        return sizes

    def collect(self, at: int | None = None) -> None:
        """Become the sums over all processes, as `Gram.collect`."""
        self.B.collect(at)
        if self.A is not None:
            self.A.collect(at)
        self._sequences = ranks.sum_(self._sequences.cpu(), at)

    def plus(self, other: Step) -> Step:
        """The sums over the tokens of both, those of this one first."""
        both = copy.copy(self)
        both.B = self.B.plus(other.B)
        both.A = self.A.plus(other.A) if self.A is not None and other.A is not None else None
        both._sequences = self._sequences + other._sequences
        return both

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
    H = torch.empty(n, n, dtype=packed.dtype, device=packed.device)
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
