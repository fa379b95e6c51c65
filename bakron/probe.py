"""How long a run will take, from doing a little of its real work: one block of each kind, on a few sequences."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bakron import rundir
from bakron.job import Job, codes_of, make_estimator

PROBE_SECONDS = 10.0  # after which the probe tries no second, larger batch


def seconds(job: Job, count: Mapping[str, int], scratch: Path, surveyed: float) -> dict[str, float]:
    """Estimate of seconds by stage, from doing one block's real work on a few sequences (and on twice as many, if that is quick), for each kind of block.

    Args:
        job: What is to be done.
        count: Runs of single blocks over all tokens, from `plan.passes`.
        scratch: For the gradients of the probe.
        surveyed: Seconds that reading the text and every weight took.
    """
    from bakron.pipeline import ready

    found = dict[str, float]()
    ready(job.recipe)
    for number, same in enumerate(job.walk.kinds()):
        for stage, value in _of_block(job, same[0], scratch / str(number)).items():
            if stage in ("embed", "head"):  # once a run, whatever its blocks
                found[stage] = value
            else:
                found[stage] = found.get(stage, 0.0) + len(same) * value
    if job.tokens is None:
        return _total({"load": surveyed, "solve": found["solve"], "write": surveyed / 2})
    forward = found["forward"] / len(job.walk) * max(count["forward"] - found["passes"], 0)
    return _total(
        {
            "load": surveyed,
            "calibrate": forward + found["embed"],
            "hessian": (found["head"] + found["backward"] if count["backward"] else 0.0) + found["hessian"],
            "solve": found["solve"],
            "write": surveyed / 2 + found["write"],
        }
    )


def _of_block(job: Job, i: int, scratch: Path) -> dict[str, float]:
    """Estimate of seconds by stage of a run of block i alone on all sequences; `passes` are those within its Hessians."""
    if job.tokens is None:
        return _probe(job, i, 0, scratch / "none")
    sequences = len(job.tokens.ids)
    few = min(sequences, max(job.recipe.batch, 3 if job.held else 1))
    start = time.perf_counter()
    first = _probe(job, i, few, scratch / "first")
    more = min(2 * few, sequences)
    second = _probe(job, i, more, scratch / "second") if more > few and time.perf_counter() - start < PROBE_SECONDS else None

    def scaled(stage: str) -> float:
        """Seconds of a stage for all sequences: a share for each, and one for none."""
        if second is None:
            return first[stage] * sequences / few
        each = max(second[stage] - first[stage], 0.0) / (more - few)
        return max(first[stage] - each * few, 0.0) + each * sequences

    return first | {stage: scaled(stage) for stage in ("embed", "head", "forward", "backward", "hessian")}


def _probe(job: Job, i: int, sequences: int, target: Path) -> dict[str, float]:
    """Seconds of each stage of a run of block i alone, on so many sequences."""
    from bakron.pipeline import Clock, run

    clock, stages = Clock(), dict[str, float]()
    walk = job.walk.only(i)
    tokens = None if job.tokens is None else replace(job.tokens, ids=job.tokens.ids[:sequences])
    recipe = job.recipe.model_copy(update={"factors": None, "boundary_memory": None})
    part = replace(job, walk=walk, tokens=tokens, recipe=recipe)
    last = time.perf_counter()

    def progress(stage: str, _done: int, _total: int) -> None:
        nonlocal last
        now = time.perf_counter()
        stages[stage] = stages.get(stage, 0.0) + now - last
        last = now

    estimator = make_estimator(part, target, progress)
    begun = dict(walk.runs)
    run(
        walk,
        recipe,
        dtype=job.scale_dtype,
        clock=clock,
        ids=None if tokens is None else tokens.ids,
        estimator=estimator,
        keep=lambda i, rounded: rundir.write_tensors(rundir.codes_file(target, i), codes_of(rounded)),
    )
    did = walk.runs["forward"] - begun["forward"]
    if tokens is not None:
        hidden = walk.embed(tokens.ids)
        last = time.perf_counter()
        walk.apply(0, hidden)
        stages["forward"] = time.perf_counter() - last
    walk.unload()
    found = {name: stages.get(name, 0.0) for name in ("forward", "head", "backward")}
    return (
        found
        | {"embed": clock.seconds.get("calibrate", 0.0), "hessian": clock.seconds.get("hessian", 0.0), "passes": did}
        | {name: clock.seconds[name] for name in ("solve", "write")}
    )


def _total(stages: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in (stages | {"total": sum(stages.values())}).items()}
