"""A tokenizer as GGUF's metadata: copied from a GGUF source, or translated from a byte-level BPE or a SentencePiece-like tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bakron.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Field = tuple[str, Any, Any, Any]  # key, value, type, type of elements

# How text is cut into words, by llama.cpp's name for it: a piece of the pattern that no other has.
PATTERNS = {
    "llama-bpe": r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def fields(tokenizer: PreTrainedTokenizerBase | None, source: Path | None, size: int) -> list[Field]:
    """Metadata of a tokenizer.

    Args:
        tokenizer: Of the model; None if it has none.
        source: The GGUF file that the model comes from, or None.
        size: Rows of the embedding.

    Raises:
        ModelError: No tokenizer, or one of a kind that llama.cpp has no name for.
    """
    if source is not None:
        return _copied(source)
    if tokenizer is None:
        raise ModelError("a model without tokenizer in format gguf", "a tokenizer beside the model")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    core = json.loads(backend.to_str()) if backend is not None else {"model": {"type": type(tokenizer).__name__}}
    if core["model"]["type"] != "BPE":
        raise ModelError(f"a tokenizer of kind {core['model']['type']} in format gguf", "a BPE tokenizer", "Use another format")
    sentencepiece = bool(core["model"].get("byte_fallback"))
    tokens, types = _tokens(core, size)
    found: dict[str, Any] = {"model": "llama" if sentencepiece else "gpt2"}
    if sentencepiece:
        found["scores"] = _scores(core, tokens)
        found["add_space_prefix"] = _space_prefix(core)
    else:
        found |= {"pre": _pre(core), "merges": [_merge(pair) for pair in core["model"]["merges"]]}
    found |= {"tokens": tokens, "token_type": types}
    for theirs, ours in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items():
        if (number := getattr(tokenizer, f"{ours}_token_id")) is not None:
            found[f"{theirs}_token_id"] = number
    plain, marked = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (False, True))
    found["add_bos_token"] = marked[:1] == [tokenizer.bos_token_id] and marked != plain
    listed = [(f"tokenizer.ggml.{key}", value) for key, value in found.items()]
    if isinstance(tokenizer.chat_template, str):
        listed.append(("tokenizer.chat_template", tokenizer.chat_template))
    return [_field(key, value) for key, value in listed]


def _copied(source: Path) -> list[Field]:
    from gguf import GGUFReader, GGUFValueType

    copied = []
    for key, field in GGUFReader(source).fields.items():
        if key.startswith("tokenizer."):
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            copied.append((key, field.contents(), field.types[0], sub_type))
    return copied


def _field(key: str, value: Any) -> Field:
    from gguf import GGUFValueType as Type

    if isinstance(value, list):
        kind = {str: Type.STRING, float: Type.FLOAT32, int: Type.INT32}[type(value[0]) if value else str]
        return key, value, Type.ARRAY, kind
    return key, value, {str: Type.STRING, bool: Type.BOOL, int: Type.UINT32}[type(value)], None


def _tokens(core: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Every token's text and type; rows of the embedding that no token has are named as unused."""
    from gguf import TokenType

    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [int(TokenType.UNUSED)] * size
    unknown = core["model"].get("unk_token")
    for text, number in core["model"]["vocab"].items():
        if number >= size:
            raise ModelError(
                f"token {number} of the tokenizer", f"less than {size}, the rows of the embedding", "Get the model's own tokenizer"
            )
        tokens[number] = text
        byte = core["model"].get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", text)
        types[number] = int(TokenType.UNKNOWN if text == unknown else TokenType.BYTE if byte else TokenType.NORMAL)
    for added in core.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        if added["content"] != unknown:
            types[added["id"]] = int(TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
    return tokens, types


def _scores(core: dict[str, Any], tokens: list[str]) -> list[float]:
    """SentencePiece merges what scores highest first; here that is what is merged first."""
    rank: dict[str, int] = {}
    for number, pair in enumerate(core["model"]["merges"]):
        rank.setdefault("".join(pair if isinstance(pair, list) else pair.split(" ")), number)
    return [-float(rank[token]) if token in rank else 0.0 for token in tokens]


def _space_prefix(core: dict[str, Any]) -> bool:
    steps = [core.get("normalizer") or {}, core.get("pre_tokenizer") or {}]
    steps += [step for outer in steps for step in outer.get("normalizers", []) + outer.get("pretokenizers", [])]
    return any(step.get("type") == "Prepend" or step.get("prepend_scheme") in ("first", "always") for step in steps)


def _pre(core: dict[str, Any]) -> str:
    """llama.cpp's name for how a byte-level tokenizer cuts text into words."""
    outer = core.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", [outer])
    kinds = [step.get("type") for step in steps]
    patterns = [str(step["pattern"].get("Regex", "")) for step in steps if step.get("type") == "Split"]
    last = steps[-1]
    if kinds[-1:] == ["ByteLevel"] and not last.get("add_prefix_space", False):
        if kinds == ["ByteLevel"] and last.get("use_regex", True):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and last.get("use_regex", True):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and patterns == [GPT2]:
            return "gpt-2"
        if kinds == ["Split", "ByteLevel"]:
            for name, end in PATTERNS.items():
                if patterns[0].endswith(end) and patterns[0].startswith("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"):
                    return name
    raise ModelError(
        f"a tokenizer that cuts text by {', '.join(str(kind) for kind in kinds)} in a way that llama.cpp has no name for",
        "the way of GPT-2, Llama 3, Qwen2 or SmolLM",
        "Use another format, or start from a GGUF file of the model",
    )


def _merge(pair: Any) -> str:
    """The two parts with a blank between them; blanks within a part are written as bytes are elsewhere."""
    return pair if isinstance(pair, str) else " ".join(part.replace(" ", "Ġ") for part in pair)
