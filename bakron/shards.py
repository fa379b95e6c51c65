"""Job arrays: the Hessians of all linears are stored first, then any number of independent jobs round each its share of the linears.

Only with `inputs: original`, where a block's Hessians do not depend on how the blocks before it were rounded. `OUT/bakron/hessians/` has one file a linear: A and B
(packed triangles where they are symmetric to the bit), the weight, and what the log is to say of them; `manifest.json` beside them, written last, says that all
are there. `OUT/bakron/solved/` has the codes of the linears that are rounded, each with its line of the log. Every file appears whole or not at all, with a
checksum. `quantize` makes the blocks' codes from them, rounding what is left, and goes on as with any run whose blocks are rounded.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bakron import ranks, recipes, rundir
from bakron.errors import OutputError, RecipeError
from bakron.job import Done, Job, codes_of, make_estimator
from bakron.process import memory

if TYPE_CHECKING:
    import torch

    from bakron.config import Recipe
    from bakron.kron import Kron
    from bakron.pipeline import Clock

Progress = Callable[[str, int, int], None]
Log = Callable[[str], None]
Observe = Callable[[dict[str, Any]], None]
WHOLE = "a file of stored Hessians"
STEM = re.compile(r"block_\d{4,}\.\w+(\.\w+)*")
AGAIN = "Give the bakron prepare command again"


def check(recipe: Recipe) -> None:
    """Refuse a recipe whose Hessians cannot be stored before anything is rounded.

    Args:
        recipe: Resolved.

    Raises:
        RecipeError: The setting to change is named.
    """
    if recipe.method == "rtn":
        raise RecipeError("method rtn, which rounds without Hessians that could be stored", "another method", "Use bakron quantize alone")
    if recipe.inputs != "original":
        raise RecipeError(
            f"inputs is {recipe.inputs}: a block's Hessians then depend on how the blocks before it were rounded, and cannot be stored beforehand",
            "inputs original",
            "Give --inputs original, or use bakron quantize alone",
        )
    if recipe.chooses:
        told = "gate" if recipe.gate else f"{recipe.autos[0]} auto"
        raise RecipeError(
            f"{told} chooses by gradients of sequences held out, which are not stored with the Hessians",
            "no gate, and dampings that are numbers",
            "Change that, or use bakron quantize alone",
        )


def hessian_file(target: Path, stem: str) -> Path:
    """Where the Hessian of a linear is kept."""
    return target / rundir.FOLDER / "hessians" / f"{stem}.safetensors"


def solved_file(target: Path, stem: str) -> Path:
    """Where the codes of a linear are kept until its block's are together."""
    return target / rundir.FOLDER / "solved" / f"{stem}.safetensors"


def stored(target: Path) -> bool:
    """Whether the Hessians of all linears of a run are there."""
    return _manifest(target).is_file()


def size(job: Job) -> int:
    """Bytes that stored Hessians take, at least: B of local Hessians is not counted."""
    import torch

    from bakron.hessian.factor import pack

    shapes = _shapes(job)
    widths = {width for shape in shapes.values() for width in shape}
    packed = {width: pack(torch.empty(width, width, device="meta")).numel() for width in widths}
    two = job.recipe.hessian == "backprop" and job.recipe.method == "bakron"
    numbers = sum(packed[n] + (packed[m] if two else 0) for m, n in shapes.values())
    return getattr(torch, job.recipe.accumulate or "float32").itemsize * numbers + 4 * sum(m * n for m, n in shapes.values())


def store(job: Job, target: Path, clock: Clock, progress: Progress, log: Log) -> int:
    """Make and store the Hessian of every linear; blocks whose files are all there and whole are passed over.

    Args:
        job: What to work on; its recipe has passed `check`.
        target: Output directory.
        clock: Receives seconds of the stages.
        progress: Called with ("store", blocks done, blocks).
        log: Called with one-line messages.

    Returns:
        Linears whose Hessians are stored.

    Raises:
        FactorError: A Hessian cannot be made.
        ModelError: Activations or gradients are not finite.
        OutputError: A file cannot be written.
    """
    from bakron.pipeline import finite, starved, tell

    walk, shapes, ids, estimator = job.walk, _shapes(job), None if job.tokens is None else job.tokens.ids, None
    there = ranks.by_first(lambda: [_block_is_whole(target, job, i, log) for i in range(len(walk))])
    last = max((i for i in range(len(walk)) if not there[i]), default=-1)
    assert ids is not None
    if last >= 0:
        with clock.stage("hessian"):
            estimator = make_estimator(job, target, progress, log)
        with clock.stage("calibrate"):
            hidden = walk.embed(ids[ranks.share(len(ids))])
    for i in range(last + 1):
        if not there[i]:
            assert estimator is not None
            with clock.stage("load"):
                walk.load(i)
            with clock.stage("hessian"), finite(walk, i, hidden):
                krons = estimator.block(i, hidden)
            with clock.stage("write"):
                linears, owners = walk.linears(i), walk.owners(i)
                for name in (name for name in walk.chosen(i) if owners[name] == ranks.rank()):
                    told = {"linear": f"{walk.prefix(i)}.{name}", "block": i}
                    told |= tell(estimator, name, krons[name], ids, None, job.recipe)
                    if starved(linears[name], estimator.tokens[name]):
                        told["fallback"] = "nearest"
                    _write(hessian_file(target, stem(i, name)), krons.pop(name), linears[name].weight, told, job.recipe)
        if i < last:
            with clock.stage("calibrate"):
                hidden = walk.apply(i, hidden)
        progress("store", i + 1, len(walk))
    walk.unload()
    ranks.meet()
    record = {"scale_dtype": str(job.scale_dtype).removeprefix("torch."), "shapes": shapes}
    ranks.by_first(lambda: rundir.write_text(_manifest(target), json.dumps(record, indent=1)))
    return len(shapes)


def solve_shard(
    run: str | Path, shard: int, shards: int, *, progress: Progress | None = None, log: Log | None = None, observe: Observe | None = None
) -> dict[str, int]:
    """Round one share of the linears of a run whose Hessians `prepare` has stored. Neither model nor text is read.

    Shares are balanced by `m n (m + n)` and depend on nothing but the run and the number of shards. Any of them may run at the same time, in any order, and again:
    what is solved is passed over.

    Args:
        run: Directory in which `bakron.prepare` has stored Hessians.
        shard: Which share, from 1.
        shards: How many there are.
        progress: Called with ("shard", linears done, linears of this shard).
        log: Called with one-line messages.
        observe: Called with a linear's line of `events.jsonl` when it is rounded.

    Returns:
        `{"linears", "solved", "all", "all_solved"}`: linears of this shard, how many of them it has rounded now, and linears of the run and how many of these are
        solved.

    Raises:
        RecipeError: `shard` is not from 1 to `shards`.
        OutputError: There are no stored Hessians, one is damaged, the run is finished, or another command works on it.
        FactorError: A factor stays indefinite at the largest damping.
    """
    target, log = rundir.path_of(run), log or (lambda _: None)
    if not 1 <= shard <= shards:
        raise RecipeError(f"shard {shard}/{shards}", "i/n with i from 1 to n, such as 1/4")
    recipe, dtype, shapes = _read_manifest(target)
    mine = _share(shapes, shard, shards)
    with rundir.held(target, together=True):
        solved = _solve(target, mine, recipe, dtype, progress or (lambda *_: None), log, observe or (lambda _: None))
    done = sum(solved_file(target, one).is_file() for one in shapes)
    return {"linears": len(mine), "solved": len(solved), "all": len(shapes), "all_solved": done}


def finish(job: Job, target: Path, done: Done | None, count: int, clock: Clock, progress: Progress, log: Log, observe: Observe) -> None:
    """Round what no shard has rounded, each process of the run its share, and put the codes of blocks together.

    Args:
        job: What is worked on.
        target: Output directory, in which all Hessians are stored.
        done: Where blocks go; None on processes that do not write.
        count: Blocks that are there already.
        clock: Receives the seconds of shards.
        progress: Called with ("quantize", blocks done, blocks).
        log: Called with one-line messages.
        observe: Called with a linear's event when this process rounds it.

    Raises:
        OutputError: A stored Hessian is damaged.
        FactorError: A factor stays indefinite at the largest damping.
    """
    recipe, dtype, shapes = _read_manifest(target)
    walk = job.walk
    if shapes != _shapes(job) or dtype != job.scale_dtype:
        raise OutputError(f"{_manifest(target)} is damaged: it is of another model", "a manifest as bakron prepare leaves it", AGAIN)
    left = {
        one: shapes[one]
        for i in range(count, len(walk))
        for one in (stem(i, name) for name in walk.chosen(i))
        if not _solved(target, one, log)
    }
    ranks.meet()  # every process has seen the same files
    if left:
        log(f"{len(left)} of {len(shapes)} linears are not solved by any shard yet, and are solved now")
    _solve(target, _share(left, ranks.rank() + 1, ranks.size()), recipe, dtype, progress, log, observe, own=True)
    ranks.meet()
    for i in range(count, len(walk)) if done is not None else ():
        parts = [_solved(target, stem(i, name), log) for name in walk.chosen(i)]
        done.store(i, {key: tensor for tensors, *_ in parts for key, tensor in tensors.items()}, [event for _, event, _ in parts])
        of_shards = sum(seconds for *_, seconds in parts)
        clock.seconds["solve"] = clock.seconds.get("solve", 0.0) + of_shards
        clock.begun -= of_shards
        progress("quantize", i + 1, len(walk))
    ranks.meet()


def stem(i: int, name: str) -> str:
    """Of the files of a linear of block i."""
    return f"block_{i:04d}.{name}"


def _manifest(target: Path) -> Path:
    return target / rundir.FOLDER / "hessians" / "manifest.json"


def _read_manifest(target: Path) -> tuple[Recipe, torch.dtype, dict[str, tuple[int, int]]]:
    """Recipe, dtype of scales and shapes of linears of a run whose Hessians are all stored."""
    import torch

    if (target / rundir.FOLDER / "summary.json").exists():
        raise OutputError(
            f"{target} holds a finished run", "one whose Hessians bakron prepare has stored", "There is nothing left to solve"
        )
    file, begun = _manifest(target), rundir.begun(target)
    if begun is None or not file.is_file():
        raise OutputError(f"{target} has no stored Hessians of all linears", "a directory that bakron prepare has filled", AGAIN)
    try:
        told = json.loads(file.read_text("utf-8"))
        shapes = {str(key): (int(m), int(n)) for key, (m, n) in told["shapes"].items()}
        if wrong := [key for key, shape in shapes.items() if min(shape) < 1 or not STEM.fullmatch(key)]:
            raise ValueError(wrong[0][:80])
        dtype = {str(one): one for one in (torch.float16, torch.bfloat16, torch.float32)}[f"torch.{told['scale_dtype']}"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise OutputError(f"{file} is damaged: {error!r}", "a manifest as bakron prepare leaves it", AGAIN) from error
    return recipes.from_dict(begun["recipe"]).resolve(), dtype, shapes


def _shapes(job: Job) -> dict[str, tuple[int, int]]:
    """Shapes `(m, n)` of all linears to be rounded, by the stem of their files."""
    walk = job.walk
    return {stem(i, name): tuple(walk.linears(i)[name].weight.shape) for i in range(len(walk)) for name in walk.chosen(i)}


def _share(shapes: Mapping[str, tuple[int, int]], shard: int, shards: int) -> list[str]:
    return [one for one, owner in ranks.owners(shapes, shards).items() if owner == shard - 1]


def _block_is_whole(target: Path, job: Job, i: int, log: Log) -> bool:
    for file in (hessian_file(target, stem(i, name)) for name in job.walk.chosen(i)):
        try:
            if not file.is_file():
                return False
            rundir.read_tensors(file, WHOLE)
        except OutputError as error:
            log(f"{error} The Hessians of block {i} are made again")
            return False
    return True


def _write(file: Path, kron: Kron, weight: torch.Tensor, told: dict[str, Any], recipe: Recipe) -> None:
    tensors = {"W": weight.detach().float().cpu()}
    if "fallback" not in told:
        tensors["A"] = _packed(kron.A.H)
        if kron.B is not None and recipe.method == "bakron":
            tensors["B"] = _packed(kron.B.H)
    rundir.write_tensors(file, tensors, {"told": rundir.line(told)})


def _packed(H: torch.Tensor) -> torch.Tensor:
    """A factor without one of its triangles, if nothing is lost."""
    import torch

    from bakron.hessian.factor import pack

    return pack(H) if H.ndim == 2 and torch.equal(H, H.T) else H


def _read(file: Path) -> tuple[Kron, torch.Tensor, dict[str, Any]]:
    """Hessian, weight `[m, n]` and what is told of them."""
    import torch

    from bakron.hessian.factor import unpack
    from bakron.kron import Kron

    try:
        tensors, told = rundir.read_tensors(file, WHOLE), json.loads(rundir.read_metadata(file)["told"])
        W = tensors["W"]
        A, B = ((unpack(H, k) if H.ndim == 1 else H) if (H := tensors.get(side)) is not None else None for side, k in zip("AB", W.T.shape))
    except OutputError as error:
        raise OutputError(error.saw, error.expected, AGAIN) from error
    except (KeyError, ValueError, RuntimeError) as error:
        raise OutputError(f"{file} is damaged: {error!r}", WHOLE, AGAIN) from error
    return Kron(torch.eye(W.shape[1]) if A is None else A, B), W, told


def _solve(
    target: Path,
    stems: list[str],
    recipe: Recipe,
    dtype: torch.dtype,
    progress: Progress,
    log: Log,
    observe: Observe,
    *,
    own: bool = False,
) -> list[str]:
    """Round these linears but those that are solved; returns which. `own`: their seconds are counted by the run itself, not with their codes."""
    from torch import nn

    from bakron.pipeline import ready, round_linear

    ready(recipe)
    begun, solved = time.perf_counter(), []
    for number, one in enumerate(stems, 1):
        file = hessian_file(target, one)
        if not file.is_file():
            raise OutputError(f"{file} is missing", WHOLE, AGAIN)
        with rundir.alone(file):  # two shards of different numbers may share a linear
            if not _solved(target, one, log):
                start = time.perf_counter()
                kron, W, told = _read(file)
                linear = nn.Linear(W.shape[1], W.shape[0], bias=False, device="meta")  # draws nothing
                linear.weight = nn.Parameter(W, requires_grad=False)
                rounded = round_linear(linear, kron, recipe, dtype, told["linear"])
                event = rounded.event | told | {"elapsed": round(time.perf_counter() - begun, 3), "memory": memory()}
                tensors = codes_of({one.split(".", 1)[1]: rounded})
                spent = 0.0 if own else round(time.perf_counter() - start, 3)
                rundir.write_tensors(solved_file(target, one), tensors, {"event": rundir.line(event), "seconds": str(spent)})
                observe(event)
                solved.append(one)
        progress("shard", number, len(stems))
    return solved


def _solved(target: Path, one: str, log: Log) -> tuple[dict[str, torch.Tensor], dict[str, Any], float] | None:
    """Codes and event of a linear, and the seconds of the shard that solved it, if they are there and whole."""
    file = solved_file(target, one)
    if not file.is_file():
        return None
    try:
        tensors, told = rundir.read_tensors(file, "the codes of a linear"), rundir.read_metadata(file)
        return tensors, json.loads(told["event"]), float(told["seconds"])
    except (OutputError, KeyError, ValueError) as error:
        log(f"{error if isinstance(error, OutputError) else f'{file} has no event.'} This linear is solved again")
        return None
