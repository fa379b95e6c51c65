"""Records of a finished run that somebody has changed end in an error of one line, when it is certified or exported once more."""

import json

import pytest
from test_resume import TEXT
from tiny import save_tiny

import bakron
from bakron.errors import OutputError

GATED = dict(gate=True, levels=7, group_size=32, sequences=8, length=32)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("place")
    save_tiny(path / "model", "llama")
    (path / "text.txt").write_text(TEXT)
    bakron.quantize(path / "model", path / "out", data=str(path / "text.txt"), **GATED)
    return path


@pytest.fixture
def records(place):
    """The folder of records, as it was when the test ends."""
    folder = place / "out" / "bakron"
    before = {name: (folder / name).read_text() for name in ("summary.json", "events.jsonl")}
    yield folder
    for name, text in before.items():
        (folder / name).write_text(text)


def change_event(folder, change):
    first, *others = (folder / "events.jsonl").read_text().splitlines()
    event = json.loads(first)
    change(event)
    (folder / "events.jsonl").write_text("\n".join([json.dumps(event), *others]) + "\n")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda event: event["gate"].pop("chosen"), "event, gate.chosen: Field required"),
        (lambda event: event["gate"].update(damp_b="much"), "event, gate.damp_b: Input should be a valid number"),
        (lambda event: event["gate"].update(damp_a=-1.0), "event, gate.damp_a: Input should be greater than or equal to 0"),
        (lambda event: event["gate"].update(damp_a=float("nan")), "event, gate.damp_a: Input should be a finite number"),
        (lambda event: event["gate"].update(damp_a=1e308), "event, gate.damp_a: Input should be less than or equal to"),
        (lambda event: event.update(gate=[]), "event, gate: Input should be a valid dictionary"),
        (lambda event: event.update(failed=True, fallback="elsewhere"), "event, fallback: Input should be 'one-sided' or 'nearest'"),
        (lambda event: event.pop("linear"), "event, linear: Field required"),
        (lambda event: event.update(linear="model.layers.9.mlp.up_proj"), "the same linears"),
        (lambda event: event.pop("gate"), "does not say what was chosen for model.layers.0.self_attn.q_proj"),
    ],
    ids=str,
)
def test_changed_events(change, words, place, records):
    change_event(records, change)
    with pytest.raises(OutputError) as caught:
        bakron.certify_run(place / "out")
    assert words in str(caught.value) and ("records in" not in str(caught.value) or str(records) in str(caught.value))


def test_a_choice_that_the_recipe_does_not_try(place, tmp_path):
    recipe = dict(levels=7, group_size=32, sequences=4, length=32, data=str(place / "text.txt"))
    bakron.quantize(place / "model", tmp_path / "out", **recipe)
    change_event(tmp_path / "out" / "bakron", lambda event: event.update(gate={"chosen": "unweighted", "damp_a": 0.1, "damp_b": None}))
    with pytest.raises(OutputError, match="was rounded with an unweighted A, which its recipe does not try"):
        bakron.certify_run(tmp_path / "out")


@pytest.mark.parametrize("command", ["certify", "export"])
@pytest.mark.parametrize(
    "change, words",
    [
        (dict(calibration=[]), "summary, calibration: Input should be a valid dictionary"),
        (dict(dtype="complex64"), "summary, dtype: Input should be"),
        (dict(model=3), "summary, model: Input should be a valid string"),
        (dict(parameters=None), "summary, parameters: Input should be a valid dictionary"),
        (dict(parameters={}), "summary, parameters.quantized_percent: Field required"),
        ("[" * 200_000, "the records in"),
        ("[]", "summary, as a whole: Input should be a valid dictionary"),
        ("{", "the records in"),
        ("\udcff", "the records in"),
    ],
    ids=str,
)
def test_changed_summary(command, change, words, place, records, tmp_path):
    text = change if isinstance(change, str) else json.dumps(json.loads((records / "summary.json").read_text()) | change)
    (records / "summary.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(OutputError) as caught:
        if command == "certify":
            bakron.certify_run(place / "out")
        else:
            bakron.export_run(place / "out", tmp_path / "again", format="dense")
    assert words in str(caught.value) and str(records) in str(caught.value)
    assert not (tmp_path / "again").exists()


def test_a_recipe_that_names_other_linears_is_not_exported(place, tmp_path):
    file = place / "out" / "bakron" / "recipe.yaml"
    before = file.read_text()
    file.write_text(before.replace("include: null", "include: '*.mlp.*'"))
    try:
        with pytest.raises(OutputError, match=r"recipe\.yaml of .* names \d+ linears, events\.jsonl tells of"):
            bakron.export_run(place / "out", tmp_path / "again", format="dense")
    finally:
        file.write_text(before)


def test_records_that_nobody_has_changed_are_certified(place):
    assert bakron.certify_run(place / "out")["violations"] == 0
