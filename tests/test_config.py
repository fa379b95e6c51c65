import re
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bakron import config, recipes
from bakron.config import Recipe
from bakron.errors import RecipeError
from bakron.recipes import from_dict

METHODS = ["rtn", "gptq", "bakron"]


def refusal(call, *args, **kwargs):
    with pytest.raises(RecipeError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# --- what an open choice resolves to ---------------------------------------------------------------


@pytest.mark.parametrize(
    "method, expected",
    [
        (
            "rtn",
            dict(hessian=None, factor=None, scale="absmax", damping=None, damp_a=None, damp_b=None, inputs=None),
        ),
        (
            "gptq",
            dict(hessian="input", factor=None, scale="curvature", damping="diagonal", damp_a=0.1, damp_b=None, inputs="quantized"),
        ),
        (
            "bakron",
            dict(hessian="backprop", factor="mixed", scale="curvature", damping="diagonal", damp_a=0.1, damp_b=1.0, inputs="quantized"),
        ),
    ],
)
def test_defaults_by_method(method, expected):
    recipe = Recipe(method=method).resolve()
    assert {name: getattr(recipe, name) for name in expected} == expected
    assert (recipe.levels, recipe.bits, recipe.group_size) == (16, 4, 64)


@pytest.mark.parametrize(
    "given_, levels, bits",
    [
        ({}, 16, 4),
        ({"levels": 7}, 7, None),
        ({"levels": 8}, 8, 3),
        ({"levels": 2}, 2, None),
        ({"bits": 2}, 4, 2),
        ({"levels": 8, "bits": 3}, 8, 3),
        ({"levels": 256}, 256, 8),
    ],
)
def test_levels_and_bits(given_, levels, bits):
    recipe = from_dict(given_).resolve()
    assert (recipe.levels, recipe.bits) == (levels, bits)


def test_levels_against_bits():
    assert refusal(from_dict({"levels": 7, "bits": 3}).resolve) == "levels is 7 and bits is 3, which means 8 levels. Give one of the two."


def test_one_scale_per_row():
    assert from_dict({"group_size": -1}).group_size is None
    assert from_dict({"group_size": None}).resolve().group_size is None


def test_gptq_with_gradients_keeps_the_weighted_input_factor():
    recipe = from_dict({"method": "gptq", "hessian": "backprop", "factor": "shampoo"}).resolve()
    assert (recipe.hessian, recipe.factor, recipe.damp_b) == ("backprop", "shampoo", None)


def test_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Recipe().method = "gptq"


optional = {
    "hessian": st.sampled_from(["input", "attention-local", "value-local", "heads-local", "mlp-local", "fully-local", "backprop"]),
    "factor": st.sampled_from(["kfac", "shampoo", "shampoo:3", "mixed", "sequence", "kl", "kl:12"]),
    "labels": st.sampled_from(["sampled", "empirical"]),
    "samples": st.integers(1, 4),
    "clip": st.sampled_from([0.5, 0.99]),
    "skip_first": st.booleans(),
    "diagnostics": st.booleans(),
    "gate": st.booleans(),
    "boundary_memory": st.sampled_from(["4GB", "512MiB", "100000"]),
    "levels": st.integers(2, 256),
    "bits": st.integers(2, 8),
    "scale": st.sampled_from(["absmax", "mse", "curvature"]),
    "damping": st.sampled_from(["diagonal", "mean"]),
    "damp_a": st.floats(0, 10),
    "damp_b": st.one_of(st.floats(0, 10), st.just("auto")),
    "order": st.sampled_from(["natural", "diagonal", "min-pivot", "reversed"]),
    "refit": st.booleans(),
    "polish": st.integers(1, 99),
    "accumulate": st.sampled_from(["float32", "float64"]),
    "inputs": st.sampled_from(["quantized", "original"]),
    "group_size": st.sampled_from([-1, 1, 64, 128]),
    "factors": st.sampled_from(["cache", "C:\\cache: new"]),
    "data": st.text(min_size=1).filter(lambda text: text.isprintable()),
}


@settings(deadline=None)
@given(method=st.sampled_from([*METHODS, *config.PRESETS]), values=st.fixed_dictionaries({}, optional=optional))
def test_resolved_recipe_survives_the_file_and_resolves_to_itself(tmp_path_factory, method, values):
    try:
        recipe = from_dict({"method": method, **values}).resolve()
    except RecipeError:
        return
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(recipes.dump(recipe), encoding="utf-8")
    again = recipes.load(path)
    assert again == recipe == again.resolve()


# --- presets -----------------------------------------------------------------------------------------


def test_presets_are_short_for_settings_and_give_way_to_those_given():
    backprop = Recipe(hessian="backprop", factor="shampoo").resolve()
    assert Recipe(method="bakron-backprop").resolve() == backprop
    assert Recipe(method="bakron-mlp-local").resolve() == Recipe(hessian="mlp-local", factor="shampoo").resolve()
    assert Recipe(method="bakron-fully-local").resolve() == Recipe(hessian="fully-local", factor="shampoo").resolve()
    yaqa = Recipe(method="yaqa").resolve()
    assert (yaqa.method, yaqa.factor, yaqa.inputs, yaqa.damping, yaqa.damp_a, yaqa.damp_b, yaqa.order) == (
        "bakron",
        "sequence",
        "original",
        "mean",
        0.01,
        0.01,
        "reversed",
    )
    assert (
        Recipe(method="boa").resolve()
        == from_dict(dict(hessian="heads-local", factor="kfac", damping="mean", damp_a=0.01, damp_b=0.01)).resolve()
    )
    assert from_dict({"method": "yaqa", "damp_b": 1.0, "factor": "kfac"}).resolve().damp_b == 1.0
    assert from_dict({"method": "bakron-backprop", "factor": "kl"}).resolve().factor == "kl"
    assert config.PRESETS.keys() | {"rtn", "gptq", "bakron"} == set(get_args(config.Method))


# --- choices that would do nothing ----------------------------------------------------------------


@pytest.mark.parametrize(
    "key, value",
    [
        ("hessian", "input"),
        ("factor", "kfac"),
        ("damping", "mean"),
        ("damp_a", 0.0),
        ("damp_b", 0.0),
        ("inputs", "original"),
        ("factors", "cache"),
        ("labels", "empirical"),
        ("samples", 2),
        ("clip", 0.9),
        ("skip_first", True),
        ("diagnostics", True),
        ("order", "diagonal"),
        ("refit", True),
        ("polish", 2),
        ("accumulate", "float64"),
        ("gate", True),
        ("boundary_memory", "4GB"),
    ],
)
def test_rtn_refuses_what_belongs_to_a_hessian(key, value):
    message = refusal(from_dict({"method": "rtn", key: value}).resolve)
    assert message == f"{key} would do nothing with method rtn, which rounds without a Hessian. Drop {key}, or choose another method."


def test_rtn_names_all_idle_choices_at_once():
    message = refusal(from_dict({"method": "rtn", "damp_a": 1, "hessian": "input", "factor": "kfac"}).resolve)
    assert message.startswith("hessian, factor and damp_a would do nothing")


def test_rtn_has_no_curvature():
    message = refusal(from_dict({"method": "rtn", "scale": "curvature"}).resolve)
    assert "no Hessian to take curvature from" in message and "expected scale absmax or mse" in message


@pytest.mark.parametrize("values", [{"method": "gptq"}, {"method": "gptq", "hessian": "input"}])
@pytest.mark.parametrize("key, value", [("factor", "mixed"), ("factors", "cache"), ("labels", "sampled"), ("clip", 0.9)])
def test_input_hessian_takes_no_gradients(values, key, value):
    message = refusal(from_dict({**values, key: value}).resolve)
    assert message == f"{key} would do nothing with hessian input, which takes no gradients. Drop {key}, or choose hessian backprop."


def test_gptq_has_no_output_factor():
    assert "damp_b would do nothing with method gptq, whose output factor is the identity" in refusal(
        from_dict({"method": "gptq", "damp_b": 1.0}).resolve
    )


def test_bakron_without_output_factor_is_gptq():
    assert "would be GPTQ; expected hessian backprop. For GPTQ choose method gptq." in refusal(from_dict({"hessian": "input"}).resolve)


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(format="gguf", group_size=48), "group size 48 in format gguf, type q4_0; expected a multiple of 32. Use --group-size 64."),
        (dict(format="gguf", group_size=None, gguf_type="q4_1", symmetric=True), "symmetric levels in format gguf, type q4_1"),
        (dict(format="gguf", gguf_type="q4_0", symmetric=False), "asymmetric levels in format gguf, type q4_0"),
        (dict(format="gguf", gguf_type="q4_0", levels=17), "17 levels in format gguf, type q4_0; expected at most 16. Use --levels 16."),
        (dict(format="gguf", symmetric=False, bits=8), "256 levels with zero points in format gguf; expected at most 16 levels"),
        (dict(format="gguf", gguf_type="q3_k", refit=True), "refit with gguf_type q3_k, whose scales are no free choice"),
        (dict(gguf_type="q8_0"), "gguf_type q8_0 with format compressed-tensors; expected format gguf"),
    ],
    ids=str,
)
def test_a_format_refuses_grids_that_it_cannot_hold(given, message):
    assert message in refusal(from_dict(given).resolve)


@pytest.mark.parametrize(
    "given, settled",
    [
        ({}, ("q4_0", 16, True, 32)),
        (dict(levels=7), ("q4_0", 7, True, 32)),
        (dict(bits=6), ("q8_0", 64, True, 32)),
        (dict(symmetric=False), ("q4_1", 16, False, 32)),
        (dict(gguf_type="q4_1"), ("q4_1", 16, False, 32)),
        (dict(gguf_type="q3_k"), ("q3_k", 8, True, 16)),
        (dict(gguf_type="q6_k", levels=33), ("q6_k", 33, True, 16)),
        (dict(group_size=64), ("q4_0", 16, True, 64)),
        (dict(group_size=-1), ("q4_0", 16, True, None)),
    ],
    ids=str,
)
def test_gguf_settles_what_is_left_open(given, settled):
    recipe = from_dict({"format": "gguf", **given}).resolve()
    assert (recipe.gguf_type, recipe.levels, recipe.symmetric, recipe.group_size) == settled
    assert recipe.resolve() == recipe == from_dict(recipe.model_dump()).resolve()


# --- values and keys that are not allowed --------------------------------------------------------


@pytest.mark.parametrize(
    "values, message",
    [
        (
            {"method": "gpqt"},
            "method is 'gpqt'; expected rtn, gptq, bakron, boa, yaqa, bakron-mlp-local, bakron-fully-local or bakron-backprop. Perhaps gptq is meant.",
        ),
        ({"methd": "gptq"}, "unknown key 'methd'. Perhaps method is meant."),
        ({"group-size": 32}, "unknown key 'group-size'. Perhaps group_size is meant."),
        ({"levels": 1}, "levels is 1; expected a whole number from 2 to 256."),
        ({"bits": 9}, "bits is 9; expected a whole number from 2 to 8."),
        ({"group_size": 0}, "group_size is 0; expected a whole number of at least 1, or -1 for one scale per row."),
        ({"group_size": -2}, "group_size is -2; expected a whole number of at least 1, or -1 for one scale per row."),
        ({"damp_a": -0.1}, "damp_a is -0.1; expected a number of at least 0, or auto."),
        ({"damp_b": float("nan")}, "damp_b is NaN; expected a number of at least 0, or auto."),
        ({"damp_b": float("inf")}, "damp_b is Infinity; expected a number of at least 0, or auto."),
        ({"sequences": 0}, "sequences is 0; expected a whole number of at least 1."),
        ({"sequences": None}, "sequences is null; expected a whole number of at least 1."),
        ({"length": "long"}, "length is 'long'; expected a whole number of at least 2."),
        ({"symmetric": "perhaps"}, "symmetric is 'perhaps'; expected true or false."),
        ({"data": ""}, "data is ''; expected text that is not empty."),
        ({"dtype": "float23"}, "dtype is 'float23'; expected auto, float32, bfloat16 or float16. Perhaps float32 is meant."),
    ],
)
def test_wrong_entry(values, message):
    assert refusal(from_dict, values) == message


def test_unknown_key_without_a_near_one_lists_all():
    message = refusal(from_dict, {"zzz": 1})
    assert message.startswith("unknown key 'zzz'. Known keys: method, hessian,")


def test_all_wrong_entries_at_once():
    lines = refusal(from_dict, {"bits": "x", "lenght": 3, "data": ""}).splitlines()
    assert lines[0] == "3 entries of the recipe are wrong:"
    assert sorted(line.split()[0] for line in lines[1:]) == ["bits", "data", "unknown"]


@pytest.mark.parametrize("name", list(Recipe.model_fields))
def test_every_field_explains_itself(name):
    field = Recipe.model_fields[name]
    assert field.description and len(field.description) > 20 and field.description.endswith((".", "..."))
    assert recipes.allowed(name)


# --- the file ---------------------------------------------------------------------------------------


def test_file_and_overrides(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("method: gptq\nbits: 3\ndamp_a: 1e-2\n")
    recipe = recipes.load(path, seed=3)
    assert (recipe.method, recipe.bits, recipe.damp_a, recipe.seed) == ("gptq", 3, 0.01, 3)
    assert recipes.load(path, method="bakron").method == "bakron"
    assert recipes.load(path, levels=7).resolve().levels == 7, "levels given on top displace the file's bits"
    assert recipes.load(None, levels=7) == Recipe(levels=7)


def test_settings_of_the_file_that_the_command_line_makes_idle_are_named_as_the_files(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("method: bakron\ndamp_b: 0.5\nlabels: sampled\nskip_first: false\npolish: null\n")
    told = refusal(recipes.resolved, path, {"method": "gptq"})
    assert told == (
        "labels would do nothing with hessian input, which takes no gradients. Drop labels, or choose hessian backprop. "
        f'{path} says labels "sampled": change it there, or leave that recipe out.'
    )
    told = refusal(recipes.resolved, path, {"method": "rtn", "seed": 1})
    assert told.startswith("damp_b and labels would do nothing with method rtn") and f'{path} says damp_b 0.5 and labels "sampled":' in told
    assert recipes.resolved(path, {"method": "gptq", "hessian": "backprop", "damp_b": None}).method == "gptq"
    # what is wrong by itself, or on the command line alone, is nobody else's fault
    assert "says" not in refusal(recipes.resolved, path, {"samples": 2, "labels": "empirical"})
    assert str(path) not in refusal(recipes.resolved, None, {"method": "rtn", "gate": True})
    told = refusal(recipes.resolved, {"method": "bakron", "damp_b": 0.5}, {"method": "gptq"})
    assert told.endswith("the recipe says damp_b 0.5: change it there, or leave that recipe out.")


def test_empty_file_is_the_defaults(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("# nothing\n")
    assert recipes.load(path) == Recipe()


@pytest.mark.parametrize(
    "content, message",
    [
        (b"method: [gptq", r"recipe\.yaml, line 1, column 14: not YAML \(.+\); expected lines of the form `key: value`\."),
        (b"bits: 3\n\tmethod: gptq", r"recipe\.yaml, line 2, column 1: not YAML"),
        (b"- gptq\n", r"recipe\.yaml, line 1: the recipe is a list; expected a mapping"),
        (b"gptq\n", r"recipe\.yaml, line 1: the recipe is a single value; expected a mapping"),
        (b"method: \xff\n", r"recipe\.yaml is not UTF-8 text: bad byte at offset 8"),
        (b"bitz: 3\n", r"recipe\.yaml: unknown key 'bitz'\. Perhaps bits is meant\."),
        (b"3: 3\n", r"recipe\.yaml: unknown key '3'\."),
        (b"bits: 3\nbits: 4\n", r"recipe\.yaml, line 2, column 1: not YAML \(key 'bits' is given twice\)"),
    ],
)
def test_bad_file(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    assert re.search(message, refusal(recipes.load, path))


def test_missing_file_and_directory(tmp_path):
    assert refusal(recipes.load, tmp_path / "no.yaml").startswith(f"there is no recipe file {tmp_path / 'no.yaml'}")
    assert f"the recipe file {tmp_path} cannot be read: Is a directory" in refusal(recipes.load, tmp_path)


def test_wrong_override_does_not_blame_the_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("bits: 3\n")
    assert refusal(recipes.load, path, seed=-1) == "seed is -1; expected a whole number from 0 to 9223372036854775807."


def test_recipe_error_keeps_its_parts():
    with pytest.raises(RecipeError) as caught:
        from_dict({"bits": 9})
    assert (caught.value.saw, caught.value.expected) == ("bits is 9", "a whole number from 2 to 8")
