"""A stranger's model, text or recipe: whatever is done to it, bakron works or says in a sentence why not. It never crashes, hangs, fills memory or calls out."""

import json
import os
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import save_tiny, save_tiny_gguf

import bakron
from bakron import config, data, recipes
from bakron.errors import BakronError
from bakron.models import layout, load

ROOM = 6 << 30  # bytes of address space that a case may add; every bomb below wants more
SENTENCE = "the quick brown fox jumps over the lazy dog; 0123456789.\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path_factory.mktemp("security")
    save_tiny(path / "model", "llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1, tie_word_embeddings=True)
    save_tiny_gguf(path / "tiny.gguf")
    weights = sorted(load.shard_tensors(path / "model" / "model.safetensors"))
    (path / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")})
    )
    (path / "recipe.yaml").write_text(recipes.dump(config.Recipe()))
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
    """As `quantize` opens it, tensor by tensor, and as `evaluate` reads it, all at once."""
    source = load.find(str(path))
    layout.widths(load.early_config(source))
    _, weights = load.open_model(source)
    weights.survey(getattr(torch, load.stored_dtype(source, None)))
    load.check_length(load.read(source, torch.float32), 8)


def tokenizer(path):
    read = load.read_tokenizer(load.find(str(path)))
    texts = data.Texts((SENTENCE,), "test", "")
    data.windows(texts, read, length=8)


def text(path):
    data.check(str(path))
    data.load(str(path), split="calibration")


def recipe(path):
    recipes.load(path).resolve()


TARGETS = {  # file within the place: how it is changed, what reads it and from where, cases
    "model/config.json": ((*BYTES, *[json_file] * 8), whole_model, "model", 90),
    "model/model.safetensors": ((*BYTES, *[shard] * 4), whole_model, "model", 70),
    "model/model.safetensors.index.json": ((*BYTES, *[json_file] * 4), whole_model, "model", 50),
    "model/generation_config.json": ((*BYTES, *[json_file] * 4), whole_model, "model", 20),
    "model/tokenizer.json": ((*BYTES, *[json_file] * 8), tokenizer, "model", 70),
    "model/tokenizer_config.json": ((*BYTES, *[json_file] * 8), tokenizer, "model", 50),
    "tiny.gguf": (BYTES, whole_model, "tiny.gguf", 50),
    "recipe.yaml": ((*BYTES, *[lines] * 8), recipe, "recipe.yaml", 80),
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


# --- single rules ------------------------------------------------------------------------------------------------------------------------------


def refusal(call, *arguments, **keywords):
    with pytest.raises(BakronError) as caught:
        call(*arguments, **keywords)
    return str(caught.value)


@pytest.fixture
def model(place, tmp_path):
    return Path(shutil.copytree(place / "model", tmp_path / "model"))


def change(file, **values):
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))


@pytest.mark.parametrize(
    "values, words",
    [
        ({"hidden_size": 10**9}, r"describes at least [\d,]+ weights in 1 blocks, but its files hold 1[\d,]{5}; expected weights and config of one"),
        ({"vocab_size": 10**9}, "describes at least 32,0"),
        ({"intermediate_size": 10**9}, "describes at least 32,0"),
        ({"num_attention_heads": 10**9, "head_dim": 64}, "describes at least "),
        ({"head_dim": 10**9}, "describes at least "),
        ({"num_hidden_layers": 10**9}, "weights in 1,000,000,000 blocks"),
        ({"num_hidden_layers": 40, "hidden_size": 1}, "weights in 40 blocks"),
        ({"num_local_experts": 10**9}, "describes at least "),
        ({"hidden_size": 0}, "hidden_size of .* is '0'; expected a whole number of at least 1"),
        ({"hidden_size": "64"}, "hidden_size of .* is '64'; expected a whole number"),
        ({"num_attention_heads": True}, "num_attention_heads of .* is 'True'"),
        ({"hidden_size": "absent"}, "the config of .* has no hidden_size; expected the sizes of the model"),
        ({"num_hidden_layers": None}, "the config of .* has no num_hidden_layers"),
        ({"intermediate_size": "absent"}, "has no moe_intermediate_size"),
        ({"num_labels": 10**9}, "num_labels of .* is 1000000000; expected at most"),
        ({"partial_rotary_factor": 1e9}, "partial_rotary_factor of .* is '1000000000.0'; expected a number above 0, at most 1"),
        ({"rope_parameters": {"partial_rotary_factor": -1}}, "partial_rotary_factor of .* is '-1'"),
    ],
)  # fmt: skip
def test_config_may_not_describe_more_than_its_files_hold(values, words, model):
    change(model / "config.json", **values)

    assert re.search(words, refusal(load.find, str(model)))


@pytest.mark.parametrize("name", ["../model/model.safetensors", "/etc/passwd", "..", "a/../../x", "..\\x", "folder/model.safetensors"])
def test_shard_names_stay_in_the_directory(name, model):
    index = model / "model.safetensors.index.json"
    change(index, weight_map=json.loads(index.read_text())["weight_map"] | {"lm_head.weight": name})
    assert refusal(load.find, str(model)) == f"{index} points outside its directory: {name}; expected plain file names."


def test_shard_that_is_a_link_is_read_as_in_a_hub_cache_and_devices_are_not(model):
    shard = model / "model.safetensors"
    shard.rename(model.parent / "blob")
    shard.symlink_to(model.parent / "blob")
    load.find(str(model))
    shard.unlink()
    shard.symlink_to("/dev/zero")
    assert refusal(load.find, str(model)).startswith(f"{shard} is missing;")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_pickled_weights_are_refused_with_the_way_to_convert_them(suffix, model):
    torch.save({"weight": torch.zeros(3)}, model / f"pytorch_model{suffix}")
    load.find(str(model))  # not looked at beside safetensors
    for file in model.glob("*.safetensors*"):
        file.unlink()
    advice = "expected safetensors. Load it in transformers and call save_pretrained."
    assert refusal(load.find, str(model)) == f"{model} holds pickled weights ({suffix}); {advice}"
    file = model / f"pytorch_model{suffix}"
    assert refusal(load.find, str(file)) == f"{file} is a pickled file; {advice.replace('safetensors', 'safetensors or GGUF')}"


def test_code_that_comes_with_a_model_is_not_run(model, tmp_path):
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    change(model / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    change(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    log = []
    options = dict(method="gptq", group_size=16, sequences=2, length=16, data=str(model.parent / "text.txt"))
    (model.parent / "text.txt").write_text(SENTENCE * 20)
    bakron.quantize(model, tmp_path / "out", log=log.append, **options)
    assert "warning: config.json names Python code of its own (auto_map), which is not run" in log
    assert not (tmp_path / "ran").exists()
    assert load.find(str(model)).code and not list((tmp_path / "out").glob("*.py"))
    change(model / "config.json", model_type="evil")
    assert "a model of type 'evil'; expected one of llama" in refusal(load.find, str(model))


def test_tokens_that_the_model_does_not_know_are_refused(model, tmp_path):
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["vocab"]["o"] = 5000
    (model / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "text.txt").write_text(SENTENCE * 20)
    options = dict(data=str(tmp_path / "text.txt"), length=16)
    expected = "the tokenizer gives token 5000; expected tokens below 128, the model's embeddings. Get tokenizer and weights of one model."
    assert refusal(bakron.quantize, model, tmp_path / "out", method="gptq", sequences=2, group_size=16, **options) == expected
    assert refusal(bakron.evaluate, model, **options) == expected
    change(model / "tokenizer_config.json", model_max_length="long")
    assert "the model's tokenizer fails on the text: " in refusal(bakron.evaluate, model, **options)


def test_panics_of_a_tokenizer_are_told_in_words(model, tmp_path):
    content = json.loads((model / "tokenizer.json").read_text())
    content["post_processor"]["single"][0]["SpecialToken"]["id"] = "nobody"
    (model / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "text.txt").write_text(SENTENCE * 20)
    message = refusal(bakron.evaluate, model, data=str(tmp_path / "text.txt"), length=16)
    assert "tokenizer" in message


def test_losses_that_are_not_finite_are_told_by_linear(model, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 1e26  # its square is more than float32 holds
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    (tmp_path / "text.txt").write_text(SENTENCE * 20)
    options = dict(method="gptq", group_size=16, sequences=2, length=16, dtype="float32", data=str(tmp_path / "text.txt"))
    assert "a figure of model.layers.0.mlp.down_proj is not finite" in refusal(bakron.quantize, model, tmp_path / "out", **options)


RECIPES = {
    "tag": ("method: !!python/object/apply:os.system ['touch {ran}']", "could not determine a constructor for the tag"),
    "alias bomb": ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n", r"line 2, column 8: not YAML \(alias \*a in a recipe\)"),
    "merge bomb": ("a: &a {x: 1}\n<<: [*a, *a]\n", r"alias \*a in a recipe"),
    "nested": ("a: " + "[" * 60_000, "lists or mappings nested 9 deep"),
    "nested lines": ("a:\n" + "".join(" " * i + "b:\n" for i in range(1, 300)), "lists or mappings nested 9 deep"),
    "mapping as key": ("? [a]\n: 1\n", "a key that is no word"),
    "digits": ("seed: " + "9" * 5000, "holds a value that cannot be read: Exceeds the limit"),
    "no date": ("seed: 2024-99-99", "holds a value that cannot be read: month must be"),
    "large": ("# " + "x" * 70_000, "has 70,002 bytes; expected a recipe, at most 65,536"),
    "long value": ("method: " + "x" * 5000, "method is 'x{200}'[.]{3}; expected rtn"),
    "list": ("method: [gptq]", "method is a list; expected rtn"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_hostile_recipe(name, tmp_path):
    content, words = RECIPES[name]
    (tmp_path / "recipe.yaml").write_text(content.replace("{ran}", str(tmp_path / "ran")))
    message = refusal(recipes.load, tmp_path / "recipe.yaml")

    assert re.search(words, message) and len(message) < 1000
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", ["[" * 100_000, '{"text": ' + "9" * 5000 + "}", '{"text": ' * 50_000])
def test_hostile_lines_of_text(content, tmp_path):
    (tmp_path / "text.jsonl").write_text(content)
    assert refusal(data.load, str(tmp_path / "text.jsonl"), split="calibration").startswith(f"{tmp_path / 'text.jsonl'}, line 1: not JSON")


def hostile_gguf(place, name):
    """The tiny file with one length in it changed."""
    content = bytearray((place / "tiny.gguf").read_bytes())
    tokens = content.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 4
    offset, value = {
        "tensor count": (8, 1 << 60),
        "key count": (16, 1 << 60),
        "key length": (24, 1 << 60),
        "array length": (tokens + 4, 1 << 60),
        "array of billions of bytes": (tokens, 0 | (1 << 33) << 32),
        "string length": (tokens + 12, 1 << 40),
        "version": (4, 9),
    }[name]
    content[offset : offset + 8] = value.to_bytes(12, "little")[:8]
    return bytes(content)


@pytest.mark.parametrize(
    "name", ["tensor count", "key count", "key length", "array length", "array of billions of bytes", "string length", "version"]
)
def test_lengths_in_gguf_are_not_believed(name, place, tmp_path, little_room):
    (tmp_path / "bad.gguf").write_bytes(hostile_gguf(place, name))
    assert refusal(load.find, str(tmp_path / "bad.gguf")).startswith(f"{tmp_path / 'bad.gguf'} is damaged: ")


# --- the real program ----------------------------------------------------------------------------------------------------------------------

WATCHED = """
import sys
calls = []
sys.addaudithook(lambda event, arguments: calls.append(event) if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname") else None)
from bakron.cli import app
for line in sys.argv[1:]:
    app(line.split("|"), standalone_mode=False)
assert not calls, calls
import socket
try:
    socket.create_connection(("127.0.0.1", 9), 1)
except OSError:
    pass
assert "socket.connect" in calls  # the watch works
"""


def program(*arguments, **environment):
    path = os.pathsep.join([str(Path(bakron.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | {"PYTHONPATH": path, "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=variables | environment, timeout=280, check=False
    )


def test_a_local_run_calls_nobody(model, tmp_path):
    (tmp_path / "text.txt").write_text(SENTENCE * 20)
    out, text = tmp_path / "out", tmp_path / "text.txt"
    quantize = f"quantize|{model}|{out}|-q|--group-size|16|--sequences|2|--length|16|--data|{text}"
    evaluate = f"evaluate|{out}|--reference|{model}|--length|16|--sequences|2|--data|{text}|-q"
    done = program("-c", WATCHED, quantize, evaluate, HF_HUB_OFFLINE="0")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["model/config.json", "model/model.safetensors", "tiny.gguf", "recipe.yaml"])
def test_damage_ends_in_a_line_of_the_program(name, place, tmp_path):
    root = Path(shutil.copytree(place, tmp_path / "copy"))
    (root / name).write_bytes(cut((root / name).read_bytes(), random.Random(name)))
    if name == "recipe.yaml":
        (root / name).write_text("method: !!python/name:os.system")
    model = root / ("tiny.gguf" if name == "tiny.gguf" else "model")
    done = program("-m", "bakron", "quantize", str(model), str(tmp_path / "out"), "--recipe", str(root / "recipe.yaml"))
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not done.stdout
