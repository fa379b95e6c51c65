import gzip
import hashlib
import json
import logging
import random
import re
import subprocess
import sys

import pytest
import torch
from tiny import tiny_tokenizer

from bakron import data
from bakron.errors import DataError, RecipeError

DENSE = "abcdefghij" * 100


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def refusal(spec):
    """The message of `load`; `check` must say the same wherever it looks."""
    with pytest.raises(DataError) as caught:
        data.load(spec, split="calibration")
    return str(caught.value)


def refusals(spec):
    with pytest.raises(DataError):
        data.check(spec)
    return refusal(spec)


def windows(*documents, blank=0, bos=False, **options):
    texts = data.Texts(tuple(documents), "a text", "0" * 64, blank)
    return data.windows(texts, tiny_tokenizer(bos=bos), **options)


# --- files that can be read ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "a.raw", "a", "a.md"])
def test_plain_text_is_one_document_with_its_paragraphs(tmp_path, name):
    text = "one\ntwo\n\nthree, naïve\r\n"
    texts = data.load(write(tmp_path / name, text), split="calibration")
    assert texts.documents == (text,)
    assert (texts.source, texts.sha256, texts.blank) == (str(tmp_path / name), hashlib.sha256(text.encode()).hexdigest(), 0)


def test_json_lines(tmp_path):
    lines = ['{"text": "one"}', "", '{"text": "  "}', '{"text": "two\\nlines", "other": 1}', ""]
    spec = write(tmp_path / "a.jsonl", "\n".join(lines))
    texts = data.load(spec, split="evaluation")
    assert texts.documents == ("one", "two\nlines") and texts.blank == 2
    data.check(spec)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.JSONL"])
def test_column_of_json_lines(tmp_path, name):
    spec = write(tmp_path / name, '{"content": "one"}\r\n{"content": "two"}\r\n') + ":content"
    assert data.load(spec, split="calibration").documents == ("one", "two")
    data.check(spec)


def test_line_separators_inside_a_json_string_end_no_line(tmp_path):
    spec = write(tmp_path / "a.jsonl", '{"text": "a\u2028b\x0bc"}\n'.replace("\x0b", "\\u000b"))
    assert data.load(spec, split="calibration").documents == ("a\u2028b\x0bc",)


def test_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["one", "", "two"], "text": [1, 2, 3]}), path)
    texts = data.load(f"{path}:body", split="calibration")
    assert texts.documents == ("one", "two") and texts.blank == 1
    data.check(f"{path}:body")
    assert refusals(f"{path}:bodi") == f"{path}: no column 'bodi'; found 'body', 'text'. Choose one with {path}:COLUMN."
    assert refusals(str(path)) == f"{path}, row 1: 'text' is of type int; expected a string."


@pytest.mark.parametrize("content", ["text\n", '{"text": "text\\n"}\n'])
def test_byte_order_mark(tmp_path, content):
    path = tmp_path / ("a.jsonl" if content.startswith("{") else "a.txt")
    assert data.load(write(path, b"\xef\xbb\xbf" + content.encode()), split="calibration").documents == ("text\n",)


def test_file_with_a_colon_in_its_name(tmp_path):
    assert data.load(write(tmp_path / "a:b.txt", "text"), split="calibration").documents == ("text",)


def test_digest_tells_document_boundaries_apart(tmp_path):
    one = data.load(write(tmp_path / "1.jsonl", '{"text": "ab"}\n{"text": "c"}'), split="calibration")
    two = data.load(write(tmp_path / "2.jsonl", '{"text": "a"}\n{"text": "bc"}'), split="calibration")
    assert one.sha256 != two.sha256


# --- files that cannot --------------------------------------------------------------------------------


def test_missing_file(tmp_path):
    assert refusals(str(tmp_path / "no.txt")) == f"there is no file {tmp_path / 'no.txt'}. Check the path."
    assert refusals(str(tmp_path / "no.jsonl:content")) == f"there is no file {tmp_path / 'no.jsonl'}. Check the path."


def test_mistyped_path_never_asks_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for spec in ("texts/valid", "./valid", "nowhere/valid.txt", "nowhere/valid.parquet:body", "valid.jsonl"):
        assert refusals(spec).startswith("there is no file")


def test_word_that_is_nothing():
    kinds = "expected a text file, a .jsonl or .parquet file, a hub data set org/name, or builtin"
    assert refusals("bultin") == f"there is no file bultin; {kinds}. Perhaps builtin is meant."
    assert refusals("wikitext") == f"there is no file wikitext; {kinds}."
    assert refusals(" ") == f"the data spec is blank; {kinds}."
    for text in ("word " * 1000, "a\0b"):
        assert refusals(text).endswith(f"is no path that can be read; {kinds}.")


def test_directory(tmp_path):
    assert refusals(str(tmp_path)) == f"{tmp_path} is a directory; expected one text file. Name the file in it."


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_empty_file(tmp_path, name):
    assert refusals(write(tmp_path / name, b"")) == f"{tmp_path / name} is empty; expected text."


@pytest.mark.parametrize("name, count", [("a.txt", "1 blank line"), ("a.jsonl", "3 blank lines")])
def test_only_blanks(tmp_path, name, count):
    message = refusals(write(tmp_path / name, b"  \n \n\t\n"))
    assert message == f"{tmp_path / name} holds no text, only {count}; expected at least one document that is not blank."


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_not_utf8(tmp_path, mark):
    message = refusals(write(tmp_path / "a.txt", mark + b"one\ncaf\xe9 x"))
    where = f"byte 0xe9 at offset {7 + len(mark)} (line 2)"
    assert message == f"{tmp_path / 'a.txt'} is not UTF-8: {where}; expected UTF-8 text. Convert it, for example with iconv."


def test_binary_and_gzip(tmp_path):
    assert "is a binary file: zero character at offset 3" in refusals(write(tmp_path / "a.bin", b"abc\0def"))
    assert "is compressed with gzip; expected plain text. Unpack it first." in refusals(write(tmp_path / "a.jsonl.gz", gzip.compress(b"x")))
    assert "is compressed with gzip" in refusals(write(tmp_path / "a.jsonl", gzip.compress(b"x")))


def test_bad_json_names_the_line(tmp_path):
    good = '{"text": "one"}\n\n'
    message = refusal(write(tmp_path / "a.jsonl", good + '{"text": "tw'))
    assert re.search(
        r"a\.jsonl, line 3: not JSON \(Unterminated string starting at, column 10\); expected one JSON object per line\.$", message
    )
    assert "line 3: a single value; expected an object" in refusal(write(tmp_path / "a.jsonl", good + '"two"'))
    assert "line 1: a list; expected an object" in refusals(write(tmp_path / "a.json", '[{"text": "one"}]'))
    assert "line 1: not JSON" in refusals(write(tmp_path / "a.json", '[\n{"text": "one"}\n]'))


def test_missing_column_lists_those_found(tmp_path):
    path = tmp_path / "a.jsonl"
    message = refusals(write(path, '{"TEXT": "one", "id": 1}'))
    assert message == f"{path}, line 1: no column 'text'; found 'TEXT', 'id'. Choose one with {path}:COLUMN."
    assert "line 2: no column 'text'; found none" in refusal(write(path, '{"text": "one"}\n{}'))


@pytest.mark.parametrize(
    "value, shown",
    [(None, "is null; expected a string."), (5, "is of type int; expected a string."), (["a"], "is of type list; expected a string.")],
)
def test_text_that_is_no_string(tmp_path, value, shown):
    path = tmp_path / "a.jsonl"
    assert refusal(write(path, '{"text": "one"}\n' + json.dumps({"text": value}))) == f"{path}, line 2: 'text' {shown}"


def test_half_a_surrogate_pair(tmp_path):
    message = refusals(write(tmp_path / "a.jsonl", '{"text": "a\\ud800"}'))
    assert "line 1: 'text' has half a surrogate pair at character 1; expected valid Unicode" in message


def test_plain_text_has_no_columns(tmp_path):
    assert "is taken as plain text, which has no column 'body'" in refusals(write(tmp_path / "a.txt", "text") + ":body")


def test_not_parquet(tmp_path):
    assert "a.parquet is not a parquet file that can be read (" in refusals(write(tmp_path / "a.parquet", b"hello, world"))


# --- the hub ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec, split, call",
    [
        ("org/name", "calibration", ("org/name", None, "train")),
        ("org/name", "evaluation", ("org/name", None, "test")),
        ("org/name/part-v1", "calibration", ("org/name", "part-v1", "train")),
        ("org/name:train[:10%]:text", "evaluation", ("org/name", None, "train[:10%]")),
    ],
)
def test_hub_name(monkeypatch, spec, split, call):
    import datasets

    def load_dataset(name, config, *, split):
        assert (name, config, split) == call
        return datasets.Dataset.from_dict({"text": ["one", "", "two"], "id": [1, 2, 3]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data.check(spec)
    texts = data.load(spec, split=split)
    assert (texts.documents, texts.blank, texts.source) == (("one", "two"), 1, spec)
    if spec == "org/name":
        with pytest.raises(
            DataError, match="hub data set org/name: no column 'body'; found 'text', 'id'. Choose one with org/name:validation:COLUMN"
        ):
            monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: datasets.Dataset.from_dict({"text": ["one"], "id": [1]}))
            data.load("org/name:validation:body", split=split)


def test_hub_without_network():
    code = "from bakron import data; data.check('org/name'); data.load('org/name', split='calibration')"
    environment = {"HF_HUB_OFFLINE": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(
        r"DataError: hub data set org/name, split train, cannot be loaded \(\w+: .+\)\. Without network give a local text file", last
    )


# --- the built-in text --------------------------------------------------------------------------------


def test_builtin_parts_share_no_paragraph():
    parts = [data.load("builtin", split=split) for split in ("calibration", "evaluation")]
    paragraphs = [{" ".join(p.split()) for text in part.documents for p in re.split(r"\n\s*\n", text)} for part in parts]
    assert paragraphs[0].isdisjoint(paragraphs[1])
    sizes = [sum(map(len, part.documents)) for part in parts]
    assert sizes[0] > 200_000 and sizes[1] > 40_000
    assert parts[0].source == "builtin (calibration part)" and parts[0].sha256 != parts[1].sha256
    assert data.load("builtin", split="evaluation") == parts[1]
    data.check("builtin")


def test_python_without_builtin(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert refusals("builtin") == "this Python comes without pydoc_data, the text behind builtin. Give a text file instead."


# --- windows ------------------------------------------------------------------------------------------


def test_windows_are_the_stream_cut_up():
    tokens = windows(DENSE, length=32)
    stream = tiny_tokenizer(bos=False)(DENSE)["input_ids"]
    assert tokens.ids.dtype == torch.int64 and tokens.ids.shape == (31, 32)
    assert tokens.ids.flatten().tolist() == stream[: 31 * 32]
    assert (tokens.asked, tokens.kept, tokens.available, tokens.tokens_in_text, tokens.dropped_tail) == (None, 31, 31, 1000, 8)


def test_documents_are_joined_in_order_with_their_own_special_tokens():
    tokens = windows("ab", "c\n", "de", bos=True, length=2)
    expected = ["<s>", *"ab\n\n", "<s>", *"c\n\n", "<s>", *"de"]
    assert tiny_tokenizer().convert_ids_to_tokens(tokens.ids.flatten().tolist()) == expected[: tokens.ids.numel()]
    assert (tokens.tokens_in_text, tokens.documents) == (len(expected), 3)


def test_short_documents_are_used_and_counted():
    tokens = windows("a", "b", "abcdefgh" * 8, blank=2, length=32, sequences=128)
    assert (tokens.tokens_in_text, tokens.kept, tokens.asked, tokens.blank) == (70, 2, 128, 2)
    assert tokens.describe() == (
        "2 of 128 sequences of 32 tokens (the text has no more); "
        "a text holds 70 tokens in 3 documents: 2 sequences, tail of 6 dropped; 2 blank passed over"
    )


def test_duplicates_are_counted():
    tokens = windows("abcdefgh" * 5, length=8)
    assert (tokens.kept, tokens.duplicates) == (5, 4)
    assert tokens.describe().endswith("4 duplicates among the kept")


def test_seed_chooses_and_order_stays():
    text = "".join(random.Random(0).choices("abcdefgh", k=4000))
    everything = windows(text, length=16).ids
    chosen = windows(text, length=16, sequences=40, seed=3)
    where = [next(i for i, row in enumerate(everything) if torch.equal(row, window)) for window in chosen.ids]
    assert where == sorted(where) and len(where) == 40
    assert torch.equal(chosen.ids, windows(text, length=16, sequences=40, seed=3).ids)
    assert not torch.equal(chosen.ids, windows(text, length=16, sequences=40, seed=4).ids)
    fewer = windows(text, length=16, sequences=10, seed=3).ids
    assert all(any(torch.equal(row, other) for other in chosen.ids) for row in fewer), "the same seed with fewer sequences gives a subset"
    assert torch.equal(windows(text, length=16, sequences=40).ids, everything[:40]), "without seed the first ones"


def test_caller_keeps_random_state_and_tokenizer(capsys, caplog):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(5)
    before, state = tokenizer.backend_tokenizer.to_str(), torch.get_rng_state()
    texts = data.Texts((DENSE,), "a text", "0" * 64)
    logging.getLogger("transformers").propagate = True
    tokens = data.windows(texts, tokenizer, length=16, sequences=4, seed=0)
    assert tokens.tokens_in_text == 1001, "the tokenizer's own truncation is not applied"
    assert tokenizer.backend_tokenizer.to_str() == before and torch.equal(torch.get_rng_state(), state)
    assert capsys.readouterr() == ("", "") and caplog.text == "", "no warning about a text longer than the model's context"
    assert tokenizer.pad_token is None


def test_too_little_text():
    with pytest.raises(DataError) as caught:
        windows("abc", length=32, bos=True)
    assert str(caught.value) == "a text gives 4 tokens, too few for one sequence; expected at least 32. Give more text or a smaller length."


@pytest.mark.parametrize(
    "options, message", [({"length": 1}, "length is 1; expected at least 2"), ({"length": 8, "sequences": 0}, "sequences is 0")]
)
def test_sizes_that_mean_nothing(options, message):
    with pytest.raises(RecipeError, match=message):
        windows(DENSE, **options)


def test_record_is_plain():
    record = windows(DENSE, length=32, sequences=4, seed=0).record()
    assert json.loads(json.dumps(record)) == record
    assert record["length"] == 32 and record["kept"] == 4 and "ids" not in record
