"""The recipe: every choice of a run in one flat, frozen model."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from bakron import resolution
from bakron.resolution import DAMPINGS

Method = Literal["rtn", "gptq", "bakron", "boa", "yaqa", "bakron-mlp-local", "bakron-fully-local", "bakron-backprop"]
Hessian = Literal["input", "attention-local", "value-local", "heads-local", "mlp-local", "fully-local", "backprop"]
PRESETS: dict[str, dict[str, Any]] = {  # methods that are short for settings of method bakron
    # Tseng et al. 2025 with sketch B: both factors of the original model, one step on whole sequences, from the last entry to the first. Levels stay ours.
    "yaqa": {
        "hessian": "backprop",
        "factor": "sequence",
        "inputs": "original",
        "damping": "mean",
        "damp_a": 0.01,
        "damp_b": 0.01,
        "order": "reversed",
    },
    # Kim et al. 2025: each head's scores and output; per-head curvatures are averages, so K-FAC. Its order is the natural one; levels stay ours.
    "boa": {"hessian": "heads-local", "factor": "kfac", "damping": "mean", "damp_a": 0.01, "damp_b": 0.01},
    # The variants of Birnick and Saab 2026; factor shampoo, theirs that usually wins.
    "bakron-mlp-local": {"hessian": "mlp-local", "factor": "shampoo"},
    "bakron-fully-local": {"hessian": "fully-local", "factor": "shampoo"},
    "bakron-backprop": {"hessian": "backprop", "factor": "shampoo"},
}
FACTOR_FORMS = ("kfac", "shampoo", "shampoo:K", "mixed", "sequence", "kl", "kl:K")  # K = number of steps, 1 to 99
OF_THE_MACHINE = (
    "memory",
    "boundary_memory",
    "on_failure",
    "verify",
)  # fields that do not touch what is done already: a run may go on with others
FACTOR_PATTERN = re.compile(r"kfac|mixed|sequence|(shampoo|kl)(:[1-9]\d?)?")
Labels = Literal["sampled", "empirical"]
Scale = Literal["absmax", "mse", "curvature"]
Damping = Literal["diagonal", "mean"]
Order = Literal["natural", "diagonal", "min-pivot", "reversed"]
Accumulate = Literal["float32", "float64"]
Inputs = Literal["quantized", "original"]
Format = Literal["compressed-tensors", "gptq", "packed", "gguf", "dense"]
GgufType = Literal["q4_0", "q4_1", "q8_0", "q2_k", "q3_k", "q4_k", "q6_k"]
Precision = Literal["bfloat16", "float32"]
OnFailure = Literal["stop", "fallback"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Damp = Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["auto"]


class Recipe(BaseModel):
    """Every choice of a quantization run; `None` means "what fits the method", and `resolve` says what that is (a preset becomes what it is short for).

    Construct one with `recipes.from_dict` or `recipes.load` to have mistakes reported as `RecipeError`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Method = Field(
        "bakron",
        description="How weights are rounded: rtn = each to its nearest level; gptq = with error feedback along the inputs of a layer; "
        "bakron = with error feedback along inputs and outputs. Short for bakron with that hessian and factor shampoo: bakron-mlp-local, "
        "bakron-fully-local, bakron-backprop. With mean damping 0.01: boa, for heads-local and kfac; yaqa, for backprop, sequence, original "
        "inputs and reversed order. Settings given beside one of these win over it.",
    )
    hessian: Hessian | None = Field(
        None,
        description="What measures the harm of an error: input = the inputs of each layer alone; attention-local = attention scores, for q and "
        "k; value-local = attention output, for v; heads-local = both of these; mlp-local = MLP output, for up and gate; fully-local = all of these (other "
        "layers: input); backprop = gradients of the whole model's loss. Default: input for gptq, backprop for bakron.",
    )
    factor: str | None = Field(
        None,
        description="How gradients become a factor for the inputs (A) and one for the outputs (B): kfac = separate averages; shampoo = "
        "each weighted by the other side, shampoo:K = K times over; mixed = A of shampoo, B of kfac (default); sequence = of whole "
        "sequences' gradients (implies inputs original); kl = weighted by the other side's inverse, kl:K = K times over (3). Local Hessians "
        "know kfac, shampoo and mixed; input has no use for it.",
        json_schema_extra={"forms": list(FACTOR_FORMS)},
    )
    labels: Labels | None = Field(
        None,
        description="Whose next tokens give the gradients: sampled = the model's own predictions, which measures divergence from the model "
        "(default); empirical = the text's. Only with backprop.",
    )
    samples: int | None = Field(
        None,
        ge=1,
        le=99,
        description="Labels sampled a token, each with a backward pass of its own: less noise in B and in the weights of A, for as many times the "
        "time of the gradient pass's backward half. Default 1. Only with backprop.",
    )
    clip: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Quantile, such as 0.99, to which larger weights of tokens in A and in B (sequence: of sequences) are lowered. Default: "
        "none. Only with backprop, and not with kfac, which weighs all tokens alike.",
    )
    skip_first: bool = Field(
        False, description="Leave the first token of each sequence, often an attention sink, out of A and B. Default: it counts."
    )
    levels: int | None = Field(
        None, ge=2, le=256, description="Number of values that a weight can take within its group, for example 7. Give this or bits."
    )
    bits: int | None = Field(None, ge=2, le=8, description="Bits per weight: short for 2**bits levels. Default 4, if levels is not given.")
    group_size: int | None = Field(
        64, description="Consecutive inputs that share one scale; must divide the width of each layer. -1 = one scale per output row."
    )
    symmetric: bool = Field(True, description="Levels lie evenly around zero. If not, each group also has a zero point.")
    scale: Scale | None = Field(
        None,
        description="How a group's scale is chosen: absmax = its largest weight fits; mse = least squared error; curvature = least squared "
        "error, each weight counting as much as its input matters. Default: absmax for rtn, else curvature.",
    )
    damping: Damping | None = Field(
        None,
        description="What is added to a factor's diagonal before factoring: diagonal = a share of each entry (default); mean = a share of "
        "the mean entry, the same for all.",
    )
    damp_a: Damp | None = Field(
        None,
        description="Share added to the input factor A. More damping trusts the data less. Default 0.1; auto = 0.03, 0.1 or 0.3, per layer, "
        "by its error on an eighth of the sequences that is kept out of the Hessians for it (backprop only).",
        json_schema_extra={"forms": ["NUMBER", "auto"]},
    )
    damp_b: Damp | None = Field(
        None,
        description="Share added to the output factor B, which is noisier than A. Default 1.0; bakron only. auto = 0.3, 1, 3 or no B at all, per "
        "layer, by its error on an eighth of the sequences that is kept out of the Hessians (backprop only).",
        json_schema_extra={"forms": ["NUMBER", "auto"]},
    )
    order: Order | None = Field(
        None,
        description="In which order inputs and outputs of a layer are rounded; what comes first is made up for by all that follows. natural = as they "
        "come (default); diagonal = largest diagonal entry of A or B first (act-order); min-pivot = smallest remaining pivot last; reversed = "
        "from the last to the first. Groups of scales stay as they are.",
    )
    refit: bool = Field(
        False,
        description="After rounding, fit the scales to the codes, and round once more on the new scales where that helps. Never raises the layer's loss.",
    )
    polish: int | None = Field(
        None,
        ge=1,
        le=99,
        description="After rounding, so many sweeps of coordinate descent over the codes. Never raises the layer's loss. Default: none.",
    )
    inputs: Inputs | None = Field(
        None,
        description="Whose activations a layer is calibrated on: quantized = those of the blocks before it as already quantized (default), "
        "so that later layers make up for earlier ones; original = those of the unchanged model.",
    )
    data: str = Field(
        "builtin",
        min_length=1,
        description="Calibration text: a .txt, .jsonl or .parquet file (file.jsonl:column), a hub data set (org/name:split:column), or "
        "builtin = text that comes with Python.",
    )
    sequences: int = Field(64, ge=1, description="Number of calibration sequences. More of them make a better Hessian and a longer run.")
    length: int = Field(512, ge=2, description="Tokens per calibration sequence.")
    seed: int = Field(
        0, ge=0, le=2**63 - 1, description="Seed of everything random: which sequences are taken, and the labels sampled for backprop."
    )
    device: str = Field("cpu", min_length=1, description="Where to compute: cpu, cuda, cuda:1, ...")
    format: Format = Field(
        "compressed-tensors",
        description="How the checkpoint is written: compressed-tensors = packed integers and scales (small; loads in transformers and "
        "vLLM); gptq = the layout of GPTQModel (2, 3, 4 or 8 bits; float16 scales); packed = whole codes in a fraction of a bit (smallest; loads "
        "in transformers after import bakron.reader); gguf = one file for llama.cpp; dense = plain weights, already rounded (as large as "
        "the original; loads everywhere).",
    )
    gguf_type: GgufType | None = Field(
        None,
        description="How llama.cpp is to store a layer: q4_0 = up to 16 levels; q4_1 = 16 with zero points; q8_0 = up to 256; these in groups of 32. "
        "q3_k = 8 levels, q6_k = 64, q2_k = 4 with offsets, in groups of 16; q4_k = 16 with offsets, in groups of 32: scales and offsets of these are "
        "themselves quantized, and layers must be multiples of 256 wide. "
        "Default: what fits the levels. Only with format gguf.",
    )
    verify: bool = Field(
        True,
        description="Load the written checkpoint again with its own reader, where that is installed, and compare every layer with its codes.",
    )
    dtype: Dtype = Field("auto", description="Precision of scales and of all that stays unquantized; auto = that of the original model.")
    batch: int = Field(8, ge=1, description="Sequences per forward pass. Fewer need less memory; the result is the same up to rounding.")
    precision: Precision = Field(
        "bfloat16",
        description="Products of forward and backward passes and Hessian sums: bfloat16 = may round their inputs to bfloat16 where the "
        "processor is faster at it, sums stay float32; float32 = never. The solver always computes in float32 or better.",
    )
    accumulate: Accumulate | None = Field(
        None,
        description="Precision of the products and sums that make Hessians: float32 (default) or float64, which costs twice the memory and more than twice the "
        "time of them.",
    )
    gate: bool = Field(
        False,
        description="Keep an eighth of the sequences out of the Hessians, round each layer with A and B, with A alone and with an unweighted A, "
        "and choose A and B unless another one does less harm on the gradients held out, by more than its standard error. Then round with what was "
        "chosen and all sequences. Four solves instead of one; bakron with backprop only.",
    )
    on_failure: OnFailure = Field(
        "stop",
        description="What happens to a layer whose A or B cannot be factored even with the largest damping: stop = the run stops and names it; "
        "fallback = it is rounded without B, or to nearest if A is the one; such layers are counted, and the exit status is 3.",
    )
    include: str | None = Field(
        None,
        description="Quantize only layers whose names match one of these patterns, such as '*.mlp.*,*.0.*' (* stands for anything, commas "
        "separate). Default: all linear layers of the blocks.",
    )
    exclude: str | None = Field(
        None, description="Leave layers alone whose names match one of these patterns, such as '*.down_proj'; they keep their precision."
    )
    diagnostics: bool = Field(
        False,
        description="Also record, per layer, how much of each factor's trace lies in the largest tenth of its eigenvalues and, with gate or damping auto, how "
        "well the factors fit the gradients held out. Costs an eigenvalue problem a factor, and products of all pairs of tokens held out.",
    )
    boundary_memory: str | None = Field(
        None,
        description="Memory for what is kept between blocks during the gradient pass, such as 800MB or 4GB. Less means more forward passes and "
        "the same result. Default: as much as one input per block takes. Only with backprop.",
    )
    memory: str | None = Field(
        None,
        description="Memory for the hidden states and gradients of all calibration tokens, such as 4GB; the rest of them waits in files in OUT. "
        "Slower, and the same result. Default: no limit.",
    )
    factors: str | None = Field(
        None,
        description="Directory that keeps the gradient pass, so that later runs with the same model, data and seed reuse it. Only with "
        "backprop.",
    )

    @field_validator("factor")
    @classmethod
    def _factor(cls, value: str | None) -> str | None:
        if value is not None and not FACTOR_PATTERN.fullmatch(value):
            raise ValueError("no factorisation")
        return value

    @field_validator("include", "exclude", mode="before")
    @classmethod
    def _patterns(cls, value: object) -> object:
        joined = ",".join(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else value
        if isinstance(joined, str) and not all(one.strip() for one in joined.split(",")):
            raise ValueError("an empty pattern")
        return joined

    @field_validator("boundary_memory", "memory", mode="before")
    @classmethod
    def _size(cls, value: object) -> str | None:
        if value is None:
            return None
        size_in_bytes(str(value))
        return str(value)

    @field_validator("group_size")
    @classmethod
    def _group_size(cls, value: int | None) -> int | None:
        if value is None or value == -1:
            return None
        if value < 1:
            raise ValueError("group size below one")
        return value

    @property
    def autos(self) -> tuple[str, ...]:
        """Fields whose value is found layer by layer."""
        return tuple(name for name in DAMPINGS if getattr(self, name) == "auto")

    @property
    def chooses(self) -> bool:
        """Whether each layer is rounded in several ways, one of which is chosen on sequences that are kept out of the Hessians."""
        return self.gate or bool(self.autos)

    def resolve(self) -> Recipe:
        """Fill in every choice that is left open, and refuse choices that contradict or do nothing.

        Returns:
            A recipe whose fields are `None` only where they have no meaning for its method. Resolving it again changes nothing.

        Raises:
            RecipeError: Two fields contradict each other, or a given field would have no effect.
        """
        if self.method in PRESETS:
            open_ = {name: value for name, value in PRESETS[self.method].items() if getattr(self, name) is None}
            return self.model_copy(update={"method": "bakron", **open_}).resolve()
        if self.format == "gguf" and (open_ := resolution.open_for_gguf(self)):
            return self.model_copy(update=open_).resolve()
        resolution.refuse(self)
        return self.model_copy(update=resolution.filled(self))


def size_in_bytes(text: str) -> int:
    """Bytes of a size such as "800MB", "4GB", "1.5GiB" or "4096".

    Raises:
        ValueError: It is no size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]?)(i?)B?", text.strip(), flags=re.IGNORECASE)
    if not found or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is no size")
    power = " kmgt".index(found[2].lower() or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
