"""Quantize a model with llm-compressor's `oneshot`, in the peers' environment (`make peers`).

`python peers_oneshot.py MODEL TOKENS OUT BITS GROUP MODIFIER [--no-reload]`: MODEL is a Hugging Face directory, TOKENS a safetensors file with `ids [N, T]`,
MODIFIER a JSON object: `name` (GPTQModifier or BakronModifier) and its arguments. Prints JSON: version, seconds of the call, peak memory of the process in bytes by
then, and the tokens that the saved model, loaded again by transformers, goes on with.
"""

import json
import resource
import sys
import time
from importlib.metadata import version

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def main() -> None:
    model, tokens, out, bits, group, modifier, *rest = sys.argv[1:]
    arguments = json.loads(modifier)
    kind = arguments.pop("name")
    if kind == "BakronModifier":
        from bakron.integrations.llm_compressor import BakronModifier as Modifier
    else:
        Modifier = GPTQModifier
    weights = {"num_bits": int(bits), "type": "int", "symmetric": True, "strategy": "group", "group_size": int(group)}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    ids = load_file(tokens)["ids"]
    start = time.perf_counter()
    oneshot(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        tokenizer=model,
        dataset=Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}),
        recipe=Modifier(config_groups=groups, ignore=["lm_head"], **arguments),
        num_calibration_samples=len(ids),
        max_seq_length=ids.shape[1],
        shuffle_calibration_samples=False,
        pipeline="sequential",
        output_dir=out,
    )
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    new = None
    if rest != ["--no-reload"]:
        reloaded, prompt = AutoModelForCausalLM.from_pretrained(out), ids[:1, :16]
        new = reloaded.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :].tolist()
    print(json.dumps({"version": version("llmcompressor"), "seconds": round(seconds, 1), "peak_memory_bytes": peak, "generated": new}))


if __name__ == "__main__":
    main()
