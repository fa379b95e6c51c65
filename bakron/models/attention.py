"""A block's attention taken apart: heads, the model's own q/k-norm and rotary embedding, probabilities, and how a curvature of rotated heads looks at q and k.

Where only the first part of a head is rotated (Phi), the rest passes as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bakron.errors import ModelError
from bakron.models.walk import Walk

POSITIONS = 64  # whose [head_dim, head_dim] curvatures are alive at a time


class Attention:
    """Attention of block i of a walk, grouped queries, causal, perhaps with a sliding window.

    Args:
        walk: The model.
        i: Block.

    Raises:
        ModelError: Its tokens attend to later ones too.
    """

    def __init__(self, walk: Walk, i: int) -> None:
        self.module = walk.blocks[i].get_submodule(walk.layout.attention)
        if not self.module.is_causal:
            raise ModelError(f"attention of {walk.prefix(i)} that looks ahead", "causal attention")
        self.head_dim: int = self.module.head_dim  # type: ignore[assignment]
        self.groups: int = self.module.num_key_value_groups  # type: ignore[assignment]
        cos, sin = walk.arguments(i)["position_embeddings"]
        self.cos, self.sin = (
            cos[0],
            sin[0],
        )  # [T, what is rotated of head_dim]: one length, no padding, so all sequences have the same positions
        self.rotary = sys.modules[type(self.module).__module__].apply_rotary_pos_emb
        config = self.module.config
        self.window: int | None = getattr(self.module, "sliding_window", getattr(config, "sliding_window", None))  # type: ignore[assignment]
        self.cap: float | None = getattr(config, walk.layout.score_cap) if walk.layout.score_cap else None

    def rotated(self, side: str, z: Tensor) -> Tensor:
        """What attention sees of the output of `q_proj` or `k_proj`.

        Args:
            side: "q" or "k".
            z: `[..., T, heads * head_dim]`.

        Returns:
            `[..., heads, T, head_dim]`.
        """
        z = z.unflatten(-1, (-1, self.head_dim))
        norm = self._norm(side)
        z = (z if norm is None else norm(z)).transpose(-3, -2)
        return self._rotate(z, self.cos, self.sin, unsqueeze_dim=0)

    def probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        """Softmax of the scores of one key head.

        Args:
            q: Rotated queries of its group, `[groups, T, head_dim]`.
            k: Rotated keys, `[T, head_dim]`.

        Returns:
            `[groups, T, T]`.
        """
        distance = torch.arange(len(k), device=k.device)[:, None] - torch.arange(len(k), device=k.device)
        hidden = (distance < 0) | (distance >= (self.window or len(k)))
        scores = q @ k.T * self.module.scaling
        if self.cap is not None:
            scores = (scores / self.cap).tanh() * self.cap
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)

    def normed(self, side: str) -> bool:
        """Whether a norm stands between `q_proj` or `k_proj` and the rotation: then `score_curvature` of every position is needed, else `score_moments` will do."""
        return self._norm(side) is not None

    def score_moments(self, side: str, other: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted sum of what `score_curvature` gives position by position, and the traces of it, without a norm and without making it.

        The rotation is `R_t z = c_t o z + s_t o P z`. So `sum_t w_t R_t^T C_t R_t`, with `C_t = sum_u k_u k_u^T` over the keys that t sees, has four terms,
        `diag(c) C diag(c)`, `diag(c) C diag(s) P` and so on, and in each the sums can change places: `sum_u (k_u k_u^T) o (sum of w_t c_t c_t^T over the t that
        see u)`, where the inner sum is the same for all heads and sequences.

        Args:
            side: "q" or "k": whose curvature.
            other: The rotated other side, `[sequences, heads of that side, T, head_dim]`.
            weight: Of each position, `[T]`.

        Returns:
            `[heads, head_dim, head_dim]`; and the traces of each position's curvature, summed over heads, `[sequences, T]`.
        """
        c, s, P = self._rotation(other)
        scale, length = c.square() + s.square(), other.shape[-2]
        # A query sees keys up to its own position, a key is seen by queries from its own position on: the same, from the end.
        if side == "q":
            seen = self._running(other.square().sum(1)) * self.groups
            c, s, weight, other = c.flip(0), s.flip(0), weight.flip(0), other.flip(2)
        else:
            seen = self._running(other.square().sum(1).flip(1)).flip(1)
        grouped = other.unflatten(1, (-1, 1 if side == "q" else self.groups))
        heads = grouped.permute(1, 3, 0, 2, 4).flatten(2, 3)  # [key heads, T, sequences and heads of the group, head_dim]

        def products(start: int, stop: int) -> Tensor:
            w, one, two = weight[start:stop, None, None], c[start:stop], s[start:stop]
            pairs = (one, one), (one, two), (two, two)
            return torch.stack([w * left[:, :, None] * right[:, None, :] for left, right in pairs])

        window = self.window or length
        terms = other.new_zeros(3, len(heads), self.head_dim, self.head_dim)
        running = other.new_zeros(3, self.head_dim, self.head_dim)
        for start in range(0, length, POSITIONS):
            stop = min(start + POSITIONS, length)
            fresh, left = products(start, stop), (max(start - window, 0), max(stop - window, 0))
            if left[1] > 0:
                fresh[:, -(left[1] - left[0]) :] -= products(*left)  # what the window of the last positions here has left behind
            sums = running[:, None] + fresh.cumsum(1)
            running = sums[:, -1]
            K = heads[:, start:stop].mT @ heads[:, start:stop]
            for term, one in zip(terms, sums, strict=True):
                term += (K * one).sum(1)
        cc, cs, ss = terms
        B = cc + cs @ P + (cs @ P).mT + P.T @ ss @ P
        return B.repeat_interleave(self.groups, 0) if side == "q" else B, (seen * scale).sum(-1).to(other)

    def _running(self, z: Tensor) -> Tensor:
        """Sums of `z [sequences, T, ...]`, not negative, over each position and those before it that its window reaches, float64: a window's is a difference."""
        sums = z.double().cumsum(1)
        if self.window is not None and self.window < z.shape[1]:
            sums = torch.cat([sums[:, : self.window], (sums[:, self.window :] - sums[:, : -self.window]).clamp_min(0)], 1)
        return sums

    def _rotation(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `R_t z = c_t o z + s_t o P z` is for the model's own rotation: c `[T, head_dim]`, s `[T, head_dim]` and P `[head_dim, head_dim]`."""
        turned, rest = self.cos.shape[-1], self.head_dim - self.cos.shape[-1]
        c, s = nn.functional.pad(self.cos, (0, rest), value=1.0), nn.functional.pad(self.sin, (0, rest))
        P = like.new_zeros(self.head_dim, self.head_dim)
        rows, one = torch.eye(turned).to(like), like.new_ones(turned, turned)
        P[:turned, :turned] = self.rotary(rows[None], rows[None], 0 * one, one, unsqueeze_dim=0)[0][0].T
        return c.to(like), s.to(like), P

    def score_curvature(self, side: str, z: Tensor, other: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Curvature, at the outputs of `q_proj` or `k_proj`, of the summed squared change of all attention scores q' . k' of a sequence.

        The curvature of a rotated query is the sum of k' k'^T over the keys that it sees, that of a rotated key the sum of q' q'^T over the queries that see it;
        both are pulled back through the rotation at their own position and the Jacobian of the norm before it.

        Args:
            side: "q" or "k": whose curvature.
            z: Output of that projection, `[T, heads * head_dim]`.
            other: The rotated other side, `[heads of that side, T, head_dim]`.

        Yields:
            Positions and their curvatures, `[heads, positions, head_dim, head_dim]`.
        """
        length, window = len(z), self.window or len(z)
        heads = z.shape[1] // self.head_dim
        other = other if side == "q" else other.flip(1)  # a key is seen by the queries from its own position on: the same sum, from the end
        running = other.new_zeros(len(other), self.head_dim, self.head_dim)
        for start in range(0, length, POSITIONS):
            stop = min(start + POSITIONS, length)
            fresh = other[:, start:stop, :, None] * other[:, start:stop, None, :]
            left = max(start - window, 0), max(stop - window, 0)  # what the window of the last positions here has left behind
            if left[1] > 0:
                old = other[:, left[0] : left[1]]
                fresh[:, -(left[1] - left[0]) :] -= old[:, :, :, None] * old[:, :, None, :]
            C = running[:, None] + fresh.cumsum(1)
            running = C[:, -1]
            if side == "q":
                positions, C = slice(start, stop), C.repeat_interleave(self.groups, 0)
            else:
                positions, C = slice(length - stop, length - start), C.flip(1).unflatten(0, (heads, self.groups)).sum(1)
            yield positions, self._pull_back(side, z[positions], C, positions)

    def _pull_back(self, side: str, z: Tensor, C: Tensor, positions: slice) -> Tensor:
        """`J^T R^T C R J` for each head and position: R the rotation, J the Jacobian of the norm at z."""
        cos, sin = self.cos[positions], -self.sin[positions]
        C = self._rotate(C, cos, sin).mT  # rotates the rows of C: C R, transposed R^T C
        C = self._rotate(C, cos, sin)
        norm = self._norm(side)
        if norm is None:
            return C
        z = z.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)[:, :, None].expand_as(C).detach().requires_grad_()
        with torch.enable_grad():
            y = norm(z)
        C = torch.autograd.grad(y, z, C, retain_graph=True)[0].mT
        return torch.autograd.grad(y, z, C)[0]

    def _rotate(self, z: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        """The model's own rotation of the first entries of `[..., head_dim]`, as many as `cos` has."""
        turned, passed = z[..., : cos.shape[-1]], z[..., cos.shape[-1] :]
        return torch.cat([self.rotary(turned, turned, cos, sin, unsqueeze_dim=unsqueeze_dim)[0], passed], -1)

    def _norm(self, side: str) -> nn.Module | None:
        """The norm of queries or keys, head by head."""
        return getattr(self.module, f"{side}_norm", getattr(self.module, f"{side}_layernorm", None))
