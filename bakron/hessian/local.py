"""Hessians of losses inside a block: of the attention scores for q and k, of the attention output for v, of the MLP output for up and gate. No gradient pass.

Each is a sum over tokens `sum_t x_t x_t^T (x) b_t` with a positive semi-definite b_t `[m, m]`, and becomes A (x) B by one of three factorisations:

| name    | A                    | B              |
|---------|----------------------|----------------|
| kfac    | sum x_t x_t^T        | sum b_t        |
| shampoo | sum tr(b_t) x_t x_t^T | sum |x_t|^2 b_t |
| mixed   | A of shampoo         | B of kfac      |

| linears  | loss whose curvature is taken                                   | b_t |
|----------|-----------------------------------------------------------------|---|
| q        | squared change of all scores q' . k' that the causal mask keeps | per head: J_t^T R_t^T (sum of k' k'^T over the keys that t sees) R_t J_t |
| k        | the same                                                        | per key head and group: J_t^T R_t^T (sum of q' q'^T over those that see t) R_t J_t |
| v        | sum over heads of |W_O,h (change of head h's output)|^2         | per query head h, at x_t = sum_s p_h,ts x_s: W_O,h^T W_O,h, over the group |
| up, gate | squared change of the MLP's output (gate: first order)          | (g_t g_t^T) o W_down^T W_down, g = act(gate); for gate g = act'(gate) o up |

q', k' are queries and keys as attention sees them, R_t the rotation of position t, J_t the Jacobian of the q/k-norm. Heads do not mix, so B of q, k and v is
`[heads, head_dim, head_dim]`. In an MLP without a gate g = act'(up). Linears that are asked for no local Hessian have A = sum x x^T, B = I, as in `input`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bakron import ranks
from bakron.errors import RecipeError
from bakron.hessian.factor import FACTORS, Gram, Weighting
from bakron.hessian.input import collected, input_factors, input_moments, input_outliers, refuse_second_use
from bakron.kron import Kron
from bakron.models.attention import Attention
from bakron.models.layout import layout_of
from bakron.models.linears import Routed
from bakron.models.walk import Walk
from bakron.resolution import LOCAL_FACTORS

Seen = dict[str, tuple[Tensor, Tensor]]


class LocalEstimator:
    """Hessians of losses inside a block for some linears, of their inputs alone for the rest.

    Args:
        walk: The model; the block that is asked for must still have its original weights.
        parts: Names in `PARTS`.
        factor: kfac, shampoo or mixed.
        skip: First tokens of each sequence that do not count, neither in A nor in B (other tokens still attend to them).
        dtype: Of products and sums.

    Raises:
        RecipeError: Another factorisation, or a part that the architecture does not have.
    """

    def __init__(
        self, walk: Walk, parts: Iterable[str], factor: str = "mixed", *, skip: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        if factor not in LOCAL_FACTORS:
            raise RecipeError(f"factor {factor} with a local Hessian", " or ".join([", ".join(LOCAL_FACTORS[:-1]), LOCAL_FACTORS[-1]]))
        self.walk, self.parts, self.weighting = walk, tuple(parts), FACTORS[factor]
        check_parts(walk.model.config.model_type, self.parts)
        self.skip, self.dtype = skip, dtype
        self.tokens: dict[str, int] = {}
        self.effective: dict[str, dict[str, float]] = {}
        self.outliers: dict[str, dict[str, Any]] = {}

    def block(self, i: int, inputs: Tensor) -> dict[str, Kron]:
        """One pass through block i for the curvatures, if linears that have them are to be quantized, one for the second moments of inputs.

        Args:
            i: Block.
            inputs: `[N, T, d]` on the CPU.

        Returns:
            Undamped Kron per linear that falls to this process.
        """
        dtype = torch.promote_types(inputs.dtype, self.dtype)
        parts = [PARTS[name](self.walk, i, inputs, self.weighting, dtype, self.skip) for name in parts_of(self.walk, i, self.parts)]
        seen: Seen = {}

        def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
            def hook(_module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
                refuse_second_use(self.walk, i, name, seen)
                seen[name] = (arguments[0], output)

            return hook

        def visit(start: int, batch: Tensor) -> None:
            for part in parts:
                part.add(slice(start, start + len(batch)), seen)
            seen.clear()

        handles = [linear.register_forward_hook(keep(name)) for name, linear in self.walk.linears(i).items()]
        try:
            if parts:
                self.walk.apply(i, inputs, visit)
        finally:
            for handle in handles:
                handle.remove()
        for part in parts:
            part.collect(self.walk.owners(i))
        B = {name: one for part in parts for name, one in part.output_factors().items()}
        weights = {name: one for part in parts for name, one in part.weights.items()} if self.weighting.a_by_gradient else {}
        own = {name: gram for part in parts for name, gram in part.grams.items()}
        grams = input_moments(self.walk, i, inputs, weights, without=own, skip=self.skip, dtype=dtype)
        grams |= collected(self.walk, i, own)
        sequences, linears = int(ranks.sum_(torch.tensor(len(inputs)))), self.walk.linears(i)
        counted = sequences * (inputs.shape[1] - self.skip)
        self.tokens = {name: gram.tokens if isinstance(linears[name], Routed) else counted for name, gram in grams.items()}
        self.effective = {name: {"a": gram.effective} for name, gram in grams.items()}
        self.outliers = input_outliers(grams, self.skip)
        A = input_factors(self.walk, i, grams)
        return {name: Kron(A[name], B.get(name)) for name in self.walk.linears(i) if name in A}


class Scores:
    """Curvature of the attention scores at q and k.

    Args:
        walk: The model.
        i: Block.
        inputs: Of the block, `[N, T, d]`.
        weighting: kfac, shampoo or mixed.
        dtype: Of products and sums.
        skip: First tokens of each sequence that do not count.

    Attributes:
        weights: Per linear tr(b_t), `[N, T]`.
        grams: Second moments of inputs that are not those of the linear itself: none here.
    """

    def __init__(self, walk: Walk, i: int, inputs: Tensor, weighting: Weighting, dtype: torch.dtype, skip: int = 0) -> None:
        self.attention, self.weighting, self.skip = Attention(walk, i), weighting, skip
        self.dtype = dtype
        self._names = names = walk.layout.roles["q"], walk.layout.roles["k"]
        self.weights = {name: torch.empty(inputs.shape[:2], dtype=dtype) for name in names}
        self.grams: dict[str, Gram] = {}
        d = self.attention.head_dim
        self._B = {name: torch.zeros(walk.linears(i)[name].out_features // d, d, d, dtype=dtype, device=walk.device) for name in names}

    def add(self, rows: slice, seen: Seen) -> None:
        """Add the sequences `rows`, of which `seen` has inputs and outputs of every linear."""
        of_q, of_k = self._names
        (x, q), k = seen[of_q], seen[of_k][1]
        size = x.to(self.dtype).square().sum(-1) if self.weighting.b_by_input else x.new_ones(x.shape[:2], dtype=self.dtype)
        size[:, : self.skip] = 0
        for name, side, z, other in (
            (of_q, "q", q, self.attention.rotated("k", k).to(self.dtype)),
            (of_k, "k", k, self.attention.rotated("q", q).to(self.dtype)),
        ):
            if self.attention.normed(side):
                self._add_positions(rows, name, side, z.to(self.dtype), other, size)
                continue
            together = 1 if self.weighting.b_by_input else len(x)  # sequences in which a position weighs the same
            for part in torch.arange(len(x)).split(together):
                B, traces = self.attention.score_moments(side, other[part], size[part[0]])
                self._B[name] += B
                self.weights[name][rows][part] = traces.cpu()

    def _add_positions(self, rows: slice, name: str, side: str, z: Tensor, other: Tensor, size: Tensor) -> None:
        """Add one side of the sequences `rows`, position by position."""
        for s in range(len(z)):
            for positions, b in self.attention.score_curvature(side, z[s], other[s]):
                self.weights[name][rows][s, positions] = b.diagonal(dim1=-2, dim2=-1).sum((0, -1)).clamp_min(0).cpu()
                self._B[name] += torch.einsum("t,htij->hij", size[s, positions], b)

    def collect(self, _owners: Mapping[str, int]) -> None:
        """Sum over all processes."""
        for B in self._B.values():
            ranks.sum_(B)

    def output_factors(self) -> dict[str, Tensor]:
        """B per linear, `[heads, head_dim, head_dim]`: heads do not mix."""
        return {name: _symmetric(B) for name, B in self._B.items()}


class Values:
    """Curvature of the attention output at v, head by head.

    Args:
        walk: The model.
        i: Block.
        inputs: Of the block, `[N, T, d]`.
        weighting: kfac, shampoo or mixed.
        dtype: Of products and sums.
        skip: First tokens of each sequence that do not count.

    Attributes:
        weights: None here: tokens are mixed by attention before they count.
        grams: Second moment of the attention-weighted inputs.
    """

    def __init__(self, walk: Walk, i: int, inputs: Tensor, weighting: Weighting, dtype: torch.dtype, skip: int = 0) -> None:
        self.attention, self.weighting, self.skip = Attention(walk, i), weighting, skip
        linears, roles = walk.linears(i), walk.layout.roles
        self._q, self._k, self._v = (roles[role] for role in "qkv")
        self.weights: dict[str, Tensor] = {}
        self.grams = {self._v: Gram(linears[self._v].in_features, walk.device, dtype)}
        W = linears[roles["o"]].weight.detach().to(walk.device, dtype)
        W = W.unflatten(1, (-1, self.attention.head_dim)).transpose(0, 1)  # [heads, d, head_dim]
        self._outputs = W.mT @ W
        self._size = torch.zeros(len(W), dtype=torch.float64, device=walk.device)  # of each head's weighted inputs

    def add(self, rows: slice, seen: Seen) -> None:
        """Add the sequences `rows`, of which `seen` has inputs and outputs of every linear."""
        groups, traces = self.attention.groups, self._outputs.diagonal(dim1=-2, dim2=-1).sum(-1)
        for x, q, k in zip(seen[self._v][0], seen[self._q][1], seen[self._k][1]):
            q, k = self.attention.rotated("q", q), self.attention.rotated("k", k)
            for g in range(len(k)):
                heads = slice(g * groups, (g + 1) * groups)
                mixed = self.attention.probabilities(q[heads], k[g])[:, self.skip :] @ x  # [groups, T - skip, n]
                weight = traces[heads, None].expand(mixed.shape[:2]) if self.weighting.a_by_gradient else None
                self.grams[self._v].add(mixed, weight)
                self._size[heads] += mixed.double().square().sum((-2, -1))

    def collect(self, _owners: Mapping[str, int]) -> None:
        """Sum over all processes, but for `grams`."""
        ranks.sum_(self._size)

    def output_factors(self) -> dict[str, Tensor]:
        """B of v, `[key-value heads, head_dim, head_dim]`."""
        weight = self._size / self._size.mean() if self.weighting.b_by_input else torch.ones_like(self._size)
        B = self._outputs * weight.to(self._outputs)[:, None, None]
        return {self._v: _symmetric(B.unflatten(0, (-1, self.attention.groups)).sum(1))}


class Gated:
    """Curvature of the MLP's output at up and gate, or at up alone where there is no gate.

    Args:
        walk: The model.
        i: Block.
        inputs: Of the block, `[N, T, d]`.
        weighting: kfac, shampoo or mixed.
        dtype: Of products and sums.
        skip: First tokens of each sequence that do not count.

    Attributes:
        weights: Per linear tr(b_t), `[N, T]`.
        grams: Second moments of inputs that are not those of the linear itself: none here.
    """

    def __init__(self, walk: Walk, i: int, inputs: Tensor, weighting: Weighting, dtype: torch.dtype, skip: int = 0) -> None:
        self.weighting, self.skip = weighting, skip
        linears, roles, self.dtype = walk.linears(i), walk.layout.roles, dtype
        self._up, self._gate = roles["up"], roles.get("gate")
        names = [name for name in (self._up, self._gate) if name is not None]
        self.weights = {name: torch.empty(inputs.shape[:2], dtype=dtype) for name in names}
        self.grams: dict[str, Gram] = {}
        self._act = walk.blocks[i].get_submodule(walk.layout.activation)
        self._W = linears[roles["down"]].weight.detach()
        self._diagonal = self._W.to(walk.device, dtype).square().sum(0)
        self._moments = {name: Gram(linears[name].out_features, walk.device, dtype) for name in names}

    def add(self, rows: slice, seen: Seen) -> None:
        """Add the sequences `rows`, of which `seen` has inputs and outputs of every linear."""
        x, z = seen[self._gate or self._up]
        z = z.detach().requires_grad_()
        with torch.enable_grad():
            active = self._act(z)
        slope = torch.autograd.grad(active, z, torch.ones_like(active))[0]
        size = x.to(self.dtype).square().sum(-1) if self.weighting.b_by_input else None
        slopes = {self._up: slope} if self._gate is None else {self._up: active.detach(), self._gate: slope * seen[self._up][1]}
        for name, g in slopes.items():
            g = g.to(self.dtype)
            self.weights[name][rows] = (g.square() @ self._diagonal).cpu()
            self._moments[name].add(g[:, self.skip :], None if size is None else size[:, self.skip :])

    def collect(self, owners: Mapping[str, int]) -> None:
        """Sum over all processes, each linear on its own."""
        for name, gram in self._moments.items():
            gram.collect(owners[name])
        self._moments = {name: gram for name, gram in self._moments.items() if owners[name] == ranks.rank()}

    def output_factors(self) -> dict[str, Tensor]:
        """B per linear, `[m, m]`: Schur products, so positive semi-definite."""
        W = self._W.to(self._diagonal)
        M = (W.T @ W).cpu()
        return {name: gram.value() * M for name, gram in self._moments.items()}


PARTS: dict[str, Callable[[Walk, int, Tensor, Weighting, torch.dtype, int], Scores | Values | Gated]] = {
    "attention": Scores,
    "value": Values,
    "mlp": Gated,
}
OF_ROLES = {"attention": ("q", "k"), "value": ("v",), "mlp": ("up", "gate")}  # the linears whose Hessian a part is
LOCAL: dict[str, tuple[str, ...]] = {
    **{f"{name}-local": (name,) for name in PARTS},
    "heads-local": ("attention", "value"),
    "fully-local": tuple(PARTS),
}


def parts_of(walk: Walk, i: int, parts: Iterable[str]) -> list[str]:
    """Those of some parts that a linear of block i needs which is to be quantized."""
    chosen = walk.chosen(i)
    return [part for part in parts if any(walk.layout.roles.get(role) in chosen for role in OF_ROLES[part])]


def check_parts(model_type: str, parts: Iterable[str]) -> None:
    """Refuse losses that an architecture does not have in the form in which their curvature is known.

    Args:
        model_type: Of the model.
        parts: Names in `PARTS`.

    Raises:
        RecipeError: One is named, with the Hessians that can be had.
    """
    known = layout_of(model_type).local
    if missing := [part for part in parts if part not in known]:
        possible = [name for name, wanted in LOCAL.items() if set(wanted) <= set(known)]
        raise RecipeError(
            f"a local Hessian of {missing[0]} for a model of type {model_type}, which is not known",
            f"hessian {' or '.join(['input', *possible, 'backprop'])}",
            "Use --hessian backprop",
        )


def _symmetric(B: Tensor) -> Tensor:
    """`[heads, k, k]` without the rounding of its sums, on the CPU."""
    return ((B + B.mT) / 2).cpu()
