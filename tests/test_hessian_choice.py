"""What is chosen on sequences held out, and what events.jsonl tells of it: damping auto, the gate, alignment, outlying tokens."""

import json

import pytest
import torch
from problems import problem, spd
from safetensors.torch import load_file
from test_hessian import SEED, SMALL, Walk, tokens
from tiny import VOCABULARY, save_tiny, tiny_model, tiny_tokenizer

import bakron
from bakron import pipeline, recipes
from bakron.config import DAMPINGS, Recipe
from bakron.errors import OutputError, RecipeError
from bakron.grids import UniformGrid
from bakron.hessian import ESTIMATORS, BackpropEstimator, Candidate, InputEstimator, candidates, choose, gradients
from bakron.hessian.outliers import LARGE, outliers, warning
from bakron.job import held_out
from bakron.kron import Factor, Kron
from bakron.recheck import certify_run
from bakron.solver import solve
from bakron.solver.orders import arrange

TEXT = "".join(f"the quick brown fox number {i} jumps over {i * i} lazy dogs; and so on.\n" for i in range(120))
N_LINEARS = 14


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("place")
    save_tiny(path / "model", "llama")
    (path / "text.txt").write_text(TEXT)
    return path


@pytest.fixture
def quantize(place, tmp_path):
    count = iter(range(100))

    def run(model=place / "model", log=None, **recipe):
        out = tmp_path / f"out{next(count)}"
        settings = {"levels": 4, "group_size": 32, "sequences": 12, "length": 32, "data": str(place / "text.txt")} | recipe
        bakron.quantize(model, out, log=log, **settings)
        return out

    return run


def events_of(out):
    return [json.loads(line) for line in (out / "bakron" / "events.jsonl").read_text().splitlines()]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- the rule ----------------------------------------------------------------------------------------------------------------------------


def changes_of(*by_sequence):
    """`[N, T]` whose squares sum to the errors given per sequence; enough sequences that none is taken in parts."""
    return torch.tensor(by_sequence * 2, dtype=torch.float64).sqrt()[:, None, None].expand(-1, 2, 2) / 2


def test_the_first_stays_unless_another_is_better_by_more_than_its_standard_error():
    first = changes_of(10, 20, 30, 40)
    noisy = changes_of(4, 23, 25, 46)  # better by 2 in all, but now here, now there
    steady = changes_of(9.9, 19.8, 29.8, 39.7)  # better by less than noisy, in every sequence
    found = choose({"first": first, "noisy": noisy, "steady": steady})
    assert found["errors"] == {"first": pytest.approx(200), "noisy": pytest.approx(196), "steady": pytest.approx(198.4)}
    gain = torch.tensor([6.0, -3, 5, -6] * 2)
    assert found["margins"]["noisy"] == pytest.approx(float(gain.mean() / (gain.std() / 8**0.5)), abs=1e-3)
    assert found["margins"]["noisy"] < 1 < found["margins"]["steady"]
    assert found["chosen"] == "steady"
    assert choose({"first": first, "noisy": noisy})["chosen"] == "first"
    assert choose({"first": first, "much worse": 2 * first, "same": first})["chosen"] == "first"
    assert choose({"first": first, "steady": steady, "best": changes_of(8, 18, 28, 38)})["chosen"] == "best"


def test_few_sequences_are_taken_in_parts():
    first, other = random(3, 1, 30, seed=1), random(3, 1, 30, seed=2)
    gain = torch.cat(
        [(first.square() - other.square())[s, 0, part] for s in range(3) for part in (slice(0, 10), slice(10, 20), slice(20, 30))]
    )
    gain = gain.view(9, 10).sum(1)
    margin = choose({"first": first, "other": other})["margins"]["other"]
    assert margin == pytest.approx(float(gain.mean() / (gain.std() / 3)), abs=1e-3)


def test_errors_of_sequences_have_the_terms_between_tokens():
    together, against = torch.ones(3, 2, 4, dtype=torch.float64), torch.tensor([1.0, -1, 1, -1], dtype=torch.float64).expand(3, 2, 4)
    found = choose({"together": together, "against": against})
    assert found["errors"] == {"together": 24, "against": 24} and found["sequence_errors"] == {"together": 96, "against": 0}
    assert found["chosen"] == "together" and found["margins"] == {"against": 0}


def test_what_is_tried():
    kron, A = Kron(torch.eye(4), torch.eye(3)), Factor(torch.eye(4))
    names = {
        "gate": candidates(kron, A, Recipe(gate=True).resolve()),
        "auto": candidates(kron, A, Recipe(damp_b="auto").resolve()),
        "both": candidates(kron, A, Recipe(damp_a="auto", damp_b="auto", gate=True).resolve()),
        "gptq": candidates(kron, A, Recipe(method="gptq", hessian="backprop", damp_a="auto").resolve()),
    }
    of_b, of_a = (
        [f"{side}, {name} {amount:g}" for amount in DAMPINGS[name][1:]] for side, name in (("two-sided", "damp_b"), ("two-sided", "damp_a"))
    )
    assert list(names["gate"]) == ["two-sided", "one-sided", "unweighted"]
    assert list(names["auto"]) == ["two-sided", *of_b, "one-sided"]
    assert list(names["both"]) == ["two-sided", *of_a, *of_b, "one-sided", "unweighted"]
    assert list(names["gptq"]) == ["one-sided", "one-sided, damp_a 0.03", "one-sided, damp_a 0.3"]
    assert names["both"]["two-sided"] == Candidate(kron, 0.1, 1.0)
    assert (names["both"]["two-sided, damp_b 3"].damp_a, names["both"]["two-sided, damp_b 3"].damp_b) == (0.1, 3.0)
    assert (names["both"]["two-sided, damp_a 0.03"].damp_a, names["both"]["two-sided, damp_a 0.03"].damp_b) == (0.03, 1.0)
    assert names["auto"]["one-sided"].kron.B is None and names["auto"]["one-sided"].damp_b is None
    assert names["gate"]["unweighted"].kron.A is A and all(one.kron.B is None for one in names["gptq"].values())


# --- damping auto ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_of_b, expected", [(6, (3.0, None)), (4000, (0.3,))])
def test_damping_of_b_follows_how_much_of_it_holds_on_other_tokens(tokens_of_b, expected):
    """B of few tokens is noise and wants much damping or none of B at all; the true B wants little."""
    m, n = 48, 32
    x, few = random(4000, n, seed=2), tokens_of_b < m
    root = torch.eye(m, dtype=torch.float64) if few else random(m, m, seed=1) * torch.arange(1, m + 1, dtype=torch.float64).pow(-1.5)
    g = random(tokens_of_b, m, seed=3) @ root.T
    linear = torch.nn.Linear(n, m, bias=False).requires_grad_(False)
    linear.weight.copy_(random(m, n, seed=4))
    held_x, held_g = random(40, 50, n, seed=5), random(40, 50, m, seed=6) @ root.T
    recipe = Recipe(levels=15, group_size=None, damp_b="auto").resolve()
    tried = candidates(Kron(x.T @ x, g.T @ g), None, recipe)

    def harm(E):
        return torch.einsum("sti,ij,stj->st", held_g, E.double(), held_x)[:, None]

    event = pipeline.round_best(linear, tried, tried, recipe, torch.float32, "w", harm).event
    assert event["gate"]["damp_b"] in expected, event["gate"]
    assert event["damping"]["b"] == ([] if event["gate"]["damp_b"] is None else [[event["gate"]["damp_b"], "diagonal"]])


def test_auto_damping_is_chosen_layer_by_layer_and_told(quantize):
    fixed, auto = quantize(), quantize(damp_b="auto")
    events = events_of(auto)
    summary = json.loads((auto / "bakron" / "summary.json").read_text())
    amounts = []
    for event in events:
        gate = event["gate"]
        assert list(gate["errors"]) == ["two-sided", "two-sided, damp_b 0.3", "two-sided, damp_b 3", "one-sided"]
        assert list(gate["margins"]) == list(gate["errors"])[1:]
        others = [name for name, margin in gate["margins"].items() if margin > 1]
        assert gate["chosen"] == (min(others, key=gate["errors"].get) if others else "two-sided")
        assert event["damping"]["a"] == [[0.1, "diagonal"]] and gate["damp_a"] == 0.1
        assert event["damping"]["b"] == ([] if gate["damp_b"] is None else [[gate["damp_b"], "diagonal"]])
        assert (event["rho_b"] is None) == (gate["damp_b"] is None)
        assert gate["seconds"] >= sum(event["seconds"].values()) - 1e-3
        amounts.append(gate["damp_b"])
    assert len(set(amounts)) > 1  # not one amount for all
    assert {"gate" in event for event in events_of(fixed)} == {False}
    assert summary["recipe"]["damp_b"] == "auto" and summary["gate"]["held_out_sequences"] == 2
    assert sum(summary["gate"]["chosen"].values()) == N_LINEARS
    assert certify_run(auto)["violations"] == 0


def test_auto_damping_of_a_goes_with_one_sided_rounding_too(quantize):
    out = quantize(method="gptq", hessian="backprop", damp_a="auto")
    events = events_of(out)
    for event in events:
        assert list(event["gate"]["errors"]) == ["one-sided", "one-sided, damp_a 0.03", "one-sided, damp_a 0.3"]
        assert event["damping"] == {"a": [[event["gate"]["damp_a"], "diagonal"]], "b": []}
    assert len({event["gate"]["damp_a"] for event in events}) > 1
    assert certify_run(out)["violations"] == 0


def test_auto_and_gate_go_together(quantize):
    out = quantize(damp_a="auto", damp_b="auto", gate=True)
    assert {len(event["gate"]["errors"]) for event in events_of(out)} == {7}
    assert certify_run(out)["violations"] == 0


def test_a_damping_is_a_number_or_auto():
    for value in ("0.25", 0.25):
        assert recipes.from_dict({"damp_b": value}).damp_b == 0.25
    for value in ("much", -1, "nan"):
        with pytest.raises(RecipeError, match="a number of at least 0, or auto"):
            recipes.from_dict({"damp_a": value})


@pytest.mark.parametrize(
    "recipe, said",
    [
        (dict(damp_b="auto", hessian="mlp-local"), "damp_b auto with hessian mlp-local, which leaves no gradients to choose by"),
        (dict(damp_a="auto", method="gptq"), "damp_a auto with hessian input"),
        (dict(damp_b="auto", sequences=2), "damp_b auto with sequences 2, two of which it would hold out; expected at least 3 sequences"),
    ],
)
def test_auto_needs_gradients_and_sequences_to_choose_by(recipe, said):
    with pytest.raises(RecipeError, match=said):
        recipes.from_dict(recipe).resolve()


def test_sequences_held_out_are_an_eighth_and_at_least_two():
    assert [held_out(count) for count in (3, 12, 16, 24, 64)] == [2, 2, 2, 3, 8]
    with pytest.raises(RecipeError, match="a text of 2 sequences, two of which would be held out"):
        held_out(2)


# --- alignment ---------------------------------------------------------------------------------------------------------------------------


def test_alignment_is_the_cosine_of_the_hessian_of_tokens_held_out(tmp_path):
    walk, ids = Walk(tiny_model("llama", **SMALL), 10), tokens(5, 10, vocabulary=8)
    estimator = BackpropEstimator(walk, ids, tmp_path, seed=SEED, held=2, skip=1)
    estimator.block(1, walk.apply(0, walk.embed(ids)))
    heldout = estimator.heldout(1)
    assert estimator.unweighted == {}  # only the gate has a use for it
    for name in ("self_attn.v_proj", "mlp.down_proj"):
        x, g = (z.double() for z in heldout.tokens(name))
        assert len(x) == 18
        V = torch.einsum("ti,tj->tji", g, x).flatten(1)  # column-major vec of g x^T
        H = V.T @ V
        kron, unweighted = estimator.tried[name]
        assert unweighted is None
        found = heldout.alignment(name, kron)
        for side, B in (("two-sided", kron.B.H.double()), ("one-sided", torch.eye(kron.B.size, dtype=torch.float64))):
            K = torch.kron(kron.A.H.double(), B)
            assert found[side] == pytest.approx(float((H * K).sum() / H.norm() / K.norm()), abs=2e-4)


def test_alignment_is_part_of_the_diagnostics(quantize):
    plain, told = quantize(damp_b="auto"), quantize(damp_b="auto", diagnostics=True)
    for one, two in zip(events_of(plain), events_of(told)):
        assert set(two) == {*one, "alignment", "top_decile"} and one["gate"]["errors"] == two["gate"]["errors"]
        assert all(0 < two["alignment"][side] <= 1 for side in ("two-sided", "one-sided"))
    assert {"alignment" in event for event in events_of(quantize(diagnostics=True))} == {False}


# --- outlying tokens ---------------------------------------------------------------------------------------------------------------------


def test_outliers_are_tokens_far_above_the_median():
    sizes = 1 + torch.rand(3, 20, generator=torch.Generator().manual_seed(0))
    assert outliers(sizes) is None and outliers(torch.zeros(3, 20)) is None
    median = float(sizes.double().median())
    sizes[1, 4], sizes[2, 0] = 3 * LARGE * median, 2 * LARGE * median
    found = outliers(sizes, skip=1)
    assert found["tokens"] == 2 and found["share"] == pytest.approx(float((sizes[1, 4] + sizes[2, 0]) / sizes.sum()), rel=1e-4)
    assert found["largest"] == [
        {"sequence": 1, "position": 5, "multiple": pytest.approx(300, abs=10)},
        {"sequence": 2, "position": 1, "multiple": pytest.approx(200, abs=10)},
    ]
    assert outliers(torch.tensor([1.0, 1, 1, 1e4]))["largest"] == [{"sequence": 3, "multiple": 1e4}]


def test_factors_made_of_a_few_tokens_are_warned_of_in_one_line():
    sink = {"tokens": 4, "share": 0.9, "largest": [{"sequence": 0, "position": 2, "multiple": 500.0}]}
    assert warning([{}, {"a": sink | {"share": 0.4}}]) is None and warning([]) is None
    said = warning([{"a": sink, "b": sink}, {}, {"b": sink}, {"a": sink | {"share": 0.1}}])
    assert said.startswith(
        "warning: in 2 of 4 linears, tokens above 100 times the median hold more than half of the trace of A or B (most often position 2, 3 times;"
    )
    assert "skip_first" in said and "clip" in said and "\n" not in said
    assert "(whole sequences;" in warning([{"a": {"tokens": 1, "share": 0.6, "largest": [{"sequence": 3, "multiple": 200.0}]}}])


def test_a_sink_in_a_model_is_told_with_its_token_and_logged(quantize, tmp_path):
    model, z = tiny_model("llama"), VOCABULARY.index("z")
    with torch.no_grad():  # of all tokens only z has a first channel, which drives the MLP of block 0
        block, embedding = model.model.layers[0], model.model.embed_tokens.weight
        embedding[:, 0] = embedding[z] = block.self_attn.o_proj.weight[0] = 0
        embedding[z, 0] = 1
        block.mlp.up_proj.weight[:, 0] *= 30
        block.mlp.gate_proj.weight[:, 0] *= 30
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    log = []
    events = {event["linear"]: event for event in events_of(quantize(log=log.append, method="gptq"))}
    assert not any("median" in line for line in log) and all(event["outliers"] == {} for event in events.values())
    events = {event["linear"]: event for event in events_of(quantize(tmp_path / "model", log=log.append, method="gptq"))}
    found = events["model.layers.0.mlp.down_proj"]["outliers"]["a"]
    assert found["share"] > 0.9 and {token["id"] for token in found["largest"]} == {z}
    assert events["model.layers.0.mlp.up_proj"]["outliers"] == {}
    assert sum("hold more than half of the trace" in line for line in log) == 1


def test_a_token_with_huge_inputs_is_found_and_left_out_with_the_first_token():
    walk, ids = Walk(tiny_model("llama"), 12), tokens(4, 12)
    down = walk.linears(0)["mlp.down_proj"]
    position = {"at": 0}

    def sink(_module, arguments):
        x = arguments[0].clone()
        x[:, position["at"]] *= 100
        return (x,)

    handle = down.register_forward_pre_hook(sink, prepend=True)
    try:
        hidden = walk.embed(ids)
        estimator = InputEstimator(walk)
        estimator.block(0, hidden)
        assert estimator.outliers["mlp.up_proj"] == {}
        found = estimator.outliers["mlp.down_proj"]["a"]
        assert found["tokens"] == 4 and found["share"] > 0.9 and {one["position"] for one in found["largest"]} == {0}
        skipping = InputEstimator(walk, skip=1)
        skipping.block(0, hidden)
        assert skipping.outliers["mlp.down_proj"] == {}
        position["at"] = 3
        skipping.block(0, hidden)
        assert {one["position"] for one in skipping.outliers["mlp.down_proj"]["a"]["largest"]} == {3}
    finally:
        handle.remove()


def test_a_token_with_huge_gradients_is_found_in_both_factors_and_clipped_in_a(tmp_path):
    walk, ids = Walk(tiny_model("llama"), 12), tokens(4, 12)
    grow = torch.ones(12, 1)
    grow[3] = 100

    def steeper(_module, _arguments, output):
        return output.detach() + grow * (output - output.detach()) if output.requires_grad else output

    handle = walk.blocks[0].register_forward_hook(steeper)
    try:
        hidden = walk.embed(ids)
        for clip in (None, 0.9):
            estimator = BackpropEstimator(walk, ids, tmp_path / str(clip), seed=SEED, clip=clip)
            estimator.block(0, hidden)
            found = estimator.outliers["mlp.down_proj"]
            assert set(found) == ({"a", "b"} if clip is None else {"b"})
            assert {one["position"] for side in found.values() for one in side["largest"]} == {3}
    finally:
        handle.remove()
    whole = BackpropEstimator(walk, ids, tmp_path / "sequence", factor="sequence", seed=SEED)
    whole.block(0, hidden)
    assert whole.outliers["mlp.down_proj"] == {}


# --- order, refit, polish ------------------------------------------------------------------------------------------------------------------


def stored(out):
    return {
        f"{i}.{name}": tensor
        for i in range(2)
        for name, tensor in load_file(out / "bakron" / "codes" / f"block_{i:04d}.safetensors").items()
    }


@pytest.mark.parametrize("order", ["diagonal", "min-pivot", "reversed"])
def test_every_linear_is_certified_in_the_order_it_was_rounded_in(order, quantize):
    out = quantize(order=order)
    assert {tuple(event["order"]) for event in events_of(out)} == {(order, order)}
    assert certify_run(out)["violations"] == 0
    recipe = out / "bakron" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(f"order: {order}", "order: natural"))
    assert certify_run(out)["violations"] > 0


def test_scales_are_fitted_with_the_pivots_of_the_order():
    W, kron = random(8, 32), Kron(spd(32, torch.Generator().manual_seed(0)), spd(8, torch.Generator().manual_seed(1)))
    for order in ("natural", "min-pivot", "reversed"):
        columns = arrange(kron.A, order, 32)
        expected = torch.empty(32, dtype=torch.float64)
        expected[columns] = Factor(kron.A.H[columns][:, columns]).pivots
        torch.testing.assert_close(pipeline._in_order(kron, order).A.pivots, expected)
        linear = torch.nn.Linear(32, 8, bias=False).requires_grad_(False)
        linear.weight.copy_(W)
        recipe = Recipe(levels=4, group_size=8, order=order, damp_a=0.0, damp_b=0.0).resolve()
        grid = pipeline.round_linear(linear, kron, recipe, torch.float32, "w").grid
        fitted = UniformGrid.fit(W.float(), 4, 8, "curvature", kron=Kron(torch.diag(expected)))
        torch.testing.assert_close(grid.scale, fitted.scale)


def test_reversed_order_is_the_natural_one_of_the_reversed_problem():
    given = problem(10, 24, group_size=8, seed=3)
    flipped = Kron(given.kron.A.H.flip(0, 1), given.kron.B.H.flip(0, 1))
    grid = given.grid.reorder(torch.arange(10).flip(0), torch.arange(24).flip(0))
    expected = solve(given.W.flip(0, 1), flipped, grid, method="naive").codes.flip(0, 1)
    assert torch.equal(solve(given.W, given.kron, given.grid, order="reversed").codes, expected)


def test_refit_and_polish_lower_the_loss_that_they_start_from(quantize):
    plain, refitted, polished = quantize(inputs="original"), quantize(inputs="original", refit=True), quantize(inputs="original", polish=2)
    both = quantize(inputs="original", refit=True, polish=1)
    for one, two, three, four in zip(*map(events_of, (plain, refitted, polished, both))):
        assert list(one["losses"]) == ["sweep"] and list(two["losses"]) == ["sweep", "refit"]
        assert list(three["losses"]) == ["sweep", "polish"] and list(four["losses"]) == ["sweep", "refit", "polish"]
        for event in (one, two, three, four):
            losses = list(event["losses"].values())
            assert losses[0] == pytest.approx(one["loss"], rel=1e-6) and event["loss"] == losses[-1]
            assert losses == sorted(losses, reverse=True)
        assert two["loss"] < one["loss"] and three["loss"] < one["loss"]
    first, second, third = stored(plain), stored(refitted), stored(polished)
    assert all(torch.equal(first[name], third[name]) for name in first if name.endswith(".scale"))
    assert not any(torch.equal(first[name], second[name]) for name in first if name.endswith(".scale"))
    for out in (refitted, polished):
        with pytest.raises(OutputError, match="after which values are no nearest-plane rounding any more"):
            certify_run(out)


# --- precision of sums -----------------------------------------------------------------------------------------------------------------------


def moments(z, weight):
    z = z.double().flatten(0, -2)
    return torch.einsum("t,ti,tj->ij", weight.double().flatten(), z, z)


@pytest.mark.parametrize("name", ["input", "backprop"])
def test_float64_sums_are_nearer_to_the_sums_of_float64(name, tmp_path):
    walk, ids = Walk(tiny_model("llama"), 32, batch=2), tokens(8, 32)
    hidden = walk.embed(ids)
    seen, inputs = {}, {}
    handles = [
        linear.register_forward_pre_hook(lambda _, arguments, at=linear_name: inputs.setdefault(at, []).append(arguments[0].clone()))
        for linear_name, linear in walk.linears(0).items()
    ]
    walk.apply(0, hidden)
    for handle in handles:
        handle.remove()

    def collect(rows, linear, x, g):
        seen.setdefault(linear, []).append((x.clone(), g.clone()))

    gradient = gradients.head_gradient(walk, walk.apply(1, walk.apply(0, hidden)), SEED, lambda *_: None)
    gradient = gradients.block_gradients(walk, 1, walk.apply(0, hidden), gradient, lambda *_: None)
    gradients.block_gradients(walk, 0, hidden, gradient, collect)
    error = {}
    for dtype in (torch.float32, torch.float64):
        if name == "input":
            estimator = InputEstimator(walk, dtype=dtype)
        else:
            estimator = BackpropEstimator(walk, ids, tmp_path / str(dtype), factor="shampoo", seed=SEED, dtype=dtype)
        worst = 0.0
        for linear, kron in estimator.block(0, hidden).items():
            assert kron.A.H.dtype == dtype
            x, g = (torch.cat([pair[side] for pair in seen[linear]]) for side in (0, 1))
            sides = [(kron.A.H, torch.cat(inputs[linear]), g.double().square().sum(-1) if name == "backprop" else torch.ones(x.shape[:2]))]
            if name == "backprop":
                sides.append((kron.B.H, g, x.double().square().sum(-1)))
            for H, z, weight in sides:
                exact = moments(z, weight)
                worst = max(worst, float((H.double() - exact).norm() / exact.norm()))
        error[dtype] = worst
    assert error[torch.float32] > 1e-9 > error[torch.float64]


def test_float64_sums_of_local_hessians_are_those_of_a_float64_model():
    exact = ESTIMATORS["fully-local"](Walk(tiny_model("qwen3").double(), 16), factor="shampoo")
    walk = Walk(tiny_model("qwen3"), 16)
    hidden = walk.embed(tokens(2, 16))
    expected = exact.block(0, hidden.double())
    for dtype in (torch.float32, torch.float64):
        found = ESTIMATORS["fully-local"](walk, factor="shampoo", dtype=dtype).block(0, hidden)
        for name, kron in found.items():
            for H, K in ((kron.A, expected[name].A), (kron.B, expected[name].B)):
                assert (H is None) == (K is None)
                if H is not None:
                    assert H.H.dtype == dtype
                    assert float((H.H.double() - K.H).norm() / K.H.norm()) < 1e-4


def test_accumulate_is_part_of_a_stored_pass(quantize, tmp_path):
    one, two = quantize(accumulate="float32", factors=str(tmp_path / "f32")), quantize(accumulate="float64", factors=str(tmp_path / "f64"))
    B = [load_file(tmp_path / name / "block_0000.safetensors")["mlp.up_proj.B"] for name in ("f32", "f64")]
    assert [part.dtype for part in B] == [torch.float32, torch.float64]
    for first, second in zip(events_of(one), events_of(two)):
        assert second["loss"] == pytest.approx(first["loss"], rel=0.05)
    with pytest.raises(RecipeError, match="dtype"):
        quantize(accumulate="float64", factors=str(tmp_path / "f32"))
