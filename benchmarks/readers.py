"""Quantize one small real model once for each format, read every file with its own runtime in an environment of its own, and compare with torch.

The environments are made by `make test-readers`; a reader runs as this same file with `--read`, and needs nothing of bakron.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import RESULTS, ROOT, demo_model, describe

ROWS: dict[str, dict[str, Any]] = {  # name -> recipe, reader
    "compressed-tensors, 4 bits": dict(reader="transformers", format="compressed-tensors", levels=16, group_size=32),
    "compressed-tensors, 7 levels": dict(reader="transformers", format="compressed-tensors", levels=7, group_size=32),
    "compressed-tensors, 4 bits, zero points": dict(
        reader="transformers-dequantize", format="compressed-tensors", levels=16, group_size=32, symmetric=False
    ),
    "packed, 7 levels": dict(reader="bakron.reader", format="packed", levels=7, group_size=32),
    "gptq, 4 bits": dict(reader="gptqmodel", format="gptq", levels=16, group_size=32),
    "gptq, 7 levels in 3 bits": dict(reader="gptqmodel", format="gptq", levels=7, group_size=32),
    "gptq, 4 bits, zero points": dict(reader="gptqmodel", format="gptq", levels=16, group_size=32, symmetric=False),
    "gguf, q4_0": dict(reader="llama.cpp", format="gguf", gguf_type="q4_0"),
    "gguf, q4_1": dict(reader="llama.cpp", format="gguf", gguf_type="q4_1"),
    "gguf, q8_0": dict(reader="llama.cpp", format="gguf", gguf_type="q8_0"),
    "gguf, q4_0, 7 levels": dict(reader="llama.cpp", format="gguf", gguf_type="q4_0", levels=7),
}
PROMPT = "The capital of France is"
CLOSE = 0.03  # of the perplexity


def main() -> int:
    """Run the rows; 1 if a reader's perplexity is further than 3 % from torch's on the same codes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluation", type=Path, help="a text file")
    parser.add_argument("--model", type=Path, help="default: the model of the demonstration")
    parser.add_argument("--sequences", type=int, default=8, help="windows of 512 tokens")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--method", default="rtn", help="how to round; the files do not care")
    parser.add_argument("--gptq-python", default=".venv-gptqmodel/bin/python", help="of the environment with gptqmodel and optimum")
    parser.add_argument("--llama-python", default=".venv-llama/bin/python", help="of the environment with llama-cpp-python")
    parser.add_argument("--rows", help="names of rows, separated by semicolons; default: all")
    parser.add_argument("--json", type=Path, default=RESULTS / "readers.json")
    parser.add_argument("--read", nargs=3, metavar=("READER", "PATH", "TOKENS"), help="used by this file itself")
    flags = parser.parse_args()
    if flags.read:
        print(json.dumps(READERS[flags.read[0]](Path(flags.read[1]), json.loads(Path(flags.read[2]).read_text()))))
        return 0
    known = json.loads(flags.json.read_text())["rows"] if flags.json.exists() and flags.rows else {}
    with tempfile.TemporaryDirectory(prefix="bakron-readers-") as place:
        model = _directory(flags.model or demo_model(), Path(place) / "model")
        for name in flags.rows.split(";") if flags.rows else ROWS:
            known[name] = _row(dict(ROWS[name]), str(model), Path(place) / "row", flags)
            print(name, json.dumps(known[name]), flush=True)
            settings = {"method": flags.method, "sequences": flags.sequences, "length": flags.length, "close": CLOSE}
            flags.json.write_text(json.dumps({"machine": describe(), "settings": settings, "rows": known}, indent=1) + "\n")
    print(table(known))
    return int(any(abs(row["difference"]) > CLOSE for row in known.values()))


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    lines = ["| file | reader | MB | perplexity, torch | perplexity, reader | difference |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['reader']} | {row['megabytes']:.1f} | {row['torch']:.3f} | {row['read']:.3f} | {100 * row['difference']:+.2f} % |"
        )
    return "\n".join(lines)


def _directory(source: Path, path: Path) -> Path:
    """A GGUF model as a Hugging Face directory in bfloat16, which loads faster, and whose tokenizer the gguf rows have to translate."""
    import torch
    from transformers import AutoModelForCausalLM

    from bakron.models import load as models

    if source.suffix != ".gguf":
        return source
    found = models.find(str(source))
    read = models.read(found, torch.bfloat16)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)  # one that nothing says to have been quantized
    model.load_state_dict(read.state_dict())
    model.save_pretrained(path)
    models.read_tokenizer(found).save_pretrained(path)
    return path


def _row(recipe: dict[str, Any], model: str, scratch: Path, flags: argparse.Namespace) -> dict[str, Any]:
    import bakron
    from bakron import data as corpus
    from bakron.models import load as models

    reader, start = recipe.pop("reader"), time.perf_counter()
    shutil.rmtree(scratch, ignore_errors=True)
    summary = bakron.quantize(model, scratch / "out", method=flags.method, verify=False, **recipe)
    bakron.export_run(scratch / "out", scratch / "dense", format="dense", verify=False)
    tokenizer = models.read_tokenizer(models.find(model))
    texts = corpus.load(str(flags.evaluation or "builtin"), split="evaluation")
    tokens = corpus.windows(texts, tokenizer, length=flags.length, sequences=flags.sequences, seed=None)
    file = scratch / "tokens.json"
    prompt = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    file.write_text(json.dumps({"windows": tokens.ids.tolist(), "prompt": prompt, "text": PROMPT}))
    torch_ppl = _transformers(scratch / "dense", json.loads(file.read_text()))["perplexity"]
    python = {"gptqmodel": flags.gptq_python, "llama.cpp": flags.llama_python}.get(reader, sys.executable)
    done = subprocess.run([python, __file__, "--read", reader, str(scratch / "out"), str(file)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{reader} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    size = sum(path.stat().st_size for path in (scratch / "out").iterdir() if path.suffix in (".gguf", ".safetensors"))
    return {
        "reader": reader,
        "versions": found["versions"],
        "recipe": recipe,
        "megabytes": round(size / 1e6, 2),
        "stored_bits_per_weight": summary["stored_bits_per_weight"],
        "torch": round(torch_ppl, 4),
        "read": round(found["perplexity"], 4),
        "difference": round(found["perplexity"] / torch_ppl - 1, 5),
        "generated": found["generated"],
        "same_tokens": found["same_tokens"],
        "seconds": round(time.perf_counter() - start),
    }


def _transformers(path: Path, text: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Perplexity and a continuation by transformers."""
    import importlib.metadata

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for window in torch.tensor(text["windows"]):
            logits = model(window[None]).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
            count += len(window) - 1
        made = model.generate(torch.tensor([text["prompt"]]), max_new_tokens=12, do_sample=False)[0]
    tokenizer = AutoTokenizer.from_pretrained(path)
    names = [name for name in ("transformers", "compressed-tensors", "optimum", "gptqmodel") if _has(name)]
    return {
        "perplexity": float(torch.tensor(total / count).exp()),
        "generated": tokenizer.decode(made),
        "same_tokens": tokenizer(text["text"], add_special_tokens=False)["input_ids"] == text["prompt"],
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


def _dequantize(path: Path, text: dict[str, Any]) -> dict[str, Any]:
    from transformers import CompressedTensorsConfig

    return _transformers(path, text, quantization_config=CompressedTensorsConfig(dequantize=True))


def _bakron_reader(path: Path, text: dict[str, Any]) -> dict[str, Any]:
    import bakron.reader  # noqa: F401 (lets transformers read this format)

    return _transformers(path, text)


def _llama_cpp(path: Path, text: dict[str, Any]) -> dict[str, Any]:
    """Perplexity and a continuation by llama.cpp, which cuts the text into tokens by itself for the latter."""
    import llama_cpp
    import numpy as np

    file = next(path.glob("*.gguf"))
    model = llama_cpp.Llama(str(file), n_ctx=len(text["windows"][0]), n_batch=len(text["windows"][0]), logits_all=True, verbose=False)
    total, count = 0.0, 0
    for window in text["windows"]:
        model.reset()
        model.eval(window)
        logits = np.array(model.scores[: len(window) - 1], np.float64)
        top = logits.max(1, keepdims=True)
        norm = np.log(np.exp(logits - top).sum(1)) + top[:, 0]
        total += float((norm - logits[np.arange(len(window) - 1), window[1:]]).sum())
        count += len(window) - 1
    model.reset()
    made = model.create_completion(text["prompt"], max_tokens=12, temperature=0.0)["choices"][0]["text"]
    return {
        "perplexity": float(np.exp(total / count)),
        "generated": text["text"] + made,
        "same_tokens": model.tokenize(text["text"].encode(), add_bos=False) == text["prompt"],
        "versions": {"llama-cpp-python": llama_cpp.__version__},
    }


def _has(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name.replace("-", "_")) is not None


READERS = {
    "transformers": _transformers,
    "transformers-dequantize": _dequantize,
    "bakron.reader": _bakron_reader,
    "gptqmodel": _transformers,
    "llama.cpp": _llama_cpp,
}

if __name__ == "__main__":
    sys.exit(main())
