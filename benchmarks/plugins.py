"""`make test-plugins`: llm-compressor's `oneshot` on SmolLM2-135M, with its own GPTQModifier and with BakronModifier in its place: same tokens, same bits.

Each checkpoint is loaded again by transformers with compressed-tensors, in llm-compressor's environment and here, and compared with the original. Exit status 1 if
bakron's KL divergence is not the lower one at equal bits and scales.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from machine import ROOT, demo_model, describe
from safetensors.torch import save_file

import bakron
from bakron import data as corpus
from bakron.export.checkpoint import write_checkpoint
from bakron.models import load as models

PEERS = ROOT / ".venv-peers" / "bin" / "python"
OWN = "llm-compressor GPTQ"
TWO_SIDED = "bakron, its scales"
ROWS: dict[str, dict[str, Any]] = {
    OWN: {"name": "GPTQModifier"},
    "bakron, B = I, its scales": {"name": "BakronModifier", "factor": None},
    TWO_SIDED: {"name": "BakronModifier"},
    "bakron, curvature scales": {"name": "BakronModifier", "scale": "curvature"},
}


def prepare(folder: Path, calibration: str, sequences: int, length: int) -> tuple[Path, Path]:
    """The demonstration model as a Hugging Face directory in bfloat16, and calibration tokens in a file; both in `folder`."""
    source = models.find(str(demo_model()))
    tokenizer, directory = models.read_tokenizer(source), folder / "model"
    directory.mkdir(parents=True)
    architecture, weights = models.open_model(source)
    write_checkpoint(directory, architecture, weights, tokenizer, None, torch.bfloat16, {}, lambda *_: {}, quantization=None)
    tokens = corpus.windows(corpus.load(calibration, split="calibration"), tokenizer, length=length, sequences=sequences, seed=0)
    save_file({"ids": tokens.ids.contiguous()}, folder / "tokens.safetensors")
    return directory, folder / "tokens.safetensors"


def oneshot(python: Path, model: Path, tokens: Path, out: Path, bits: int, group: int, modifier: dict[str, Any]) -> dict[str, Any]:
    """One run of llm-compressor in its own process; what it says of itself."""
    command = [python, Path(__file__).with_name("peers_oneshot.py"), model, tokens, out, bits, group, json.dumps(modifier)]
    quiet = {"LLM_COMPRESSOR_LOG_LEVEL": "WARNING", "TQDM_DISABLE": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([str(one) for one in command], capture_output=True, text=True, env=os.environ | quiet)
    if run.returncode:
        raise SystemExit(run.stdout[-2000:] + run.stderr[-4000:])
    return json.loads(run.stdout.strip().splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    lines = ["| modifier | bits | KL, nats | perplexity | agreement | seconds |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['row']} | {row['bits']} | {row['kl']:.4f} | {row['perplexity']:.2f} | {100 * row['agreement']:.1f} % | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run, print, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", required=True, help="text file")
    parser.add_argument("--evaluation", required=True, help="text file")
    parser.add_argument("--bits", default="4,3")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", help="names, separated by semicolons; default: all")
    parser.add_argument("--python", type=Path, default=PEERS, help="of the environment that has llm-compressor")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-out" / "plugins", help="replaced if it exists")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    flags = parser.parse_args()
    shutil.rmtree(flags.out, ignore_errors=True)
    model, tokens = prepare(flags.out, flags.calibration, flags.sequences, flags.length)
    rows = []
    for bits in map(int, flags.bits.split(",")):
        for name in flags.rows.split(";") if flags.rows else ROWS:
            out = flags.out / f"{bits}-{name.replace(' ', '-')}"
            found = oneshot(flags.python, model, tokens, out, bits, flags.group, ROWS[name])
            quality = bakron.evaluate(out, reference=model, data=flags.evaluation, length=flags.length, sequences=flags.windows)
            rows.append({"row": name, "bits": bits, "modifier": ROWS[name], **found, **quality})
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            shutil.rmtree(out)
            if flags.json:
                setting = {
                    "model": demo_model().name,
                    "group_size": flags.group,
                    "calibration": f"{Path(flags.calibration).name}, {flags.sequences} x {flags.length} tokens",
                    "evaluation": f"{Path(flags.evaluation).name}, {flags.windows} x {flags.length} tokens",
                }
                flags.json.write_text(json.dumps({"setting": setting, "machine": describe(), "rows": rows}, indent=1) + "\n")
    print(table(rows))
    kl = {(row["bits"], row["row"]): row["kl"] for row in rows}
    return int(any(kl[bits, TWO_SIDED] >= found for (bits, name), found in kl.items() if name == OWN and (bits, TWO_SIDED) in kl))


if __name__ == "__main__":
    sys.exit(main())
