"""Tiny random models of every supported architecture, and a tokenizer to go with them, made in memory."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch

KINDS = ("llama", "llama-bias", "mistral", "qwen2", "qwen3")  # blocks of seven linears, under Llama's names
OTHERS = ("gemma2", "gemma3", "phi", "gpt2", "qwen3-moe", "mixtral")
MIXTURES = ("qwen3-moe", "mixtral")

VOCABULARY = ["<unk>", "<s>", "</s>", *string.ascii_lowercase, *string.digits, " ", "\n", *string.punctuation]


def tiny_tokenizer(bos: bool = True) -> Any:
    """One token per character (upper case is unknown); puts `<s>` in front if `bos`; has no pad token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", VOCABULARY.index("<s>"))])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )


def tiny_bpe(cut: str = "gpt-2", size: int = 120) -> Any:
    """A byte-level BPE tokenizer of `size` tokens that cuts words as GPT-2 or SmolLM ("smollm") do, or one like SentencePiece's ("llama")."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    text = ["the quick brown fox jumps over the lazy dog; 0123456789.", "the man in the moon", "a lazy, lazy fox"] * 20
    special = ["<unk>", "<s>", "</s>"]
    if cut == "llama":
        core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        core.train_from_iterator(text, trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False))
        core.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        core = Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.pre_tokenizer = level if cut == "gpt-2" else pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
        core.decoder = decoders.ByteLevel()
        core.train_from_iterator(text, trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False))
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=128)
    made.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


def tiny_config(kind: str, **changes: Any) -> Any:
    """Configuration of a tiny model: 2 blocks, width 64, 4 heads on 2 key-value heads, 128 tokens of vocabulary; `changes` win."""
    import transformers

    shape: dict[str, Any] = dict(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        bos_token_id=VOCABULARY.index("<s>"),
        eos_token_id=VOCABULARY.index("</s>"),
        pad_token_id=None,
        tie_word_embeddings=False,
        dtype="float32",
    )
    mixed = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 24, "tie_word_embeddings": True}
    two_bases = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    }
    name, own = {
        "llama": ("LlamaConfig", {}),
        "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
        "mistral": ("MistralConfig", {"sliding_window": 8}),
        "qwen2": ("Qwen2Config", {}),
        "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
        # Sliding blocks and full ones, caps near the sizes of scores and logits, so that they bend them.
        "gemma2": ("Gemma2Config", {**mixed, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 32}),
        "gemma3": ("Gemma3TextConfig", {**mixed, "rope_parameters": two_bases, "query_pre_attn_scalar": 32}),
        "phi": ("PhiConfig", {"partial_rotary_factor": 0.5}),
        "gpt2": ("GPT2Config", {"n_inner": 96, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True}),
        # Block 1 has no experts.
        "qwen3-moe": (
            "Qwen3MoeConfig",
            {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1], "head_dim": 16},
        ),
        "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    }[kind]
    if kind == "gpt2":
        del shape["intermediate_size"]  # n_inner is its name there
    return getattr(transformers, name)(**{**shape, **own, **changes})


def tiny_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A randomly initialised model in float32 and eval mode; biases and norm weights are random too, so that losing one shows."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes), dtype=torch.float32)
        if kind in MIXTURES:
            model.set_experts_implementation("eager")  # the only one that computes in float64
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    parameter.normal_(std=0.1)
                elif "norm" in name:
                    parameter.normal_(mean=1.0, std=0.1)
    return model.eval()


def save_tiny(path: str | Path, kind: str, seed: int = 0, dtype: torch.dtype | None = None, tokenizer: Any = None, **changes: Any) -> Path:
    """Write a tiny model, its tokenizer (default: `tiny_tokenizer`) and its generation config to a directory, as a user would have it on disk.

    `AutoTokenizer` reads the tokenizer of a `qwen2` directory as a byte-level one, which knows neither blank nor newline; it still works.
    """
    model = tiny_model(kind, seed, **changes)
    if dtype is not None:
        model = model.to(dtype)
        model.config.dtype = dtype
    model.save_pretrained(path)
    (tokenizer or tiny_tokenizer()).save_pretrained(path)
    return Path(path)


def save_tiny_gguf(path: str | Path, seed: int = 0, quantized: bool = False) -> Any:
    """Write a tiny llama with a byte-level tokenizer as a GGUF file, block linears in Q8_0 if `quantized`; returns the model whose weights it holds."""
    import gguf

    model = tiny_model("llama", seed)
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    characters = [token.replace(" ", "Ġ").replace("\n", "Ċ") for token in VOCABULARY]
    writer.add_token_list([*characters, "th", *(f"<{index}>" for index in range(config.vocab_size - len(VOCABULARY) - 1))])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module, block = name.removesuffix(".weight"), ""
            if module.startswith("model.layers."):
                _, _, index, module = module.split(".", 3)
                block = f"blk.{index}."
            q8 = quantized and module.endswith("_proj")
            if q8:  # onto the format's own values, so that the file holds this model exactly
                packed = gguf.quants.quantize(parameter.numpy(), gguf.GGMLQuantizationType.Q8_0)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)))
            stored = parameter.detach()
            if module in heads:  # GGUF keeps the two halves of a rotary pair side by side
                half = stored.shape[0] // heads[module] // 2
                stored = stored.reshape(heads[module], 2, half, -1).transpose(1, 2).reshape(stored.shape)
            array = stored.contiguous().numpy()
            kind = gguf.GGMLQuantizationType.Q8_0 if q8 else None
            writer.add_tensor(f"{block}{names[module]}.weight", gguf.quants.quantize(array, kind) if q8 else array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
