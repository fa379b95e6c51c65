"""llm-compressor: `BakronModifier`, in a recipe of `oneshot` in the place of `GPTQModifier`.

It keeps what GPTQModifier does around the solve (schemes, observers, the sequential pipeline, what is saved) and changes three things: before calibration, a
gradient pass over the same data gives every linear its B and every token its weight; A is accumulated with those weights; a weight is rounded by `bakron.solve`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.offload import disable_offloading
from compressed_tensors.offload.dist_utils import is_distributed
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
from compressed_tensors.utils import update_offload_parameter
from llmcompressor.core import State
from llmcompressor.modifiers.factory import ModifierFactory
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.utils.dev import get_main_device
from llmcompressor.utils.metric_logging import CompressionLogger
from pydantic import PrivateAttr
from torch import Tensor, nn

from bakron import rundir
from bakron.config import Recipe
from bakron.errors import DataError, ModelError, RecipeError
from bakron.grids import SCALES, UniformGrid
from bakron.hessian.factor import Gram, unpack, weighting
from bakron.hessian.gradients import block_file, gradient_pass
from bakron.kron import Kron
from bakron.models.layout import layout_of
from bakron.models.walk import Walk
from bakron.pipeline import damped
from bakron.solver import solve

STRATEGIES = (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL)


class BakronModifier(GPTQModifier):
    """Two-sided rounding as a modifier of llm-compressor's `oneshot`.

    Takes the arguments of `GPTQModifier` that say what is quantized to what (`scheme`, `config_groups`, `targets`, `ignore`, `actorder`, observers); integers of
    2 to 8 bits by group or channel. `dampening_frac`, `block_size` and `batched_quantization` are of no account. For a `factor` other than None, calibration
    sequences must be of one length without padding, and come in the same order each time (`oneshot(..., shuffle_calibration_samples=False)`), and the model must
    be one that `bakron quantize` knows, in host memory.

    Attributes:
        factor: A name in `bakron.FACTORS` but `sequence`; None: A of all tokens alike and B = I, which is GPTQ.
        scale: "observer": the scales of the scheme's observer, as GPTQModifier has them. Otherwise a scale rule of `UniformGrid.fit`, such as "curvature".
        damping: "diagonal" or "mean", see `Kron.damp`.
        damp_a: Amount for A.
        damp_b: Amount for B.
        seed: Of sampled labels.
        gradient_batch: Sequences that the gradient pass takes at a time.
    """

    actorder: Any = None
    factor: str | None = "mixed"
    scale: str = "observer"
    damping: str = "diagonal"
    damp_a: float = 0.1
    damp_b: float = 1.0
    seed: int = 0
    gradient_batch: int = 8

    _store: tempfile.TemporaryDirectory | None = PrivateAttr(None)
    _file: dict[str, tuple[Path, str]] = PrivateAttr(default_factory=dict)  # linear -> file of its block, name within it
    _weights: dict[nn.Module, Tensor] = PrivateAttr(default_factory=dict)
    _grams: dict[nn.Module, Gram] = PrivateAttr(default_factory=dict)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Check the settings, run the gradient pass on the model as it is, then what GPTQModifier does.

        Raises:
            RecipeError: A setting that cannot be meant, or a scheme that is not of integers by group or channel; before any work.
            DataError: Calibration batches that the gradient pass cannot use.
            ModelError: A model that it cannot walk.
        """
        if self.scale not in ("observer", *SCALES):
            raise RecipeError(f"scale {self.scale!r}", f"observer, {', '.join(SCALES)}")
        for group in self.resolved_config.config_groups.values():
            _check_scheme(group.weights)
        if is_distributed():
            raise RecipeError("several processes", "one: the factors of several are not summed here")
        if self.factor is not None:
            self._gradients(state)
        return super().on_initialize(state, **kwargs)

    def calibrate_module(self, module: nn.Module, args: tuple[Tensor, ...], _output: Tensor) -> None:
        """Hook: add a batch of a linear's inputs to its A, each token with its weight."""
        x = args[0].detach()
        name = self._module_names[module]
        if not isinstance(module, nn.Linear):
            raise ModelError(f"{name} is a {type(module).__name__}", "torch.nn.Linear")
        x = x if x.ndim == 3 else x[None]
        if module not in self._grams:
            self._grams[module] = Gram(module.in_features, x.device)
            self._num_samples[module] = torch.zeros((), dtype=torch.long)
        weight = None
        if self.factor is not None and weighting(self.factor).a_by_gradient:
            if module not in self._weights:
                file, short = self._stored(name)
                self._weights[module] = rundir.read_tensors(file)[f"{short}.gradient"].reshape(-1, x.shape[1])
            start = int(self._num_samples[module])
            weight = self._weights[module][start : start + len(x)].to(x.device)
        self._grams[module].add(x, weight)
        self._num_samples[module] += len(x)

    def compress_module_list(self, module_list: list[nn.Module]) -> None:
        """Round the linears that were calibrated, with scales of the observer or fitted."""
        for module in module_list:
            with torch.no_grad(), disable_offloading(), CompressionLogger(module) as logger:
                logger.set_results(name="BaKron", loss=self._round(module))
            self._num_compressed_modules += 1

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """What GPTQModifier does, and remove the gradients."""
        if self._store is not None:
            self._store.cleanup()
            self._store = None
        self._file = {}
        return super().on_finalize(state, **kwargs)

    def _gradients(self, state: State) -> None:
        """The gradient pass over the calibration data, into a temporary directory."""
        assert self.factor is not None
        try:
            weigh = weighting(self.factor)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        if weigh.by_sequence:
            raise RecipeError(f"factor {self.factor}, whose A is no weighted sum over tokens", "another factor")
        ids = _tokens(state.data.calib)
        device = next(state.model.parameters()).device
        if device.type != "cpu":
            raise ModelError(f"a model on {device}", "one in host memory", "Load it without device_map: oneshot moves one block at a time")
        if layout_of(state.model.config.model_type).expert_inputs:
            raise ModelError("a mixture of experts, whose experts llm-compressor takes apart in its own way", "factor None")
        walk = Walk(state.model, ids.shape[1], get_main_device(), self.gradient_batch)
        self._store = tempfile.TemporaryDirectory(prefix="bakron-gradients-")
        store = Path(self._store.name)
        gradient_pass(walk, ids, store, seed=self.seed, weighting=weigh, progress=lambda *_: None)
        for i in range(len(walk)):
            self._file |= {f"{walk.prefix(i)}.{name}": (block_file(store, i), name) for name in walk.linears(i)}

    def _stored(self, name: str) -> tuple[Path, str]:
        if name not in self._file:
            raise ModelError(f"{name} has no gradients", "a linear of a decoder block", "Put it in ignore, as one does with lm_head")
        return self._file[name]

    def _round(self, module: nn.Module) -> float:
        """Round one linear; returns the loss."""
        name, args = self._module_names[module], module.quantization_scheme.weights
        B = None
        if self.factor is not None:
            file, short = self._stored(name)
            B = unpack(rundir.read_tensors(file)[f"{short}.B"], module.out_features)
        gram = self._grams.pop(module)
        self._num_samples.pop(module), self._weights.pop(module, None)
        settings = Recipe(damping=self.damping, damp_a=self.damp_a, damp_b=self.damp_b)
        kron, _ = damped(Kron(gram.value(), B), settings, name)
        W = module.weight.detach().float().cpu()
        qparams = module.weight_observer.get_qparams()
        if self.scale == "observer":
            low, high = -(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1
            zero = None if args.symmetric else qparams["zero_point"].cpu().to(torch.int32)
            grid = UniformGrid(qparams["scale"].cpu().to(module.weight_scale.dtype), zero, low, high, args.group_size)
        else:
            grid = UniformGrid.fit(
                W, None, args.group_size, self.scale, args.symmetric, kron, bits=args.num_bits, dtype=module.weight.dtype
            )
            half = 0 if args.symmetric else 2 ** (args.num_bits - 1)  # zero points count from the middle of the range there
            if grid.zero is not None:
                grid = UniformGrid(grid.scale, grid.zero - half, grid.low - half, grid.high - half, grid.group_size)
        solution = solve(W, kron, grid, order=("diagonal" if args.actorder else "natural", "natural"))
        found = {"weight": solution.values, "weight_scale": grid.scale}
        if hasattr(module, "weight_zero_point"):
            found["weight_zero_point"] = torch.zeros_like(grid.scale) if grid.zero is None else grid.zero
        for key, value in found.items():
            there = getattr(module, key)
            update_offload_parameter(module, key, value.to(device=there.device, dtype=there.dtype))
        return solution.loss


def _check_scheme(args: QuantizationArgs | None) -> None:
    """Refuse what is no grid of integers by group or channel."""
    if args is None or args.type != QuantizationType.INT or args.strategy not in STRATEGIES:
        raise RecipeError(
            "a scheme without weights" if args is None else f"weights of type {args.type}, strategy {args.strategy}",
            "type int, strategy group or channel",
        )


def _tokens(batches: Any) -> Tensor:
    """Calibration sequences as `[N, T]`.

    Raises:
        DataError: There are none, they differ in length, are padded, or come in another order the second time.
    """
    if batches is None:
        raise DataError("no calibration data", "a dataset given to oneshot")
    first, second = (list(batches) for _ in range(2))
    ids = [batch["input_ids"] for batch in first]
    if lengths := sorted({one.shape[1] for one in ids}):
        if len(lengths) > 1:
            raise DataError(
                f"calibration sequences of {lengths[0]} to {lengths[-1]} tokens", "one length", "Use concatenate_data=True, or cut the text"
            )
    else:
        raise DataError("no calibration data", "at least one sequence")
    if any("attention_mask" in batch and not bool(batch["attention_mask"].all()) for batch in first):
        raise DataError("padded calibration sequences", "sequences without padding", "Use concatenate_data=True, or cut the text")
    if any(not torch.equal(one, batch["input_ids"]) for one, batch in zip(ids, second)):
        raise DataError(
            "calibration sequences in another order each time they are read",
            "the same order",
            "Give oneshot shuffle_calibration_samples=False",
        )
    return torch.cat(ids)


ModifierFactory.register("BakronModifier", BakronModifier)  # so that recipes in YAML know the name once this module is imported
