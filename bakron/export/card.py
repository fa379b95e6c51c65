"""The model card of a quantized checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOW = {
    "rtn": "rounding to nearest",
    "gptq": "GPTQ (error feedback along inputs)",
    "bakron": "BaKron (error feedback along inputs and outputs)",
}


NEEDS = {
    "compressed-tensors": "  # needs: pip install 'compressed-tensors>=0.18'",
    "gptq": "  # needs: pip install gptqmodel optimum",
    "packed": "  # needs the package bakron",
}


def model_card(summary: dict[str, Any], *, tokenizer: bool) -> str:
    """README.md of the output directory, from the summary of the run and whether a tokenizer is beside it."""
    recipe = summary["recipe"]
    groups = f"one scale per {recipe['group_size']} inputs" if recipe["group_size"] else "one scale per output row"
    named = not summary.get("in_memory") and not Path(summary["model"]).is_absolute()  # a hub name
    base = f"base_model: {json.dumps(summary['model'])}\n" if named else ""
    kind = f", type {recipe['gguf_type']}" if recipe["gguf_type"] else ""
    return f"""---
{base}library_name: {"gguf" if recipe["format"] == "gguf" else "transformers"}
tags: [quantized, bakron]
---
# {" ".join(Path(summary["model"]).name.split())}, {recipe["levels"]} levels

Quantized with bakron {summary["versions"]["bakron"]} by {HOW[recipe["method"]]}: {recipe["levels"]} levels, {groups},
{summary["bits_per_weight"]} bits per quantized weight including scales ({summary["stored_bits_per_weight"]} as stored);
{summary["parameters"]["quantized_percent"]} % of all parameters are quantized. Format: `{recipe["format"]}`{kind}.
The full recipe is in `bakron/recipe.yaml`, figures of the run in `bakron/summary.json`.

{_use(recipe, tokenizer)}"""


def _use(recipe: dict[str, Any], tokenizer: bool) -> str:
    """How to load it."""
    if recipe["format"] == "gguf":
        return f"""```
llama-cli -m model-{recipe["gguf_type"].upper()}.gguf -p "Once upon a time" -n 30
```
"""
    packed = "\nimport bakron.reader  # lets transformers read this format" if recipe["format"] == "packed" else ""
    zeros = recipe["format"] == "compressed-tensors" and not recipe["symmetric"]
    name = ", CompressedTensorsConfig" if zeros else ""
    option = ", quantization_config=CompressedTensorsConfig(dequantize=True)" if zeros else ""
    load = f'model = AutoModelForCausalLM.from_pretrained("this directory"{option}){NEEDS.get(recipe["format"], "")}'
    if not tokenizer:
        return f"""```python
from transformers import AutoModelForCausalLM{name}{packed}

{load}
```
"""
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer{name}{packed}

{load}
tokenizer = AutoTokenizer.from_pretrained("this directory")
print(tokenizer.decode(model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=30)[0]))
```
"""
