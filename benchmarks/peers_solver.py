"""Time llm-compressor's own GPTQ function on given tensors, in the peers' environment (`make peers`), where bakron is not installed.

`python peers_solver.py IN OUT BITS GROUP THREADS REPEATS`: IN holds W [m, n], A [n, n] (damped) and scale [m, groups]; GROUP 0 is a scale per row.
Prints JSON: version, runs (seconds of the whole call), factors (seconds of each run's factorisation); OUT gets the rounded values.
"""

import json
import sys
import time
from importlib.metadata import version

import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq import gptq_quantize
from safetensors.torch import load_file, save_file


def main() -> None:
    source, target, *numbers = sys.argv[1:]
    bits, group, threads, repeats = map(int, numbers)
    torch.set_num_threads(threads)
    given = {name: tensor[None] for name, tensor in load_file(source).items()}  # a batch of one
    scheme = QuantizationArgs(num_bits=bits, symmetric=True, strategy="group" if group else "channel", group_size=group or None)
    zero, runs, factors = torch.zeros_like(given["scale"]), [], []
    factorize = gptq_quantize.factorize_hessian

    def timed(*arguments: object) -> torch.Tensor:
        start = time.perf_counter()
        factor = factorize(*arguments)
        factors.append(time.perf_counter() - start)
        return factor

    gptq_quantize.factorize_hessian = timed
    for _ in range(repeats + 1):
        W, A = given["W"].clone(), given["A"].clone()  # the function works in place
        start = time.perf_counter()
        values, _, failed = gptq_quantize.quantize_weight(W, A, given["scale"], zero, None, scheme, blocksize=128, percdamp=0.0)
        runs.append(time.perf_counter() - start)
        if failed.any():
            sys.exit("llm-compressor could not factorise A and rounded to nearest instead")
    save_file({"values": values[0].contiguous()}, target)
    print(json.dumps({"version": version("llmcompressor"), "runs": runs[1:], "factors": factors[1:]}))


if __name__ == "__main__":
    main()
