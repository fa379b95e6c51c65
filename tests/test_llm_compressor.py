"""`BakronModifier` inside llm-compressor's own `oneshot`; run in an environment that has it (`make test-plugins`)."""

from __future__ import annotations

import pytest
import torch
from tiny import save_tiny

import bakron

pytest.importorskip("llmcompressor")

from datasets import Dataset
from llmcompressor import oneshot
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from bakron.hessian import BackpropEstimator
from bakron.integrations import llm_compressor
from bakron.integrations.llm_compressor import BakronModifier
from bakron.models.walk import Walk

IDS = torch.randint(3, 60, (6, 24), generator=torch.Generator().manual_seed(0))


def groups(**changes):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16} | changes
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


def run(folder, recipe, *, ids=None, shuffle=False):
    ids = IDS.tolist() if ids is None else ids
    path = save_tiny(folder / "model", "llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    mask = [[1] * len(one) for one in ids]
    oneshot(
        model=model,
        tokenizer=str(path),
        dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": mask}),
        recipe=recipe,
        batch_size=2 if len({len(one) for one in ids}) == 1 else 1,
        num_calibration_samples=len(ids),
        shuffle_calibration_samples=shuffle,
        pipeline="sequential",
        output_dir=str(folder / "out"),
    )
    return path


@pytest.mark.parametrize(
    "factor, scale, weights",
    [
        ("mixed", "observer", {}),
        ("kfac", "curvature", {"symmetric": False}),
        ("shampoo", "observer", {"symmetric": False}),
        (None, "curvature", {"num_bits": 8, "symmetric": False}),
        ("mixed", "observer", {"num_bits": 8, "symmetric": False, "strategy": "channel", "group_size": None}),
        (None, "mse", {"strategy": "channel", "group_size": None}),
    ],
)
def test_oneshot_rounds_against_our_hessian_and_saves_what_was_solved(tmp_path, monkeypatch, factor, scale, weights):
    solved = []

    def record(W, kron, grid, **options):
        solved.append((W, kron, grid, options, bakron.solve(W, kron, grid, **options)))
        return solved[-1][-1]

    monkeypatch.setattr(llm_compressor, "solve", record)
    path = run(
        tmp_path,
        BakronModifier(
            config_groups=groups(**weights), ignore=["lm_head"], factor=factor, scale=scale, actorder=None if factor else "static"
        ),
    )
    assert len(solved) == 14

    original = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    walk = Walk(original, IDS.shape[1])
    name = "self_attn.q_proj"
    if factor is None:
        estimator = bakron.ESTIMATORS["input"](walk)
    else:
        estimator = BackpropEstimator(walk, IDS, tmp_path / "store", factor=factor, seed=0)
    expected = estimator.block(0, walk.embed(IDS))[name].damp(0.1, 1.0)
    kron = solved[0][1]
    torch.testing.assert_close(kron.A.H, expected.A.H, rtol=1e-3, atol=1e-4)
    if factor is None:
        assert kron.B is None and solved[0][3]["order"] == ("diagonal", "natural")
    else:
        torch.testing.assert_close(kron.B.H, expected.B.H, rtol=1e-3, atol=1e-4)
        assert all(bakron.certify(s.values, W, k, grid).violations == 0 for W, k, grid, _, s in solved)

    reader = CompressedTensorsConfig(dequantize=True)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, quantization_config=reader)
    there = dict(reloaded.named_modules())
    names = [f"{walk.prefix(i)}.{name}" for i in range(2) for name in walk.linears(i)]
    values = [s.values for *_, s in solved]
    for name in names:
        weight = there[name].weight
        assert any(one.shape == weight.shape and torch.equal(one, weight) for one in values), name


def test_a_recipe_in_yaml_knows_the_name(tmp_path):
    recipe = """
    quant_stage:
      quant_modifiers:
        BakronModifier:
          ignore: [lm_head]
          factor: null
          config_groups:
            group_0:
              targets: [Linear]
              weights: {num_bits: 4, type: int, symmetric: true, strategy: group, group_size: 16}
    """
    run(tmp_path, recipe)
    assert "BakronModifier" in (tmp_path / "out" / "recipe.yaml").read_text("utf-8")


@pytest.mark.parametrize(
    "settings, data, message",
    [
        ({"factor": "sequence"}, {}, "factor sequence, whose A is no weighted sum"),
        ({"factor": "k-fac"}, {}, "is no factorisation"),
        ({"scale": "minmax"}, {}, "scale 'minmax'; expected observer, absmax"),
        ({"config_groups": groups(strategy="tensor", group_size=None)}, {}, "expected type int, strategy group or channel"),
        ({}, {"shuffle": True}, "another order each time"),
        ({}, {"ids": [[5] * 24, [6] * 20]}, "sequences of 20 to 24 tokens; expected one length"),
    ],
)
def test_refusals(tmp_path, settings, data, message):
    with pytest.raises(bakron.BakronError, match=message):
        run(tmp_path, BakronModifier(**{"config_groups": groups(), "ignore": ["lm_head"], **settings}), **data)
