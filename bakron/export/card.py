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


def model_card(summary: dict[str, Any]) -> str:
    """README.md of the output directory, from the summary of the run."""
    recipe = summary["recipe"]
    groups = f"one scale per {recipe['group_size']} inputs" if recipe["group_size"] else "one scale per output row"
    needs = "  # needs: pip install 'compressed-tensors>=0.18'" if recipe["format"] == "compressed-tensors" else ""
    base = "" if Path(summary["model"]).is_absolute() else f"base_model: {json.dumps(summary['model'])}\n"  # a hub name
    return f"""---
{base}library_name: transformers
tags: [quantized, bakron]
---
# {Path(summary["model"]).name}, {recipe["levels"]} levels

Quantized with bakron {summary["versions"]["bakron"]} by {HOW[recipe["method"]]}: {recipe["levels"]} levels, {groups},
{summary["bits_per_weight"]} bits per quantized weight including scales ({summary["stored_bits_per_weight"]} as stored);
{summary["parameters"]["quantized_percent"]} % of all parameters are quantized. Format: `{recipe["format"]}`.
The full recipe is in `bakron/recipe.yaml`, figures of the run in `bakron/summary.json`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("this directory"){needs}
tokenizer = AutoTokenizer.from_pretrained("this directory")
print(tokenizer.decode(model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=30)[0]))
```
"""
