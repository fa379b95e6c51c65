"""A stranger's model, text or recipe: whatever is done to it, bakron works or says in a sentence why not. It never crashes, hangs, fills memory or calls out."""

import json
import random
import resource
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
from tiny import save_tiny, save_tiny_gguf

from bakron import config, data
from bakron.errors import BakronError
from bakron.models import load

ROOM = 6 << 30  # bytes of address space that a case may add; every bomb below wants more
SENTENCE = "the quick brown fox jumps over the lazy dog; 0123456789.\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path_factory.mktemp("security")
    save_tiny(path / "model", "llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1, tie_word_embeddings=True)
    save_tiny_gguf(path / "tiny.gguf")
    weights = sorted(load.shard_shapes(path / "model" / "model.safetensors"))
    (path / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")})
    )
    (path / "recipe.yaml").write_text(config.dump(config.Recipe()))
    (path / "text.jsonl").write_text("".join(json.dumps({"text": SENTENCE, "id": i}) + "\n" for i in range(20)))
    pyarrow.parquet.write_table(pyarrow.table({"text": [SENTENCE] * 50, "id": list(range(50))}), path / "text.parquet")
    return path


# --- what is done to a file ----------------------------------------------------------------------------------------------------------------

WORDS = [
    0,
    -1,
    1,
    10**9,
    2**63,
    -(2**63),
    10**30,
    1e308,
    float("nan"),
    None,
    True,
    "",
    "a",
    "../../x",
    "\0",
    "\ud800",
    [],
    {},
    [[]],
    "x" * 5000,
]


def flip(content, chance):
    """A few bytes changed, with the header more likely than the rest."""
    content = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 8])):
        place = chance.randrange(min(len(content), chance.choice([16, 64, 1 << 12, 1 << 30])))
        content[place] = chance.choice([0, 0xFF, content[place] ^ 1 << chance.randrange(8), chance.randrange(256)])
    return bytes(content)


def overwrite(content, chance):
    """A length somewhere becomes enormous, or zero."""
    place = chance.randrange(max(1, min(len(content) - 8, chance.choice([32, 256, 1 << 12]))))
    return content[:place] + struct.pack("<Q", chance.choice([0, 1, 1 << 31, 1 << 37, (1 << 64) - 1])) + content[place + 8 :]


def cut(content, chance):
    return content[: chance.randrange(len(content))]


def repeat(content, chance):
    place = chance.randrange(len(content))
    return content[:place] + content[place : place + chance.randrange(1, 200)] * chance.choice([2, 50]) + content[place:]


BYTES = (flip, overwrite, cut, repeat)


def entries(value, path=()):
    """Every place within a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(inner)[:60]:
        yield (*path, key)
        yield from entries(part, (*path, key))


def mutate_json(value, chance):
    """One to three places of a JSON value set to something else, removed, or doubled."""
    value = json.loads(json.dumps(value))
    for _ in range(chance.choice([1, 1, 1, 3])):
        *above, last = chance.choice(list(entries(value)) or [("x",)])
        holder = value
        for key in above:
            holder = holder[key] if isinstance(holder, list) or key in holder else {}
        if isinstance(holder, dict) and last in holder and chance.random() < 0.15:
            del holder[last]
        elif isinstance(holder, dict) or (isinstance(holder, list) and isinstance(last, int) and last < len(holder)):
            holder[last] = chance.choice(WORDS)
    return value


def json_file(content, chance):
    return json.dumps(mutate_json(json.loads(content), chance)).encode()


def shard(content, chance):
    """Fields of a safetensors header changed, its length right again."""
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(mutate_json(json.loads(content[8 : 8 + length]), chance)).encode()
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def lines(content, chance):
    """A line of text with its value, or the whole line, replaced."""
    rows = content.decode().splitlines()
    row = chance.randrange(len(rows))
    value = chance.choice(
        [json.dumps(chance.choice(WORDS)), "!!python/name:os.system", "&a [*a]", "9" * 5000, "2024-99-99", "[" * 3000, ": :"]
    )
    rows[row] = rows[row].split(":")[0] + ": " + value if chance.random() < 0.7 else value
    return "\n".join(rows).encode("utf-8", "surrogatepass")


# --- what reads it ---------------------------------------------------------------------------------------------------------------------------


def whole_model(path):
    source = load.find(str(path))
    load.widths(load.early_config(source))
    load.check_length(load.read(source, torch.float32), 8)


def tokenizer(path):
    read = load.read_tokenizer(load.find(str(path)))
    texts = data.Texts((SENTENCE,), "test", "")
    data.windows(texts, read, length=8)


def text(path):
    data.check(str(path))
    data.load(str(path), split="calibration")


def recipe(path):
    config.load(path).resolve()


TARGETS = {  # file within the place: how it is changed, what reads it and from where, cases
    "model/config.json": ((*BYTES, *[json_file] * 8), whole_model, "model", 90),
    "model/model.safetensors": ((*BYTES, *[shard] * 4), whole_model, "model", 70),
    "model/model.safetensors.index.json": ((*BYTES, *[json_file] * 4), whole_model, "model", 50),
    "model/generation_config.json": ((*BYTES, *[json_file] * 4), whole_model, "model", 20),
    "model/tokenizer.json": ((*BYTES, *[json_file] * 8), tokenizer, "model", 70),
    "model/tokenizer_config.json": ((*BYTES, *[json_file] * 8), tokenizer, "model", 50),
    "tiny.gguf": (BYTES, whole_model, "tiny.gguf", 90),
    "recipe.yaml": ((*BYTES, *[lines] * 8), recipe, "recipe.yaml", 120),
    "text.jsonl": ((*BYTES, *[lines] * 4), text, "text.jsonl", 80),
    "text.parquet": (BYTES, text, "text.parquet", 120),
}


@pytest.fixture
def little_room():
    """An address space that no bomb fits into."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def outcome(read, path):
    """What reading says: None for success, else a message in bakron's words."""
    try:
        read(path)
    except BakronError as error:
        cause = error
        while cause is not None:
            assert not isinstance(cause, MemoryError), error
            cause = cause.__cause__ or cause.__context__
        assert "allocate" not in str(error), error
        assert len(str(error)) < 30_000
        return str(error)
    return None


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", TARGETS)
def test_damage_ends_in_an_error_of_bakrons_own(name, place, tmp_path, little_room):
    changes, read, where, cases = TARGETS[name]
    root = tmp_path / "copy"
    shutil.copytree(place, root)
    assert outcome(read, root / where) is None
    content = (root / name).read_bytes()
    refused = 0
    for case in range(cases):
        chance = random.Random(f"{name} {case}")
        change = chance.choice(changes)
        damaged = change(content, chance)
        (root / name).write_bytes(damaged)
        try:
            refused += outcome(read, root / where) is not None
        except BaseException as error:
            raise AssertionError(f"case {case}, {change.__name__}: {type(error).__name__}: {error}") from error
    assert refused > cases / 5 or "generation" in name  # the damage is real; transformers passes over that of a generation config
