"""What is left of a model after quantization, as a function: `evaluate` it on text, beside the original if there is one, and on tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bakron import data as corpus
from bakron import rundir
from bakron.errors import RecipeError
from bakron.job import device as device_of
from bakron.models import load as models

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[str, int, int], None]
Log = Callable[[str], None]


def evaluate(
    model: str | Path | PreTrainedModel,
    *,
    reference: str | Path | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    data: str | Tensor = "builtin",
    length: int | None = None,
    sequences: int | None = None,
    device: str = "cpu",
    tasks: Sequence[str] = (),
    task_folder: str | Path | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
    log: Log | None = None,
) -> dict[str, Any]:
    """Perplexity of a model on text and, with the original as reference, KL divergence and agreement.

    Args:
        model: Hugging Face directory (also a quantized one), hub name, GGUF file, or a model in memory, which is not changed.
        reference: The original model, also one in memory.
        tokenizer: Where `model` is one in memory.
        data: Text: a file, a hub data set, or "builtin" (its evaluation part); or ready token ids, an integer tensor `[N, T]`.
        length: Tokens per window of a text; default 512.
        sequences: Windows from the start of the text; None = all.
        device: Where to compute.
        tasks: Of lm-evaluation-harness (extra `eval`), run on the model and, if there is one, the reference.
        task_folder: With task files of your own.
        limit: Examples per task; None = all.
        progress: Called with (stage, done, total).
        log: Called with one-line messages.

    Returns:
        `{"perplexity", "kl", "agreement", "tokens", "sequences", "length"}`, see `bakron.evaluation.compare`; with tasks also "tasks" and, with a reference,
        "reference_tasks": metrics by task, see `bakron.tasks.run`. If the model is the directory of a run, this is also written to `bakron/evaluation.json` in it,
        for `bakron report`, unless that has a KL divergence and this one has not.

    Raises:
        BakronError: Any of its subclasses.
    """
    log = log or (lambda _: None)
    if length is not None and length < 2:
        raise RecipeError(f"length {length}", "at least 2 tokens")
    if sequences is not None and sequences < 1:
        raise RecipeError(f"sequences {sequences}", "at least 1")
    source = models.find(model, tokenizer, quantized=True)
    original = None if reference is None else models.find(reference, quantized=True)
    given = None if isinstance(data, str) else corpus.given(data)
    if isinstance(data, str):
        corpus.check(data)
    elif length is not None:
        raise RecipeError(f"length {length} beside token ids", "a length for text only", "Drop length, or cut the ids")
    if limit is not None and limit < 1:
        raise RecipeError(f"limit {limit}", "at least 1")
    if not tasks and (task_folder is not None or limit is not None):
        raise RecipeError("a task folder or a limit without tasks", "tasks")
    if tasks:
        from bakron import tasks as harness

        harness.check(tasks, task_folder)

    import torch

    from bakron import evaluation

    where = device_of(device)
    tokenizer = models.read_tokenizer(source, required=given is None or bool(tasks))
    if given is None:
        texts = corpus.load(str(data), split="evaluation")
        tokens = corpus.windows(texts, tokenizer, length=512 if length is None else length, sequences=sequences, seed=None)
    else:
        tokens = given if sequences is None else corpus.given(given.ids[:sequences])
    log(f"evaluation: {tokens.describe()}")
    log(f"loading {source.name}" + (f" and {original.name}" if original else ""))
    loaded = models.read(source, torch.float32)
    models.check_length(loaded, tokens.ids.shape[1])
    models.check_tokens(loaded, tokens.ids, given=tokens.given)
    base = None if original is None else models.read(original, torch.float32)
    result = evaluation.compare(loaded, tokens.ids, base, device=where, progress=progress or (lambda *_: None))
    for key, one in {"tasks": loaded, "reference_tasks": base}.items():
        if tasks and one is not None:
            log(f"{', '.join(tasks)} on {(source if one is loaded else original or source).name}")
            result[key] = harness.run(one, tokenizer, tasks, folder=task_folder, limit=limit, device=device)
    if source.path is not None and (source.path / rundir.FOLDER / "summary.json").is_file():
        record = result | {"data": tokens.source, "data_sha256": tokens.sha256, "reference": None if original is None else original.name}
        file = source.path / rundir.FOLDER / "evaluation.json"
        if original is None and file.is_file() and json.loads(file.read_text("utf-8")).get("kl") is not None:
            log(f"{file} is left as it is: it also has the KL divergence from a reference")
        else:
            rundir.write_text(file, json.dumps(record, indent=1))
    return result
