"""`backprop`: the global Fisher, E[x x^T (x) g g^T] with g the gradient of the model's own log likelihood at a linear's output.

B, and each token's weight in A, come from one pass over the original model before any rounding (`gradients`), and wait on disk. A is accumulated later, when the
block's turn to be rounded comes, on the inputs that the quantized prefix really gives it, weighted by those numbers. Factorisation `sequence` is no weighted sum
over tokens: there A, too, is of the original model's inputs, and comes from the gradient pass.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bakron import ranks, rundir
from bakron.errors import RecipeError
from bakron.hessian.factor import Gram, unpack, weighting
from bakron.hessian.gradients import Progress, block_file, gradient_pass, quantile, rows_here, slots_in
from bakron.hessian.heldout import Heldout
from bakron.hessian.input import input_factors, input_outliers, moments_by_part, together
from bakron.hessian.outliers import outliers
from bakron.kron import Factor, Kron
from bakron.models.linears import Routed
from bakron.models.walk import Walk

MANIFEST = "manifest.json"


class BackpropEstimator:
    """Factors of the global Fisher from one gradient pass.

    Args:
        walk: The original model.
        ids: Calibration tokens `[N, T]`; with several processes all of them, of which each takes its share.
        store: Directory for the gradient pass's results; a complete one of the same model, tokens, seed and weighting of B is reused.
        factor: A name in `FACTORS`, `shampoo:K` or `kl:K`.
        seed: Of the sampled labels.
        fingerprint: Identifies the model's weights.
        labels: "sampled" or "empirical".
        samples: Labels sampled a token, each with a backward pass of its own: less noise in B and in the weights of A.
        clip: Quantile of the weights in A and of those in B above which they are lowered to it; None clips nothing.
        skip: First tokens of each sequence that count neither in A nor in B.
        held: Last sequences that can be held out: `heldout` measures errors on their gradients, and `tried` is made without them.
        gate: Also make the unweighted A's.
        every: Let the gradient pass keep what every linear needs, for runs that quantize others of them, and not only those that are to be quantized now.
        dtype: Of products and sums, float32 or float64.
        boundary_memory: Bytes for block inputs and gradients between blocks; None keeps every block's input. Less memory costs more forward passes, and
            changes nothing else.
        progress: Called with (stage, done, total).

    Attributes:
        unweighted: A of the last block with every token counted once, per linear; only with `gate`, and where A is weighted.
        tried: What can be chosen between on the sequences held out, per linear of the last block: its Kron without them, and its A with every token counted once
            but theirs, None as for `unweighted`; empty if none is held out.
        passes: What the gradient pass did: runs of single blocks `forward` and `backward`, `kept` block inputs at most and their `bytes` with all that was in
            flight; None if a stored one is reused.

    Raises:
        RecipeError: `store` holds another run's results, or the boundary memory is too small.
        ModelError: A gradient is not finite.
    """

    def __init__(
        self,
        walk: Walk,
        ids: Tensor,
        store: Path,
        *,
        factor: str = "mixed",
        seed: int = 0,
        fingerprint: str = "",
        labels: str = "sampled",
        samples: int = 1,
        clip: float | None = None,
        skip: int = 0,
        held: int = 0,
        gate: bool = False,
        every: bool = False,
        dtype: torch.dtype = torch.float32,
        boundary_memory: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.walk, self.store, self.weighting = walk, store, weighting(factor)
        self.clip, self.skip, self.gate, self.dtype = clip, skip, gate, dtype
        self.held = held
        self.unweighted: dict[str, Factor] = {}
        self.tried: dict[str, tuple[Kron, Factor | None]] = {}
        self.tokens: dict[str, int] = {}
        self.effective: dict[str, dict[str, float]] = {}
        self.outliers: dict[str, dict[str, Any]] = {}
        key = {
            "model": fingerprint,
            "tokens": hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest(),
            "shape": list(ids.shape),
            "seed": seed,
            **self.weighting.b_key,
            "labels": labels,
            "samples": samples,
            "clip": clip if self.weighting.b_by_input else None,
            "skip": skip,
            "held": held,
            "precision": walk.precision,
            "dtype": str(dtype),
        }
        self.passes: dict[str, int] | None = None
        if not ranks.by_first(lambda: _complete(store, key, len(walk))):
            self.passes = gradient_pass(
                walk,
                ids,
                store,
                seed=seed,
                weighting=self.weighting,
                labels=labels,
                samples=samples,
                clip=clip,
                skip=skip,
                held=held,
                dtype=dtype,
                slots=slots_in(walk, ids[rows_here(len(ids), held)], boundary_memory, samples),
                key=json.dumps(key, sort_keys=True),
                every=every,
                progress=progress or (lambda *_: None),
            )
            ranks.by_first(lambda: rundir.write_text(store / MANIFEST, json.dumps(key, indent=1)))

    def block(self, i: int, inputs: Tensor) -> dict[str, Kron]:
        """One pass through block i for A; B from the gradient pass.

        Args:
            i: Block.
            inputs: `[N, T, d]` on the CPU, of this process (`rows_here`), usually from the quantized prefix.

        Returns:
            Undamped Kron per linear that falls to this process.
        """
        self.unweighted, self.tried = {}, {}
        stored = rundir.read_tensors(block_file(self.store, i))
        length = inputs.shape[1]
        linears, owners = self.walk.linears(i), self.walk.owners(i)
        mine = {name: linears[name] for name in self.walk.chosen(i) if owners[name] == ranks.rank()}
        held = len(range(self.held)[ranks.share(self.held)])
        parts = (len(inputs) - held, held) if self.held else (len(inputs),)

        def factors(side: str, kind: str = "") -> dict[str, Factor]:
            return {
                name: Factor(unpack(stored[f"{name}{kind}.{side}"], linear.weight.shape["BA".index(side)])) for name, linear in mine.items()
            }

        try:
            B, tried_B = factors("B"), factors("B", ".tried") if self.held else {}
            by_sequence, tried_A = (factors("A"), factors("A", ".tried") if self.held else {}) if self.weighting.by_sequence else ({}, {})
            of_b = {name: float(stored[f"{name}.effective"]) for name in mine}
            reached = {name: int(stored[f"{name}.tokens"]) for name, linear in mine.items() if isinstance(linear, Routed)}
            large = {name: outliers(stored[f"{name}.sizes"][..., self.skip :], self.skip) for name in mine}
        except (KeyError, ValueError, RuntimeError) as error:
            raise RecipeError(
                f"{block_file(self.store, i)} is damaged: {error}", "a file of a finished gradient pass", f"Remove {self.store}"
            ) from error
        unweighted: dict[str, Factor] = {}
        if self.gate and self.weighting.a_by_gradient:
            *first, grams = self._moments(i, inputs, {}, parts)
            self.unweighted, unweighted = input_factors(self.walk, i, grams), input_factors(self.walk, i, first[0]) if first else {}
        self.outliers = {name: {"b": one} if one else {} for name, one in large.items()}
        if self.weighting.by_sequence:
            self.tokens = {name: reached.get(name, len(stored[f"{name}.sizes"]) * (length - self.skip)) for name in mine}
            self.effective = {name: {"a": one, "b": one} for name, one in of_b.items()}
            A = by_sequence
        else:
            weights = {}
            if self.weighting.a_by_gradient:
                for name in self.walk.chosen(i):
                    of_all = stored[f"{name}.gradient"].reshape(-1, length)
                    weights[name] = of_all[rows_here(len(of_all), self.held)]
                    if self.clip is not None:
                        weights[name] = weights[name].clamp_max(quantile(of_all[:, self.skip :], self.clip))
            *first, grams = self._moments(i, inputs, weights, parts)
            self.tokens = {name: min(gram.tokens, reached.get(name, gram.tokens)) for name, gram in grams.items()}
            self.effective = {name: {"a": gram.effective, "b": of_b[name]} for name, gram in grams.items()}
            self.outliers = {name: one | self.outliers[name] for name, one in input_outliers(grams, self.skip).items()}
            A, tried_A = input_factors(self.walk, i, grams), input_factors(self.walk, i, first[0]) if first else {}
        self.tried = {name: (Kron(tried_A[name], one), unweighted.get(name)) for name, one in tried_B.items()}
        return {name: Kron(A[name], B[name]) for name in mine}

    def _moments(self, i: int, inputs: Tensor, weights: dict[str, Tensor], parts: tuple[int, ...]) -> list[dict[str, Gram]]:
        """Grams of the first part of the sequences, if there are two parts, and those of all."""
        first, *others = moments_by_part(self.walk, i, inputs, weights, parts, skip=self.skip, dtype=self.dtype)
        return [first, *(together(first, one) for one in others)]

    def heldout(self, i: int) -> Heldout:
        """Inputs and gradients of the sequences held out, at block i, which must still have its original weights."""
        stored = rundir.read_tensors(block_file(self.store, i))
        rows = ranks.share(len(stored["heldout.inputs"]))
        return Heldout(self.walk, i, stored["heldout.inputs"][rows], stored["heldout.gradient"][:, rows], self.skip)


def _complete(store: Path, key: dict[str, object], blocks: int) -> bool:
    """Whether `store` holds this gradient pass."""
    manifest = store / MANIFEST
    if not manifest.is_file():
        return False
    try:
        found = dict(json.loads(manifest.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise RecipeError(
            f"{manifest} is damaged: {error}", "a manifest as a finished gradient pass leaves it", "Remove that directory"
        ) from error
    if found != key:
        differing = [f"{name} ({found.get(name)} there, {key[name]} here)" for name in key if found.get(name) != key[name]]
        raise RecipeError(
            f"{store} holds the gradients of another run: {'; '.join(differing)}",
            "the same run, or an empty directory",
            "Choose another directory",
        )
    if missing := [str(file) for i in range(blocks) if not (file := block_file(store, i)).is_file()]:
        raise RecipeError(f"{missing[0]} is missing", "the files of a finished gradient pass", f"Remove {store}")
    return True
