import json
import math

import pytest
import torch
from tiny import save_tiny, save_tiny_gguf, tiny_model, tiny_tokenizer

import bakron
from bakron import data, evaluation
from bakron.errors import ModelError, RecipeError

KEYS = {"perplexity", "kl", "agreement", "tokens", "sequences", "length"}
LONG = 2 * evaluation.HEAD_TOKENS + 45


def pair(kind, **changes):
    """A model and one a little off it."""
    original, model = tiny_model(kind, **changes), tiny_model(kind, **changes)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    return model, original


def by_hand(model, original, ids):
    """All three figures from full logits in float64."""
    with torch.no_grad():
        log_q, log_p = (torch.log_softmax(one(input_ids=ids).logits.double(), -1)[:, :-1] for one in (model, original))
    labels = ids[:, 1:]
    nll = -log_q.gather(-1, labels[..., None])
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    return float(nll.mean().exp()), float(kl.mean()), float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean())


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("length", [2, 17, evaluation.HEAD_TOKENS + 1, LONG])
def test_figures_are_those_of_full_logits(kind, length):
    model, original = pair(kind, max_position_embeddings=512)
    ids = torch.randint(128, (3, length), generator=torch.Generator().manual_seed(0))
    result = evaluation.compare(model, ids, original)
    perplexity, kl, agreement = by_hand(model, original, ids)
    assert result.keys() == KEYS
    assert result["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert result["kl"] == pytest.approx(kl, rel=1e-3) and result["kl"] > 1e-3
    assert result["agreement"] == pytest.approx(agreement)
    assert (result["tokens"], result["sequences"], result["length"]) == (3 * (length - 1), 3, length)


def test_kl_is_from_the_original_to_the_model():
    model, original = pair("llama")
    ids = torch.randint(128, (2, 20), generator=torch.Generator().manual_seed(0))
    forth, back = evaluation.compare(model, ids, original)["kl"], evaluation.compare(original, ids, model)["kl"]
    assert forth == pytest.approx(by_hand(model, original, ids)[1], rel=1e-4)
    assert back != pytest.approx(forth, rel=1e-3)


def test_model_against_itself():
    ids = torch.randint(128, (2, 20), generator=torch.Generator().manual_seed(0))
    result = evaluation.compare(tiny_model("llama"), ids, tiny_model("llama"))
    assert (result["kl"], result["agreement"]) == (0.0, 1.0)


def test_without_reference_there_is_only_perplexity():
    ids = torch.randint(128, (2, 20), generator=torch.Generator().manual_seed(0))
    model, original = pair("llama")
    result = evaluation.compare(model, ids)
    assert result.keys() == KEYS and result["kl"] is None and result["agreement"] is None
    assert result["perplexity"] == evaluation.compare(model, ids, original)["perplexity"]


def test_hopeless_model_has_a_finite_perplexity():
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight *= 1e6
    perplexity = evaluation.compare(model, torch.randint(128, (1, 20), generator=torch.Generator().manual_seed(0)))["perplexity"]
    assert math.isfinite(perplexity) and perplexity > 1e300
    json.dumps(perplexity, allow_nan=False)


def test_models_of_different_vocabularies(tmp_path):
    with pytest.raises(ModelError) as caught:
        evaluation.compare(tiny_model("llama"), torch.zeros(1, 4, dtype=torch.long), tiny_model("llama", vocab_size=130))
    assert str(caught.value) == (
        "the model's vocabulary has 128 entries, the reference's 130; expected the same model before quantization."
    )


# --- as a function on files ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog; 0123456789.\n" * 30)
    return str(file)


@pytest.mark.parametrize("format", ["compressed-tensors", "dense"])
def test_quantized_output_against_its_original(format, tmp_path, text):
    from transformers import AutoModelForCausalLM

    path = save_tiny(tmp_path / "model", "llama")
    bakron.quantize(path, tmp_path / "out", method="rtn", group_size=32, levels=7, format=format)
    result = bakron.evaluate(tmp_path / "out", reference=path, data=text, length=32, sequences=5)
    ids = data.windows(data.load(text, split="evaluation"), tiny_tokenizer(), length=32, sequences=5, seed=None).ids
    perplexity, kl, agreement = by_hand(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), tiny_model("llama"), ids)
    assert result["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert result["kl"] == pytest.approx(kl, rel=1e-3) and result["kl"] > 0
    assert result["agreement"] == pytest.approx(agreement)
    assert (result["sequences"], result["length"], result["tokens"]) == (5, 32, 155)


def test_all_windows_by_default_and_the_first_ones_on_demand(tmp_path, text):
    path = save_tiny(tmp_path / "model", "llama")
    told, log = [], []
    result = bakron.evaluate(path, data=text, length=64, progress=lambda *step: told.append(step), log=log.append)
    count = (30 * 57 + 1) // 64
    assert result["sequences"] == count and told[-1] == ("evaluate", count, count)
    assert log[0].startswith(f"evaluation: {count} sequences of 64 tokens") and log[1:] == [f"loading {path}"]
    few = bakron.evaluate(path, data=text, length=64, sequences=2)
    assert few["sequences"] == 2 and few["perplexity"] != result["perplexity"]


def test_evaluation_part_of_builtin_is_the_default(tmp_path):
    log = []
    bakron.evaluate(save_tiny(tmp_path / "model", "llama"), length=32, sequences=1, log=log.append)
    assert "builtin (evaluation part)" in log[0]


def test_half_precision_model_is_evaluated_in_float32(tmp_path, text):
    path = save_tiny(tmp_path / "model", "llama", dtype=torch.bfloat16)
    result = bakron.evaluate(path, data=text, length=32, sequences=3)
    ids = data.windows(data.load(text, split="evaluation"), tiny_tokenizer(), length=32, sequences=3, seed=None).ids
    model = tiny_model("llama")
    model.load_state_dict({name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()})
    assert result["perplexity"] == pytest.approx(by_hand(model, model, ids)[0], rel=1e-5)


def test_gguf_against_its_own_weights(tmp_path, text):
    model = save_tiny_gguf(tmp_path / "tiny.gguf", quantized=True)
    model.save_pretrained(tmp_path / "plain")
    result = bakron.evaluate(tmp_path / "tiny.gguf", reference=tmp_path / "plain", data=text, length=32, sequences=2)
    assert result["kl"] == pytest.approx(0, abs=1e-9) and result["agreement"] == 1.0


@pytest.mark.parametrize("options, message", [(dict(length=1), "at least 2 tokens"), (dict(sequences=0), "at least 1")])
def test_sizes_that_mean_nothing(options, message, tmp_path, text):
    with pytest.raises(RecipeError, match=message):
        bakron.evaluate(save_tiny(tmp_path / "model", "llama"), data=text, **options)


def test_unknown_device(tmp_path, text):
    with pytest.raises(RecipeError) as caught:
        bakron.evaluate(save_tiny(tmp_path / "model", "llama"), data=text, device="gpu")
    assert str(caught.value).startswith("device 'gpu': ") and "such as cpu" in str(caught.value)


def test_windows_longer_than_the_model_was_made_for_are_refused(tmp_path):
    save_tiny(tmp_path / "model", "llama")
    (tmp_path / "text.txt").write_text("some words to fill a window with " * 40)
    with pytest.raises(ModelError, match="at most 128, the model's max_position_embeddings"):
        bakron.evaluate(tmp_path / "model", data=str(tmp_path / "text.txt"), length=256)
