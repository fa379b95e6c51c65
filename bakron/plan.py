"""What a run will take, before it is begun: memory by stage, disk, passes, and time, or the problems that can be seen already, of which one may hide another.

Memory, in bytes, of float32 numbers unless said otherwise. P: parameters of the largest block; E: embeddings; H: head and final norm; X = N T d, the
hidden states of all tokens; b: tokens of a batch; n, m: inputs and outputs of linears; V: vocabulary.

| stage    | on top of the process itself |
|----------|---|
| survey   | the largest tensor, as stored and twice in float32 |
| embed    | E and X |
| head     | H, the kept boundaries, 1 + samples X, and for 128 tokens 7 V numbers, three of them float64 |
| backward | P, the kept boundaries, 1 + samples X, what one batch's graph holds, and sum m^2 for B |
| hessian  | P, 2 X, what one batch holds, sum n^2 for A, and while one is made into a whole matrix three of the largest; B as stored and unpacked |
| solve    | P thrice (rounded values, codes), X, all A and B of the block, and of one linear: both damped and factored in float64, the factors in float32, 6 m n |
| write    | the largest tensor, encoded |

`memory` bounds what boundaries and X take together. The process itself, with its libraries, is measured when the plan is made.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bakron import config, rundir
from bakron import data as corpus
from bakron.errors import BakronError, OutputError
from bakron.job import Job, codes_of, prepare
from bakron.models import load as models
from bakron.probe import seconds
from bakron.process import memory as measured

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from bakron.config import Recipe
    from bakron.models.walk import Walk
    from bakron.pipeline import Rounded

Log = Callable[[str], None]


@dataclass
class Plan:
    """A plan.

    Attributes:
        problems: What would stop the run, each in a sentence.
        warnings: What would not.
        memory: Bytes of the process by stage, and the largest of them as `peak`; None where there is a problem.
        disk: Bytes of `checkpoint` (the weight files), `codes` and, while the run lasts, `gradients`, `spill`; `free` on the disk now.
        passes: Runs of single blocks over all tokens, `forward` and `backward`.
        seconds: By stage, and in `total`.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    memory: dict[str, int] | None = None
    disk: dict[str, int] | None = None
    passes: dict[str, int] | None = None
    seconds: dict[str, float] | None = None


def plan(
    model: str | Path | PreTrainedModel,
    out: str | Path | None,
    recipe: Recipe,
    log: Log = lambda _: None,
    *,
    probe: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
    given: corpus.Tokens | None = None,
) -> Plan:
    """Look at model, text and machine as `quantize` would, and say what the run takes. Nothing is written but to a temporary directory.

    Args:
        model: Hugging Face directory, hub name, GGUF file, or a model in memory.
        out: Where the run would go, or None to leave that out.
        recipe: Resolved.
        log: Called with one-line messages.
        probe: Measure how long one block takes.
        tokenizer: Of a model in memory.
        given: Ready token ids in place of the recipe's text.

    Returns:
        The plan; without figures where there is a problem.
    """
    found = Plan()

    def seen(message: str) -> None:
        (found.warnings.append(message.removeprefix("warning: ")) if message.startswith("warning: ") else log(message))

    def tried(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except BakronError as error:
            found.problems.append(str(error))

    target = None if out is None else tried(lambda: rundir.check_output(out))
    if recipe.factors:
        tried(lambda: rundir.check_store(recipe.factors or ""))
    text = recipe.method == "rtn" or given is not None or tried(lambda: corpus.check(recipe.data) is None)
    source = tried(lambda: models.find(model, tokenizer))
    if source is None or not text:
        return found
    with tempfile.TemporaryDirectory(prefix="bakron-plan-") as scratch:
        start = time.perf_counter()
        job = tried(lambda: prepare(source, recipe, seen, Path(scratch), given))
        if job is None:
            return found
        surveyed = time.perf_counter() - start
        found.passes = tried(lambda: passes(job))
        if found.passes is None:
            return found
        found.disk = disk(job)
        if target is not None:
            tried(lambda: check_disk(job, target))
            found.disk["free"] = free(target)
        if probe and not found.problems:
            found.seconds = seconds(job, found.passes, Path(scratch), surveyed)
        found.memory = memory(job)
    return found


def passes(job: Job) -> dict[str, int]:
    """Runs of single blocks over all calibration tokens, as the run counts them itself in its summary."""
    from bakron.hessian import LOCAL, schedule
    from bakron.hessian.factor import weighting
    from bakron.hessian.gradients import slots_in
    from bakron.hessian.local import parts_of

    recipe, blocks, walk = job.recipe, len(job.walk), job.walk
    if job.tokens is None:
        return {"forward": 0, "backward": 0}
    busy = [i for i in range(blocks) if walk.chosen(i)]  # others need no Hessians
    forward, backward = blocks - 1, 0
    if recipe.hessian == "backprop":
        kind = weighting(recipe.factor or "mixed")
        limit = None if recipe.boundary_memory is None else config.size_in_bytes(recipe.boundary_memory)
        forward += schedule.forward_runs(blocks + 1, slots_in(job.walk, job.tokens.ids, limit, recipe.samples or 1))
        samples = recipe.samples or 1
        backward += samples * blocks * kind.steps * (1 if recipe.clip is None or not kind.b_by_input else 2)
        backward += samples * len(busy) if job.held else 0  # of the sequences held out, before the block is rounded
        unweighted = bool(job.held) and kind.a_by_gradient and recipe.gate
        forward += len(busy) * (int(not kind.by_sequence) + int(unweighted))
    else:
        forward += sum(1 + bool(parts_of(walk, i, LOCAL.get(recipe.hessian or "", ()))) for i in busy)
    return {"forward": forward, "backward": backward}


def disk(job: Job) -> dict[str, int]:
    """Bytes that the run writes: what stays, and what is there while it lasts.

    Returns:
        `checkpoint`: the weight files to the byte, headers included (a GGUF file without its vocabulary); `codes`: codes, scales and zero points;
        `gradients`: as long as blocks are to be rounded; `spill`: activations beyond the memory for them.
    """
    from bakron.export import Linear, form_of
    from bakron.export.checkpoint import sizes
    from bakron.export.files import encoder

    recipe, blocks = job.recipe, range(len(job.walk))
    shapes = {f"{job.walk.prefix(i)}.{name}": tuple(job.walk.linears(i)[name].weight.shape) for i in blocks for name in job.walk.chosen(i)}
    blanks = {shape: _blank(job, *shape) for shape in set(shapes.values())}
    each = {shape: sum(tensor.nbytes for tensor in codes_of({"": blank}).values()) for shape, blank in blanks.items()}
    codes = sum(each[shape] for shape in shapes.values())
    linears = {name: (lambda shape=shape: Linear(blanks[shape].codes, blanks[shape].grid)) for name, shape in shapes.items()}
    encode = encoder(form_of(recipe.format, recipe.gguf_type), job.content(Path()))
    checkpoint = sum(sizes(job.model, job.weights, job.dtype, linears, encode).values())
    hidden = 0 if job.tokens is None else _hidden(job)
    budget = None if recipe.memory is None else config.size_in_bytes(recipe.memory)
    return {
        "checkpoint": checkpoint,
        "codes": codes,
        "gradients": _gradients(job) if recipe.hessian == "backprop" and not recipe.factors else 0,
        "spill": 0 if budget is None else max(_sets(job) * hidden - budget, 0),
    }


def free(target: Path) -> int:
    """Bytes free on the disk of a directory that need not be there yet."""
    while not target.exists():
        target = target.parent
    return shutil.disk_usage(target).free


def check_disk(job: Job, target: Path, beside: int = 0) -> None:
    """Refuse a disk without room for the run.

    Args:
        job: What is to be done.
        target: Where.
        beside: Bytes of other files that are there while blocks are to be rounded.

    Raises:
        OutputError: There is not enough.
    """
    wanted, room = disk(job), free(target)
    rounded = all(rundir.codes_file(target, i).is_file() for i in range(len(job.walk)))
    meanwhile = 0 if rounded else wanted["gradients"] + wanted["spill"] + beside
    most = wanted["codes"] + max(wanted["checkpoint"], meanwhile)
    have = sum(file.stat().st_size for file in target.rglob("*") if file.is_file()) if target.is_dir() else 0  # of an unfinished run
    if most > room + have:
        raise OutputError(f"{room:,} bytes are free on the disk of {target}", f"{most:,} bytes for codes, gradients and checkpoint")


def memory(job: Job) -> dict[str, int]:
    """Bytes of the process by stage, by the formulas above, and the largest of them."""
    walk, shapes, recipe = job.walk, job.weights.shapes, job.recipe
    base = measured()["current"] or 0
    count = {name: math.prod(shape) for name, shape in shapes.items()}
    blocks = [f"{walk.prefix(i)}." for i in range(len(walk))]
    P = max(sum(size for name, size in count.items() if name.startswith(prefix)) for prefix in blocks)
    head = sum(size for name, size in count.items() if name.startswith((f"{walk.layout.head}.", f"{walk.layout.norm}.")))
    E = sum(size for name, size in count.items() if not name.startswith((walk.layout.blocks + ".", walk.layout.head + ".")))
    largest = max(count.values())
    stages = {"survey": 3 * largest, "write": 4 * largest}
    if job.tokens is not None:
        X, batch = job.tokens.ids.numel() * _width(job), min(recipe.batch, len(job.tokens.ids)) * job.tokens.ids.shape[1]
        budget = None if recipe.memory is None else config.size_in_bytes(recipe.memory) // 4

        def sets(number: float) -> int:
            return int(number * X if budget is None else min(number * X, budget))

        stages |= {"embed": E + sets(1)}
        kept = _kept(job) + (recipe.samples or 1) if recipe.hessian == "backprop" else 0
        if kept:
            vocabulary = count.get(f"{walk.layout.head}.weight", largest) // _width(job)
            stages |= {"head": head + sets(kept) + 128 * 10 * vocabulary, "backward": 0}
        stages |= {"hessian": 0, "solve": 0}
        for i, *_ in walk.kinds():
            linears, held = _shapes(walk, i), _held_in_batch(job, batch, i)
            squares_a, squares_b = _squares(job, i)
            top = max((n for _, n in linears.values()), default=0)
            if kept:
                of_b = sum(m * m for m, _ in linears.values())
                stages["backward"] = max(stages["backward"], P + sets(kept) + 2 * held + of_b + 2 * top * top)
            stages["hessian"] = max(stages["hessian"], P + sets(2) + held + squares_a + squares_b + 3 * top * top)
            solved = max((2 * 3 * n * n + (2 * 3 * m * m if squares_b else 0) + 6 * m * n for m, n in linears.values()), default=0)
            stages["solve"] = max(stages["solve"], 3 * P + sets(1) + squares_a + squares_b + solved)
    else:
        stages |= {"solve": P + 6 * max(math.prod(shape) for shape in shapes.values() if len(shape) > 1)}
    result = {name: base + 4 * size for name, size in stages.items()}
    return {"process": base} | result | {"peak": max(result.values())}


def _blank(job: Job, m: int, n: int) -> Rounded:
    """A linear of zeros, rounded: what is stored for it is as large as for any other of its shape."""
    import torch

    from bakron.pipeline import Rounded, fit_grid

    W = torch.zeros(m, n)
    grid = fit_grid(W, job.recipe.model_copy(update={"scale": "absmax"}), None, job.scale_dtype)
    return Rounded(W, torch.full((m, n), max(grid.low, 0), dtype=torch.int32), grid, {})


def _width(job: Job) -> int:
    return next(iter(job.walk.linears(0).values())).weight.shape[1]


def _hidden(job: Job) -> int:
    """Bytes of the hidden states of all tokens."""
    assert job.tokens is not None
    return job.tokens.ids.numel() * _width(job) * 4


def _kept(job: Job) -> int:
    """Block inputs that the gradient pass keeps at most, with those that are under way."""
    from bakron.hessian.gradients import slots_in

    assert job.tokens is not None
    limit = None if job.recipe.boundary_memory is None else config.size_in_bytes(job.recipe.boundary_memory)
    return slots_in(job.walk, job.tokens.ids, limit, job.recipe.samples or 1) + 1


def _sets(job: Job) -> int:
    """Sets of hidden states that are alive at most."""
    return 2 if job.tokens is None or job.recipe.hessian != "backprop" else _kept(job) + (job.recipe.samples or 1)


def _shapes(walk: Walk, i: int) -> dict[str, tuple[int, int]]:
    """Shapes `(m, n)` of the linears of block i that are to be quantized."""
    linears = walk.linears(i)
    return {name: tuple(linears[name].weight.shape) for name in walk.chosen(i)}


def _held_in_batch(job: Job, tokens: int, i: int) -> int:
    """Numbers that a batch keeps alive in block i: inputs and outputs of linears, and as much again between them."""
    return tokens * (2 * sum(linear.weight.shape[0] for linear in job.walk.linears(i).values()) + 4 * _width(job))


def _squares(job: Job, i: int) -> tuple[int, int]:
    """Numbers in all A and B of block i: of A one for each linear if tokens are weighted, else for each input; twice that with sequences held out."""
    from bakron.hessian.factor import weighting

    recipe, linears = job.recipe, _shapes(job.walk, i)
    weighted = recipe.hessian not in ("input", None) and weighting(recipe.factor or "mixed").a_by_gradient
    shared = [next((name for name in names if name in linears), None) for names in job.walk.shared_inputs(i)]
    squares_a = sum(n * n for name, (_, n) in linears.items() if weighted or name in shared)
    squares_a += sum(linears[name][1] ** 2 for name in shared if name is not None) if recipe.gate and weighted else 0
    squares_b = 0 if recipe.hessian == "input" else sum(m * m for m, _ in linears.values())
    times = 2 if job.held else 1
    return times * squares_a, times * squares_b


def _gradients(job: Job) -> int:
    """Bytes of the tensors that the gradient pass leaves on disk until every block is rounded, and of the gradient at which it goes on."""
    import torch

    from bakron.hessian.factor import pack, weighting

    assert job.tokens is not None
    kind, (sequences, length) = weighting(job.recipe.factor or "mixed"), job.tokens.ids.shape
    times, width = 2 if job.held else 1, getattr(torch, job.recipe.accumulate or "float32").itemsize
    shapes = [shape for i in range(len(job.walk)) for shape in _shapes(job.walk, i).values()]
    packed = {size: pack(torch.empty(size, size, device="meta")).numel() for size in {size for shape in shapes for size in shape}}
    every = 0
    for m, n in shapes:
        every += width * times * (packed[m] + (packed[n] if kind.by_sequence else 0)) + 16
        every += width * sequences * (1 if kind.by_sequence else 2 * length)
    samples = job.recipe.samples or 1
    held = (1 + samples) * 4 * job.held * length * _width(job)
    return every + len(job.walk) * held + samples * _hidden(job)


def show(found: Plan) -> str:
    """A plan in words."""
    lines = [f"problem: {problem}" for problem in found.problems] + [f"warning: {warning}" for warning in found.warnings]

    def sizes(figures: dict[str, int]) -> str:
        return ", ".join(f"{name} {value / 1e6:,.1f} MB" for name, value in figures.items())

    if found.memory:
        lines.append(f"memory   {sizes(found.memory)}")
    if found.disk:
        lines.append(f"disk     {sizes(found.disk)}")
    if found.passes:
        lines.append(f"passes   {found.passes['forward']:,} forward and {found.passes['backward']:,} backward, of one block each")
    if found.seconds:
        lines.append("time     " + ", ".join(f"{name} {value:,.0f} s" for name, value in found.seconds.items()))
    return "\n".join(lines)
