"""Text for calibration and evaluation, cut into token windows `[N, T]`; nothing is dropped without being counted.

What a document is: the whole of a plain text file, one line of a JSON Lines file, one row of a parquet file or a hub data set, one topic
of the built-in text. Documents are tokenized one by one, in order, each with the special tokens that the tokenizer itself adds; all but
the last end with a blank line. No other token is put in between: the end token of a chat model ends a turn, not a document.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bakron.errors import DataError, RecipeError

if TYPE_CHECKING:
    import torch

Split = Literal["calibration", "evaluation"]

GIVEN = "ids:"  # in a recipe, before a part of the digest of token ids that were given in place of a text
TABLES = (".jsonl", ".json", ".parquet")
_KINDS = "a text file, a .jsonl or .parquet file, a hub data set org/name, or builtin"
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[^:\[\]]+(?:\[[^\]]*\])?))?(?::(?P<column>[^:]+))?")
_HUB_SPLITS = {"calibration": "train", "evaluation": "test"}


@dataclass(frozen=True)
class Texts:
    """Documents as read.

    Attributes:
        documents: The texts, none of them blank.
        source: Where they come from, for messages and records.
        sha256: Digest of the documents' UTF-8 bytes, a zero byte between two.
        blank: Number of blank lines and blank documents passed over.
    """

    documents: tuple[str, ...]
    source: str
    sha256: str
    blank: int = 0


@dataclass(frozen=True)
class Tokens:
    """Windows of tokens, and the account of how they came about.

    Attributes:
        ids: Token ids, int64 `[N, T]`, never padded.
        asked: Windows asked for; `None` asks for all.
        kept: Windows in `ids`.
        available: Windows in the text.
        tokens_in_text: Tokens in the text, special tokens included.
        dropped_tail: Tokens at the end of the text that fill no window.
        duplicates: Windows in `ids` that repeat an earlier one.
        sha256: Digest of the text.
        source: Where the text comes from.
        documents: Documents in the text; 0 where ids were given in place of a text.
        blank: Blank lines and blank documents passed over.
    """

    ids: torch.Tensor
    asked: int | None
    kept: int
    available: int
    tokens_in_text: int
    dropped_tail: int
    duplicates: int
    sha256: str
    source: str
    documents: int = 1
    blank: int = 0

    def describe(self) -> str:
        """Tell in one line what was kept and what was not."""
        length = self.ids.shape[1]
        if self.given:
            again = f"; {_count(self.duplicates, 'duplicate')} among them" if self.duplicates else ""
            return f"{_count(self.kept, 'sequence')} of {length:,} tokens, given as ids{again}"
        count = f"{self.kept:,}" if self.asked is None else f"{self.kept:,} of {self.asked:,}"
        short = " (the text has no more)" if self.asked is not None and self.kept < self.asked else ""
        text = f"{self.source} holds {self.tokens_in_text:,} tokens in {_count(self.documents, 'document')}"
        cut = f"{_count(self.available, 'sequence')}, tail of {self.dropped_tail:,} dropped"
        parts = [f"{count} sequences of {length:,} tokens{short}", f"{text}: {cut}"]
        if self.blank:
            parts.append(f"{self.blank:,} blank passed over")
        if self.duplicates:
            parts.append(f"{_count(self.duplicates, 'duplicate')} among the kept")
        return "; ".join(parts)

    @property
    def given(self) -> bool:
        """Whether ids were given in place of a text."""
        return self.documents == 0

    @property
    def digest(self) -> str:
        """SHA-256 of the ids."""
        return hashlib.sha256(self.ids.contiguous().numpy().tobytes()).hexdigest()

    def record(self) -> dict[str, Any]:
        """All of it but the ids, as values that JSON can hold."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "ids"} | {"length": self.ids.shape[1]}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# --- from a spec to documents -------------------------------------------------------------------------------------------------------


def load(spec: str, *, split: Split) -> Texts:
    """Read all documents that a spec names.

    Args:
        spec: `builtin`; a path to a `.jsonl`, `.json` (one object per line) or `.parquet` file, with `:column` behind it where the text is
            not in the column `text`; a path to any other file, taken as plain UTF-8 text; or a hub data set
            `org/name[/config][:split[:column]]`.
        split: What the text is for. It chooses the part of `builtin` (they share no paragraph), and the split of a hub data set where the
            spec names none (`train` or `test`).

    Raises:
        DataError: There is no such text, it cannot be read, or it is empty.
    """
    if spec == "builtin":
        documents, blank, source = _builtin(split), 0, f"builtin ({split} part)"
    elif (found := _file(spec)) is not None:
        path, column = found
        source = str(path)
        documents, blank = _collect(_rows(path, column))
    else:
        source = spec
        documents, blank = _collect(_hub_rows(spec, split))
    if not documents:
        raise DataError(f"{source} holds no text, only {_count(blank, 'blank line')}", "at least one document that is not blank")
    digest = hashlib.sha256()
    for index, document in enumerate(documents):
        digest.update(b"\0" * (index > 0) + document.encode())
    return Texts(tuple(documents), source, digest.hexdigest(), blank)


def check(spec: str) -> None:
    """Refuse a spec that `load` would refuse, as far as that shows in a moment: no tokenizer, no network, only the first row of a table.

    Args:
        spec: As for `load`.

    Raises:
        DataError: There is no such text, it cannot be read, or it is empty.
    """
    if spec == "builtin":
        _topics()
    elif (found := _file(spec)) is not None:
        if next((text for text in _rows(*found) if text is not None), None) is None:
            raise DataError(f"{found[0]} holds no text, only blank lines", "at least one document that is not blank")


def _collect(rows: Iterable[str | None]) -> tuple[list[str], int]:
    documents, blank = [], 0
    for text in rows:
        if text is None:
            blank += 1
        else:
            documents.append(text)
    return documents, blank


def _file(spec: str) -> tuple[Path, str | None] | None:
    """Split a spec into a file and a column; `None` if it names a hub data set."""
    path, column = Path(spec), None
    try:
        path = path.expanduser()
        path.stat()
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # a null byte, a name that is too long (most likely the text itself), the home of nobody
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise DataError(f"{spec[:40]!r}{'...' * (len(spec) > 40)} is no path that can be read", _KINDS) from None
    if not spec.strip():
        raise DataError("the data spec is blank", _KINDS)
    if not path.exists() and ":" in spec:
        head, _, tail = spec.rpartition(":")
        if Path(head).expanduser().is_file() or Path(head).suffix.lower() in (*TABLES, ".txt"):
            path, column = Path(head).expanduser(), tail or None
    if path.is_dir():
        raise DataError(f"{path} is a directory", "one text file", do="Name the file in it")
    if path.exists():
        if column is not None and path.suffix.lower() not in TABLES:
            raise DataError(
                f"{path} is taken as plain text, which has no column {column!r}", do="Drop the column, or give a .jsonl or .parquet file"
            )
        return path, column
    pathlike = path.suffix.lower() in (*TABLES, ".txt", ".raw", ".md", ".csv", ".gz") or spec.startswith((".", "/", "~"))
    if pathlike or "\\" in spec or (path.parent != Path(".") and path.parent.is_dir()):
        raise DataError(f"there is no file {path}", do="Check the path")
    if spec.startswith(GIVEN):
        raise DataError(f"data {spec} stands for token ids that were given to a run", "the same tensor", "Give it as data=, from Python")
    if _HUB.fullmatch(spec) is None:
        near = difflib.get_close_matches(spec, ["builtin"], n=1)
        raise DataError(f"there is no file {spec}", _KINDS, do="Perhaps builtin is meant" if near else None)
    return None


# --- rows of each kind of file: a text, or None for a blank one ----------------------------------------------------------------------


def _rows(path: Path, column: str | None) -> Iterator[str | None]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if size == 0:
        raise DataError(f"{path} is empty", "text")
    if start[:2] == b"\x1f\x8b":
        raise DataError(f"{path} is compressed with gzip", "plain text", do="Unpack it first")
    kind = path.suffix.lower()
    if kind == ".parquet":
        yield from _parquet(path, column or "text")
    elif kind in TABLES:
        yield from _json_lines(path, column or "text")
    else:
        text = _decode(path)
        yield text if text.strip() else None


def _decode(path: Path) -> str:
    raw = path.read_bytes()
    skip = len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0
    try:
        text = raw[skip:].decode("utf-8")
    except UnicodeDecodeError as error:
        offset = error.start + skip
        line = raw.count(b"\n", 0, offset) + 1
        raise DataError(
            f"{path} is not UTF-8: byte 0x{raw[offset]:02x} at offset {offset:,} (line {line:,})",
            "UTF-8 text",
            do="Convert it, for example with iconv",
        ) from None
    if (zero := text.find("\0")) >= 0:
        raise DataError(f"{path} is a binary file: zero character at offset {zero:,}", "UTF-8 text")
    return text


def _json_lines(path: Path, column: str) -> Iterator[str | None]:
    for number, line in enumerate(re.split(r"\r?\n", _decode(path).rstrip("\r\n")), start=1):
        if not line.strip():
            yield None
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number:,}: not JSON ({error.msg}, column {error.colno})", "one JSON object per line") from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists in lists
            raise DataError(f"{path}, line {number:,}: not JSON that can be read ({error})", "one JSON object per line") from None
        if not isinstance(row, dict):
            kind = "a list" if isinstance(row, list) else "a single value"
            raise DataError(f"{path}, line {number:,}: {kind}", f'an object like {{"{column}": "..."}}')
        if column not in row:
            raise _no_column(f"{path}, line {number:,}", column, list(row), f"{path}:COLUMN")
        yield _text(row[column], f"{path}, line {number:,}", column)


def _parquet(path: Path, column: str) -> Iterator[str | None]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise _no_column(str(path), column, names, f"{path}:COLUMN")
            row = 0
            for batch in file.iter_batches(columns=[column]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield _text(value, f"{path}, row {row:,}", column)
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        raise DataError(f"{path} is not a parquet file that can be read ({_first_line(error)})") from None
    if row == 0:
        raise DataError(f"{path} has no rows", "text")


def _hub_rows(spec: str, split: Split) -> Iterator[str | None]:
    match = _HUB.fullmatch(spec)
    assert match is not None
    name, part, column = match["name"], match["split"] or _HUB_SPLITS[split], match["column"] or "text"
    do = "Without network give a local text file, or builtin. If a file was meant, check its path"
    try:
        import datasets

        table = datasets.load_dataset(name, match["config"], split=part)
    except Exception as error:
        raise DataError(
            f"hub data set {name}, split {part}, cannot be loaded ({type(error).__name__}: {_first_line(error)})", do=do
        ) from None
    if column not in table.column_names:
        raise _no_column(f"hub data set {name}", column, table.column_names, f"{name}:{part}:COLUMN")
    for row, value in enumerate(table[column], start=1):
        yield _text(value, f"hub data set {name}, row {row:,}", column)


def _text(value: object, where: str, column: str) -> str | None:
    if not isinstance(value, str):
        shown = "null" if value is None else f"of type {type(value).__name__}"
        raise DataError(f"{where}: {column!r} is {shown}", "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {column!r} has half a surrogate pair at character {error.start:,}", "valid Unicode") from None
    return value if value.strip() else None


def _no_column(where: str, column: str, found: list[str], spec: str) -> DataError:
    return DataError(f"{where}: no column {column!r}; found {', '.join(map(repr, found)) or 'none'}", do=f"Choose one with {spec}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no further word"])[0].rstrip(".")


# --- the built-in text -----------------------------------------------------------------------------------------------------------------


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError("this Python comes without pydoc_data, the text behind builtin", do="Give a text file instead") from None
    return topics


def _builtin(split: Split) -> list[str]:
    """Every fifth topic for evaluation, the rest for calibration; a paragraph that came up before is left out, evaluation being first."""
    topics = _topics()
    names = sorted(topics)
    parts = {"evaluation": names[::5], "calibration": [name for index, name in enumerate(names) if index % 5]}
    seen: set[str] = set()
    documents: dict[str, list[str]] = {}
    for part, members in parts.items():
        documents[part] = []
        for name in members:
            paragraphs = []
            for paragraph in re.split(r"\n\s*\n", topics[name].strip()):
                words = " ".join(paragraph.split())
                if words not in seen:
                    seen.add(words)
                    paragraphs.append(paragraph)
            if paragraphs:
                documents[part].append("\n\n".join(paragraphs))
    return documents[split]


# --- from documents to windows ---------------------------------------------------------------------------------------------------------


def windows(texts: Texts, tokenizer: Any, *, length: int, sequences: int | None = None, seed: int | None = None) -> Tokens:
    """Cut texts into windows of equal length that do not overlap.

    Args:
        texts: What `load` returns.
        tokenizer: A Hugging Face tokenizer; it needs no pad token, and is left as it was.
        length: Tokens per window.
        sequences: Windows to keep; `None` keeps all.
        seed: Chooses windows at random, kept in the order of the text; the same seed with fewer `sequences` gives a subset. `None` takes
            the first ones.

    Returns:
        The windows, fewer than asked for if the text has no more; the account in it says so.

    Raises:
        DataError: The text does not fill a single window.
        RecipeError: `length` or `sequences` is too small to mean anything.
    """
    import torch

    if length < 2:
        raise RecipeError(f"length is {length}", "at least 2 tokens per sequence")
    if sequences is not None and sequences < 1:
        raise RecipeError(f"sequences is {sequences}", "at least 1")
    stream = _stream(texts.documents, tokenizer)
    available, tail = divmod(len(stream), length)
    if available == 0:
        raise DataError(
            f"{texts.source} gives {_count(len(stream), 'token')}, too few for one sequence",
            f"at least {length:,}",
            do="Give more text or a smaller length",
        )
    ids = stream[: available * length].reshape(available, length)
    kept = available if sequences is None else min(sequences, available)
    if seed is None:
        ids = ids[:kept]
    else:
        ids = ids[torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:kept].sort().values]
    return Tokens(
        ids=ids.clone(),
        asked=sequences,
        kept=kept,
        available=available,
        tokens_in_text=len(stream),
        dropped_tail=tail,
        duplicates=kept - len(torch.unique(ids, dim=0)),
        sha256=texts.sha256,
        source=texts.source,
        documents=len(texts.documents),
        blank=texts.blank,
    )


def given(ids: Any) -> Tokens:
    """Token ids that are ready, in place of a text.

    Args:
        ids: Integers `[N, T]`, on any device, at least 2 tokens a sequence, without padding.

    Returns:
        The same, as int64 on the CPU.

    Raises:
        DataError: They are of another kind, dtype or shape, or negative.
    """
    import torch

    expected = "text, or token ids [N, T] as an integer tensor"
    if not isinstance(ids, torch.Tensor):
        raise DataError(f"data is a {type(ids).__name__}", expected, "torch.as_tensor makes one of lists or arrays")
    if ids.is_meta or ids.layout != torch.strided or ids.is_quantized or ids.is_nested:
        raise DataError("data is a tensor that is sparse, nested, quantized or on the meta device", expected, "Give a plain one")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DataError(f"data is a tensor of dtype {str(ids.dtype).removeprefix('torch.')}", expected)
    if ids.ndim != 2 or len(ids) < 1 or ids.shape[1] < 2:
        raise DataError(f"data is a tensor of shape {list(ids.shape)}", f"{expected}, N at least 1, T at least 2")
    ids = ids.detach().to("cpu", torch.int64, copy=True).contiguous()
    if (least := int(ids.min())) < 0:
        raise DataError(f"data has token {least}", "ids from 0 on", "Cut sequences to one length instead of padding them")
    count = len(ids)
    made = Tokens(
        ids=ids,
        asked=count,
        kept=count,
        available=count,
        tokens_in_text=ids.numel(),
        dropped_tail=0,
        duplicates=count - len(torch.unique(ids, dim=0)),
        sha256="",
        source="",
        documents=0,
    )
    return replace(made, sha256=made.digest, source=f"{GIVEN}{made.digest[:16]}")


def _stream(documents: tuple[str, ...], tokenizer: Any) -> torch.Tensor:
    import torch

    ended = [document.rstrip("\n") + "\n\n" for document in documents[:-1]] + list(documents[-1:])
    backend = getattr(tokenizer, "backend_tokenizer", None)
    truncation = getattr(backend, "truncation", None)
    padding = getattr(backend, "padding", None)
    try:
        # Not verbose: a text longer than the model's context is what we want here, and not worth a warning.
        encoded = tokenizer(ended, truncation=False, padding=False, return_attention_mask=False, verbose=False)["input_ids"]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizer, which is written in Rust, is no Exception
        raise DataError(f"the model's tokenizer fails on the text: {_first_line(error)}", "a whole tokenizer beside the model") from error
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)
    return torch.cat([torch.tensor(ids, dtype=torch.long) for ids in encoded])
