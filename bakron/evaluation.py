"""Perplexity of a model, and how far it is from the original: KL divergence and agreement of the most likely token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bakron.errors import ModelError
from bakron.models.layout import layout_of
from bakron.models.linears import output_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str, int, int], None]
HEAD_TOKENS = 128  # tokens whose logits are alive at a time


def compare(
    model: PreTrainedModel,
    ids: Tensor,
    reference: PreTrainedModel | None = None,
    *,
    device: str | torch.device = "cpu",
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Run the model (and the original) over windows of text, one by one; the last position of each predicts nothing and is left out.

    Args:
        model: To be judged.
        ids: Windows `[N, T]`.
        reference: The original, for KL and agreement.
        device: Where the models run.
        progress: Called with (stage, done, total).

    Returns:
        `perplexity`; `kl`, KL(original || model) in nats, mean per token, and `agreement`, the share of equal most likely tokens (both None without a
        reference); `tokens` predicted, `sequences`, `length`.

    Raises:
        ModelError: The two models have different vocabularies.
    """
    models = [model] if reference is None else [model, reference]
    if reference is not None and model.config.vocab_size != reference.config.vocab_size:
        raise ModelError(
            f"the model's vocabulary has {model.config.vocab_size} entries, the reference's {reference.config.vocab_size}",
            "the same model before quantization",
        )
    loss = kl = agreed = 0.0
    for one in models:
        one.to(device)
    with torch.no_grad():
        for n, window in enumerate(ids):
            hidden = [_hidden(one, window[None].to(device)) for one in models]
            for start in range(0, len(window) - 1, HEAD_TOKENS):
                stop = min(start + HEAD_TOKENS, len(window) - 1)
                log_q, *rest = [_log_probabilities(one, h[start:stop]) for one, h in zip(models, hidden, strict=True)]
                labels = window[start + 1 : stop + 1, None].to(device)
                loss -= float(log_q.gather(-1, labels).double().sum())
                for log_p in rest:
                    kl += float((log_p.exp() * (log_p - log_q)).sum(-1).double().sum())
                    agreed += float((log_p.argmax(-1) == log_q.argmax(-1)).sum())
            progress("evaluate", n + 1, len(ids))
    tokens = ids.shape[0] * (ids.shape[1] - 1)
    return {
        "perplexity": _exp(loss / tokens),
        "kl": None if reference is None else kl / tokens,
        "agreement": None if reference is None else agreed / tokens,
        "tokens": tokens,
        "sequences": ids.shape[0],
        "length": ids.shape[1],
    }


def _hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    body = model.get_submodule(layout_of(model.config.model_type).body)
    return body(input_ids=ids, use_cache=False).last_hidden_state[0]


def _log_probabilities(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    return torch.log_softmax(output_logits(model, hidden, layout_of(model.config.model_type).head).float(), -1)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
