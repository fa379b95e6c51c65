"""The gradient pass with fewer block inputs kept: the same factors, the promised number of runs, one block at a time."""

import contextlib
import math
import weakref

import pytest
import torch
from test_hessian import tokens
from tiny import tiny_model

from bakron import config, recipes, rundir
from bakron.errors import RecipeError
from bakron.hessian import BackpropEstimator, gradients, schedule
from bakron.hessian.factor import FACTORS
from bakron.models.walk import Walk

BLOCKS = [1, 2, 3, 7, 16]
TINY = dict(vocab_size=16, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)


def small_walk(blocks, length=8):
    return Walk(tiny_model("llama", num_hidden_layers=blocks, **TINY).double(), length, precision="float32")


def run(walk, ids, store, slots, factor="shampoo"):
    passes = gradients.gradient_pass(walk, ids, store, seed=2, weighting=FACTORS[factor], slots=slots, progress=lambda *_: None)
    return passes, [rundir.read_tensors(store / f"block_{i:04d}.safetensors") for i in range(len(walk))]


# --- the schedule alone ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [1, 2, 3, 4, 5, 8, 9, 17, 33, 64])
def test_schedule_visits_each_unit_once_from_the_last_with_its_own_input(units):
    costs = []
    for slots in range(schedule.fewest_slots(units), units + 2):
        visited = []

        def forward(unit, state):
            assert state == unit
            return state + 1

        def visit(unit, state, visited=visited):
            assert state == unit
            visited.append(unit)

        runs, kept = schedule.reverse(units, slots, 0, forward, visit)
        assert visited == list(range(units))[::-1]
        assert runs == schedule.forward_runs(units, slots) and kept <= slots
        costs.append(runs)
    assert costs == sorted(costs, reverse=True) and costs[-1] == units - 1  # more memory never costs more, all of it one run a unit
    assert costs[0] <= units * math.ceil(math.log2(units) + 1)


def test_schedule_is_the_cheapest_there_is():
    """Against a search over all cuts."""

    def search(units, slots):
        if units == 1:
            return 0
        return min((cut + search(units - cut, slots - 1) + search(cut, slots) for cut in range(1, units)), default=0) if slots > 1 else 999

    for units in range(1, 10):
        for slots in range(schedule.fewest_slots(units), units + 1):
            assert schedule.forward_runs(units, slots) == search(units, slots)


def test_too_few_slots_are_refused():
    with pytest.raises(ValueError, match="3 slots for 9 units; at least 5 are needed"):
        schedule.reverse(9, 3, 0, lambda _, state: state, lambda *_: None)


# --- through the model -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", BLOCKS)
def test_every_budget_gives_the_factors_of_one_full_backward_pass(blocks, tmp_path):
    walk, ids = small_walk(blocks), tokens(2, 8, vocabulary=16)
    everything, expected = run(walk, ids, tmp_path / "all", None)
    assert everything["forward"] == everything["backward"] == blocks and everything["kept"] == blocks + 1
    for slots in {schedule.fewest_slots(blocks + 1), (schedule.fewest_slots(blocks + 1) + blocks + 1) // 2}:
        passes, found = run(walk, ids, tmp_path / str(slots), slots)
        assert passes["forward"] == schedule.forward_runs(blocks + 1, slots) and passes["backward"] == blocks and passes["kept"] <= slots
        if slots == schedule.fewest_slots(blocks + 1):  # halving: a forward run is less than a forward and backward one
            assert passes["kept"] <= math.ceil(math.log2(blocks + 1)) + 1
            assert (passes["forward"] + passes["backward"]) / blocks <= math.ceil(math.log2(blocks)) + 2
        for one, two in zip(expected, found):
            assert one.keys() == two.keys()
            for name in one:
                torch.testing.assert_close(two[name], one[name], rtol=1e-10, atol=1e-10 * float(one[name].abs().max()))


def test_one_block_is_on_the_device_at_a_time(tmp_path, monkeypatch):
    walk, ids, alive = small_walk(7), tokens(2, 8, vocabulary=16), [0, 0]
    resident = walk.resident

    @contextlib.contextmanager
    def counted(i):
        alive[0] += 1
        alive[1] = max(alive)
        with resident(i) as block:
            yield block
        alive[0] -= 1

    monkeypatch.setattr(walk, "resident", counted)
    run(walk, ids, tmp_path, schedule.fewest_slots(8))
    assert alive == [0, 1]


def test_kept_inputs_are_all_that_stay_alive(tmp_path, monkeypatch):
    """Block inputs that still exist whenever a block has run forward, against the counted peak."""
    walk, ids = small_walk(7), tokens(3, 8, vocabulary=16)
    references, alive = [], []

    def watched(function):
        def call(*arguments):
            result = function(*arguments)
            references.append(weakref.ref(result))
            alive.append(sum(one() is not None for one in references))
            return result

        return call

    monkeypatch.setattr(walk, "embed", watched(walk.embed))
    monkeypatch.setattr(walk, "apply", watched(walk.apply))
    passes, _ = run(walk, ids, tmp_path, schedule.fewest_slots(8))
    assert passes["kept"] <= max(alive) <= passes["kept"] + 2  # what enters and what leaves the block that runs


def test_estimator_chooses_what_the_memory_holds_and_counts(tmp_path):
    walk, ids = small_walk(7), tokens(2, 8, vocabulary=16)
    one = 2 * 8 * 16 * 8
    assert gradients.boundary_bytes(walk, ids) == one
    for memory, kept in ((7 * one, 4), (7 * one + one // 2, 4), (8 * one, 5), (11 * one, 8), (99 * one, 8), (None, 8)):
        estimator = BackpropEstimator(walk, ids, tmp_path / str(memory), boundary_memory=memory)
        assert estimator.passes["kept"] == kept == gradients.slots_in(walk, ids, memory)
        assert estimator.passes["bytes"] == (kept + 3) * one
        assert estimator.passes["forward"] == schedule.forward_runs(8, kept)
    assert BackpropEstimator(walk, ids, tmp_path / "None").passes is None  # reused
    with pytest.raises(RecipeError, match=f"at least {7 * one:,} bytes"):
        BackpropEstimator(walk, ids, tmp_path / "small", boundary_memory=7 * one - 1)


# --- the recipe's words ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, size",
    [("4GB", 4 * 10**9), ("512MiB", 2**29), ("1.5 GB", 1_500_000_000), ("4096", 4096), ("2g", 2 * 10**9), ("3kB", 3000), ("1TiB", 2**40)],
)
def test_sizes(text, size):
    assert config.size_in_bytes(text) == size
    assert recipes.from_dict({"boundary_memory": text}).resolve().boundary_memory == text


@pytest.mark.parametrize("text", ["much", "-1GB", "GB", "1XB", "", "1iB"])
def test_no_sizes(text):
    with pytest.raises(RecipeError, match="a size such as 800MB or 4GB"):
        recipes.from_dict({"boundary_memory": text})


@pytest.mark.parametrize("recipe", [dict(method="gptq"), dict(hessian="mlp-local"), dict(method="rtn")])
def test_boundary_memory_belongs_to_backprop(recipe):
    with pytest.raises(RecipeError, match="boundary_memory would do nothing"):
        recipes.from_dict({"boundary_memory": "1GB", **recipe}).resolve()
