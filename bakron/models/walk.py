"""Run a causal language model block by block, in any order, with every block getting its own mask and position embeddings, and its weights when its turn comes."""

from __future__ import annotations

import copy
import fnmatch
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bakron import ranks
from bakron.errors import ModelError, RecipeError
from bakron.models.experts import unfuse
from bakron.models.layout import layout_of
from bakron.models.linears import Linear, as_linear, output_logits
from bakron.models.load import check_length
from bakron.models.room import Room
from bakron.models.weights import Filled, Weights
from bakron.process import trim


class Walk:
    """A model as a list of blocks that map hidden states `[b, T, d]` to hidden states.

    Args:
        model: A Hugging Face causal language model of a known layout, on the CPU, or with its parameters on the meta device and `weights` given. Fused
            experts are taken apart.
        length: Tokens of every sequence, T.
        device: Where blocks run; each is moved there for its turn only.
        batch: Sequences per forward pass.
        precision: "bfloat16" lets products of blocks and head round their inputs to bfloat16 (or TF32) where the processor is faster at it, with sums
            in float32; on processors without matrix units for it this still selects the faster float32 kernels. "float32" forbids it.
        weights: Where the weights of blocks, embeddings and head come from, each for its turn only; None if the model has them.
        room: Hands out hidden states and gradients; None for plain memory.

    Attributes:
        excluded: Names of linears that are not to be quantized.
        runs: Forward passes of all sequences through single blocks so far, and, counted by those who do them, backward ones.

    Raises:
        ModelError: Unknown architecture, or a linear of its layout is missing, of another kind, or shares its weight with another one.
    """

    def __init__(
        self,
        model: nn.Module,
        length: int,
        device: str | torch.device = "cpu",
        batch: int = 8,
        precision: str = "bfloat16",
        weights: Weights | None = None,
        room: Room | None = None,
    ) -> None:
        self.model, self.length, self.batch, self.device = model, length, batch, torch.device(device)
        self.room = room or Room()
        self.runs = {"forward": 0, "backward": 0}
        self.excluded: set[str] = set()
        self._weights = weights
        self._before = 0  # blocks of the model that come before the first one of these
        self._loaded: tuple[int, Filled] | None = None
        self.precision = {"bfloat16": "medium", "float32": "highest"}[precision]
        self.layout = layout_of(model.config.model_type)  # type: ignore[union-attr, arg-type]
        self.blocks: list[nn.Module] = list(model.get_submodule(self.layout.blocks))  # type: ignore[arg-type]
        self.norm, self.head = model.get_submodule(self.layout.norm), model.get_submodule(self.layout.head)
        self._experts = unfuse(model)
        owners: dict[int, str] = {}
        for i, block in enumerate(self.blocks):
            for name in self.linears(i):
                whole = f"{self.prefix(i)}.{name}"
                owner = owners.setdefault(id(block.get_submodule(name).weight), whole)
                if owner != whole:  # its Hessian is that of all its uses together, and rounding it here changes it there
                    raise ModelError(f"{whole} is the same weight as {owner}", "a weight of its own for every linear")
        check_length(model, length)
        self._arguments = self._record_arguments()

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def only(self, i: int) -> Walk:
        """The same model with block i for its only one, with counters of its own. Only one of the two may have a block in memory."""
        self.unload()
        walk = copy.copy(self)
        walk.blocks, walk.runs, walk._before = self.blocks[i : i + 1], dict.fromkeys(self.runs, 0), self._before + i
        walk._experts, walk._arguments = self._experts[i : i + 1], self._arguments[i : i + 1]
        return walk

    def prefix(self, i: int) -> str:
        """Name of block i within the model, as in the checkpoint."""
        return f"{self.layout.blocks}.{self._before + i}"

    def shared_inputs(self, i: int) -> tuple[tuple[str, ...], ...]:
        """The linears of block i; those in one tuple see the same input."""
        return self.layout.inputs_with(self._experts[i])

    def linears(self, i: int) -> dict[str, Linear]:
        """Linears of block i by their name within the block, in the order of the layout.

        Raises:
            ModelError: One is missing or of another kind.
        """
        found = {}
        for name in (name for names in self.shared_inputs(i) for name in names):
            try:
                module = self.blocks[i].get_submodule(name)
            except AttributeError as error:
                raise ModelError(f"block {i} has no {name}", f"the layout of {self.model.config.model_type}") from error  # type: ignore[union-attr]
            found[name] = as_linear(module, f"{name} of block {i}", self.layout.transposed)
        return found

    def choose(self, include: str | None, exclude: str | None) -> dict[str, int]:
        """Choose the linears that are to be quantized, by patterns separated by commas, as in file names.

        Returns:
            Linears of the model that each pattern matches.

        Raises:
            RecipeError: A pattern matches none, or none are left.
        """
        names = [f"{self.prefix(i)}.{name}" for i in range(len(self)) for name in self.linears(i)]
        matches = {
            pattern.strip(): set(fnmatch.filter(names, pattern.strip()))
            for pattern in ",".join(filter(None, (include, exclude))).split(",")
            if pattern
        }
        for pattern, found in matches.items():
            if not found:
                raise RecipeError(f"the pattern {pattern} matches none of the model's {len(names)} linears", f"names such as {names[0]}")
        wanted = set().union(*(matches[one.strip()] for one in include.split(","))) if include else set(names)
        self.excluded = set(names) - wanted
        for pattern in exclude.split(",") if exclude else ():
            self.excluded |= matches[pattern.strip()]
        if len(self.excluded) == len(names):
            raise RecipeError(f"include and exclude leave none of the model's {len(names)} linears", "at least one")
        return {pattern: len(found) for pattern, found in matches.items()}

    def chosen(self, i: int) -> list[str]:
        """Names of the linears of block i that are to be quantized."""
        return [name for name in self.linears(i) if f"{self.prefix(i)}.{name}" not in self.excluded]

    def kinds(self) -> list[list[int]]:
        """Blocks of the same shapes of which the same linears are to be quantized, such as those with experts and those without."""
        found: dict[Any, list[int]] = {}
        for i in range(len(self)):
            shapes = tuple((name, tuple(linear.weight.shape)) for name, linear in self.linears(i).items())
            found.setdefault((self.shared_inputs(i), shapes, tuple(self.chosen(i))), []).append(i)
        return list(found.values())

    def owners(self, i: int) -> dict[str, int]:
        """Which process of the run rounds which linear of block i."""
        chosen = set(self.chosen(i))
        return ranks.owners(
            {name: (linear.out_features, linear.in_features) if name in chosen else (0, 0) for name, linear in self.linears(i).items()}
        )

    def arguments(self, i: int) -> dict[str, Any]:
        """What the model passes to block i beside the hidden states: mask, position embeddings, for one sequence."""
        return self._arguments[i]

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states that enter block 0, `[N, T, d]` on the CPU, of tokens `[N, T]`."""
        result: list[Tensor] = []
        rows = slice(0, 0)

        def keep(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
            if not result:
                result.append(self.room.empty((len(ids), *hidden.shape[1:]), hidden.dtype))
            result[0][rows] = hidden.detach()
            return hidden

        with self._embeddings(), self._replaced(lambda i: keep if i == 0 else _identity), torch.no_grad():
            for start in range(0, len(ids), self.batch):
                rows = slice(start, start + self.batch)
                self._body(input_ids=ids[rows], use_cache=False)
                self.room.release()
        return result[0]

    def run(self, i: int, hidden: Tensor) -> Tensor:
        """Block i on hidden states `[b, T, d]`, on the block's device; differentiable if gradients are enabled."""
        return self.blocks[i](hidden, **self._arguments[i])

    def apply(self, i: int, hidden: Tensor, visit: Callable[[int, Tensor], None] | None = None) -> Tensor:
        """Block i over all sequences, batch by batch, without gradients.

        Args:
            i: Block.
            hidden: `[N, T, d]` on the CPU.
            visit: Called after each batch with (first sequence, hidden batch on the device).

        Returns:
            `[N, T, d]` on the CPU.
        """
        result = self.room.empty_like(hidden)
        self.runs["forward"] += 1
        with self.resident(i), torch.no_grad():
            for start, batch in self.batches(hidden):
                result[start : start + len(batch)] = self.run(i, batch).to(result.device)
                if visit is not None:
                    visit(start, batch)
        return result

    def first_bad(self, i: int, hidden: Tensor) -> str:
        """Where activations of block i are not finite first: sequence and module.

        Args:
            i: Block.
            hidden: What enters it, `[N, T, d]`.
        """
        if not bool(torch.isfinite(hidden).all()):
            return (
                f"the inputs of {self.prefix(i)} in sequence {int((~torch.isfinite(hidden).flatten(1).all(1)).nonzero()[0])}{ranks.whose()}"
            )
        first: list[tuple[str, int]] = []

        def look(name: str, start: int, output: Any) -> None:
            whole = output[0] if isinstance(output, tuple) else output
            if not first and isinstance(whole, Tensor) and whole.ndim > 1 and not bool(torch.isfinite(whole).all()):
                first.append((name, start + int((~torch.isfinite(whole).flatten(1).all(1)).nonzero()[0])))

        start = 0
        names = {name: module for name, module in self.blocks[i].named_modules() if name}
        handles = [
            module.register_forward_hook(lambda _m, _a, output, name=name: look(name, start, output)) for name, module in names.items()
        ]
        try:
            with self.resident(i), torch.no_grad():
                for begin, batch in self.batches(hidden):
                    start = begin
                    self.run(i, batch)
                    if first:
                        return f"{self.prefix(i)}.{first[0][0]} in sequence {first[0][1]}{ranks.whose()}"
        finally:
            for handle in handles:
                handle.remove()
        return f"the outputs of {self.prefix(i)}"

    def batches(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first sequence, batch on the device) over `[N, T, d]`."""
        for start in range(0, len(hidden), self.batch):
            yield start, hidden[start : start + self.batch].to(self.device)
            self.room.release()

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output projection of `[..., d]`; differentiable."""
        return output_logits(self.model, self.norm(hidden), self.layout.head)

    def load(self, i: int) -> None:
        """Bring the weights of block i into memory, in place of those of the block before: changes of a block last until another one is loaded."""
        if self._weights is None or (self._loaded is not None and self._loaded[0] == i):
            return
        self.unload()
        self._loaded = i, Filled(self.blocks[i], self.prefix(i), self._weights.get)

    def unload(self) -> None:
        """Let go of the block in memory."""
        if self._loaded is not None:
            self._loaded[1].empty()
            self._loaded = None
            trim()

    @contextmanager
    def resident(self, i: int) -> Iterator[nn.Module]:
        """Block i in memory and on the device for the time of a with statement."""
        self.load(i)
        block = self.blocks[i].to(self.device)
        try:
            with self._products():
                yield block
        finally:
            if self.device.type != "cpu":
                block.to("cpu")

    @contextmanager
    def head_resident(self) -> Iterator[None]:
        """Final norm and head in memory and on the device for the time of a with statement."""
        with self._filled(self.layout.norm, self.layout.head):
            self.norm.to(self.device), self.head.to(self.device)
            try:
                with self._products():
                    yield
            finally:
                if self.device.type != "cpu":
                    self.norm.to("cpu"), self.head.to("cpu")

    def _embeddings(self) -> AbstractContextManager[None]:
        """All of the body but its blocks in memory, for the time of a with statement."""
        within = f"{self.layout.body}." if self.layout.body else ""
        parts = [f"{within}{name}" for name, _ in self._body.named_children()]
        return self._filled(*(name for name in parts if name != self.layout.blocks and name != self.layout.head))

    @contextmanager
    def _filled(self, *parts: str) -> Iterator[None]:
        """Modules with their weights in memory for the time of a with statement; no block beside them."""
        if self._weights is None:
            yield
            return
        self.unload()
        filled: list[Filled] = []
        try:
            for name in parts:
                filled.append(Filled(self.model.get_submodule(name), name, self._weights.get))
            yield
        finally:
            for one in reversed(filled):
                one.empty()

    @contextmanager
    def _products(self) -> Iterator[None]:
        """The float32 product setting of torch as the recipe wants it, and the caller's again afterwards."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    @property
    def _body(self) -> nn.Module:
        return self.model.get_submodule(self.layout.body)

    def _record_arguments(self) -> list[dict[str, Any]]:
        """What the model passes to each block beside the hidden states: masks differ between blocks (sliding windows), so each keeps its own.

        Sequences have one length and no padding, so the arguments of one sequence serve every batch by broadcasting.
        """
        recorded: dict[int, dict[str, Any]] = {}

        def recorder(i: int) -> Callable[..., Tensor]:
            names = [*inspect.signature(type(self.blocks[i]).forward).parameters][2:]  # without self and the hidden states

            def forward(hidden: Tensor, *positional: Any, **arguments: Any) -> Tensor:
                arguments = dict(zip(names, positional)) | arguments
                recorded[i] = {name: _to(value, self.device) for name, value in arguments.items()}
                return hidden

            return forward

        with self._embeddings(), self._replaced(recorder), torch.no_grad():
            self._body(input_ids=torch.zeros(1, self.length, dtype=torch.long), use_cache=False)
        if len(recorded) != len(self.blocks):
            raise ModelError(f"the model runs {len(recorded)} of its {len(self.blocks)} blocks in a forward pass", "each block once")
        return [recorded[i] for i in range(len(self.blocks))]

    @contextmanager
    def _replaced(self, forward_of: Callable[[int], Callable[..., Tensor]]) -> Iterator[None]:
        """Every block's forward replaced, so that a model's own forward prepares arguments without computing blocks."""
        blocks = list(self.model.get_submodule(self.layout.blocks))  # type: ignore[arg-type]
        for i, block in enumerate(blocks):
            block.forward = forward_of(i)
        try:
            yield
        finally:
            for block in blocks:
                del block.forward


def _identity(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return type(value)(_to(v, device) for v in value) if isinstance(value, tuple | list) else value
