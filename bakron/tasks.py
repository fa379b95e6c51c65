"""Tasks of lm-evaluation-harness on a loaded model (extra `eval`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bakron.errors import DataError, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check(tasks: Sequence[str], folder: str | Path | None = None) -> list[str]:
    """Names of tasks, wildcards resolved; reads no data set and no model.

    Args:
        tasks: Names of tasks or groups, such as `arc_easy`; `*` stands for anything.
        folder: With task files of your own (YAML).

    Returns:
        The names.

    Raises:
        RecipeError: lm-eval is not installed, the folder does not exist, or a name fits no task.
    """
    return _resolve(tuple(tasks), folder)[0]


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    folder: str | Path | None = None,
    limit: int | None = None,
    device: str = "cpu",
    batch: int = 8,
) -> dict[str, dict[str, float]]:
    """Run tasks without few-shot examples beyond what each task's own file asks for.

    Args:
        model: Loaded.
        tokenizer: Its own.
        tasks: Names, as for `check`.
        folder: With task files of your own.
        limit: Examples per task; None for all.
        device: Where to compute.
        batch: Examples per forward pass.

    Returns:
        Per task and group its metrics: `{"arc_easy": {"acc": 0.61, "acc_norm": 0.58, ...}}`.

    Raises:
        RecipeError: As `check`.
        DataError: A task's data set cannot be loaded; without a network, tasks over local files still can.
    """
    names, manager = _resolve(tuple(tasks), folder)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    adapter = HFLM(pretrained=model.to(device), tokenizer=tokenizer, batch_size=batch, device=device)
    try:
        found = simple_evaluate(
            adapter,
            tasks=names,
            task_manager=manager,
            limit=limit,
            log_samples=False,
            bootstrap_iters=0,
            random_seed=None,  # type: ignore[arg-type]  # the caller's generators are left alone
            numpy_random_seed=None,  # type: ignore[arg-type]
            torch_random_seed=None,  # type: ignore[arg-type]
        )
    except (OSError, ConnectionError) as error:
        raise DataError(
            f"a data set of {', '.join(names)} cannot be loaded: {str(error).splitlines()[0]}", "a network, or a local copy"
        ) from error
    results = found["results"] if found else {}
    return {name: _metrics(values) for name, values in results.items()}


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """`{"acc,none": 0.5, "alias": ...}` to `{"acc": 0.5}`; another filter than "none" stays in the name."""
    numbers = {key: value for key, value in values.items() if isinstance(value, int | float) and "," in key and "_stderr" not in key}
    return {key.removesuffix(",none"): float(value) for key, value in numbers.items()}


@lru_cache(maxsize=1)
def _resolve(tasks: tuple[str, ...], folder: str | Path | None) -> tuple[list[str], Any]:
    """Names and the index they are in. Indexing the harness's own tasks takes seconds, and is left out where the folder has all that is asked for."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise RecipeError("--tasks without the package lm-eval", None, "pip install lm-eval, or the extra eval with bakron") from error
    if folder is not None and not os.path.isdir(folder):
        raise RecipeError(f"task folder {folder} does not exist", "a directory of task files")
    missing = list(tasks)
    for defaults in (True,) if folder is None else (False, True):
        manager = TaskManager(include_path=None if folder is None else str(folder), include_defaults=defaults)
        found = {task: manager.match_tasks([task]) for task in tasks}
        missing = [task for task, names in found.items() if not names]
        if not missing:
            return list(dict.fromkeys(name for names in found.values() for name in names)), manager
    raise RecipeError(
        f"task {missing[0]!r}", "a task of lm-evaluation-harness", "`lm-eval ls tasks` lists them; --task-folder adds your own"
    )
