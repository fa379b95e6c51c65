"""Several processes on one run: the same factors and codes as one, and nothing lost when one of them is. Run as a script, this file is such a process."""

import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model

import bakron
from bakron import ranks, rundir
from bakron.errors import RecipeError
from bakron.hessian import BackpropEstimator, InputEstimator, LocalEstimator, rows_here
from bakron.models.walk import Walk

ROOT = Path(__file__).parent.parent
TEXT = "".join(f"the quick brown fox number {i} jumps over {i * i} lazy dogs; and so on.\n" for i in range(40))
BLOCKS = 3
# one sequence a batch, as many tokens in it as go through the head together: every product has the shape that it has in one process
RECIPE = dict(
    levels=7,
    group_size=32,
    sequences=6,
    length=128,
    batch=1,
    precision="float32",
    accumulate="float64",
    gate=True,
    factor="shampoo:2",
    clip=0.98,
)
FLAGS = [word for name, value in RECIPE.items() for word in (["--" + name.replace("_", "-")] + ([] if value is True else [str(value)]))]
WAIT = 280  # seconds, for processes that take a few on a quiet machine


# --- who does what: no processes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, size", [(0, 3), (2, 3), (7, 3), (8, 2), (5, 5)])
def test_shares_are_neighbours_and_nearly_equal(n, size):
    shares = [list(range(n))[ranks.share(n, ranks.Place(rank, size))] for rank in range(size)]
    assert [one for each in shares for one in each] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_owners_are_balanced_by_the_cost_of_a_solve(monkeypatch):
    shapes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64), "gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    cost = {name: m * n * (m + n) for name, (m, n) in shapes.items()}
    assert set(ranks.owners(shapes).values()) == {0}
    for size in (2, 3, 4):
        monkeypatch.setattr(ranks, "_here", ranks.Place(0, size))
        owners = ranks.owners(shapes)
        loads = [sum(cost[name] for name in shapes if owners[name] == rank) for rank in range(size)]
        assert max(loads) <= sum(cost.values()) / size + max(cost.values()) / 2, (size, loads)


@pytest.mark.parametrize("rank, size", [("2", "2"), ("one", "2"), ("0", "")])
def test_an_environment_that_makes_no_sense_is_refused(rank, size, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(RecipeError, match="those of torchrun, or none"):
        bakron.quantize("model", "out")


# --- with processes -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, a text, and the run of one process."""
    path = tmp_path_factory.mktemp("several")
    save_tiny(path / "model", "llama", num_hidden_layers=BLOCKS)
    (path / "text.txt").write_text(TEXT)
    quantize(path, path / "one")
    return path


def quantize(place, out, **others):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the others
    try:
        return bakron.quantize(place / "model", out, data=str(place / "text.txt"), **RECIPE, **others)
    finally:
        torch.set_num_threads(threads)


def environment(**others):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **interface, **others}


def together(size, *arguments):
    """Start `size` processes of this file, wait for them; returns exit status and standard error of each."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=WAIT))
    common = dict(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    common |= dict(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    command = [sys.executable, __file__, *map(str, arguments)]
    processes = [
        subprocess.Popen(command, env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **common), stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        return [(process.communicate(timeout=WAIT)[1], process.returncode)[::-1] for process in processes]
    finally:
        for process in processes:
            process.kill()


def assert_same_codes(out, expected):
    """Sums in another order may turn a tie: all but one code in a hundred."""
    differing = total = 0
    for i in range(BLOCKS):
        here, there = (load_file(rundir.codes_file(run, i)) for run in (out, expected))
        assert here.keys() == there.keys()
        for name in here:
            if name.endswith(".codes"):
                differing, total = differing + int((here[name] != there[name]).sum()), total + here[name].numel()
    print(f"{differing} of {total} codes differ")
    assert differing <= total / 100


@pytest.mark.timeout(600)
def test_torchrun_gives_what_one_process_gives(place, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bakron", "quantize"]
    command += [place / "model", tmp_path / "out", "--data", place / "text.txt", *FLAGS]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("weights") == 1 and done.stderr.count("calibration: ") == 1  # one of them speaks
    assert_same_codes(tmp_path / "out", place / "one")
    files, expected = ({file.relative_to(out) for file in out.rglob("*")} for out in (tmp_path / "out", place / "one"))
    assert files == expected
    summary, alone = (json.loads((out / "bakron" / "summary.json").read_text()) for out in (tmp_path / "out", place / "one"))
    assert summary["processes"] == 2 and alone["processes"] == 1
    for key in ("parameters", "bits_per_weight", "recipe", "calibration", "damping_raised"):
        assert summary[key] == alone[key]
    events, others = (rundir.Events.read(out / "bakron" / "events.jsonl") for out in (tmp_path / "out", place / "one"))
    assert [event["linear"] for event in events] == [event["linear"] for event in others]
    assert [event["tokens"] for event in events] == [event["tokens"] for event in others]


@pytest.mark.timeout(900)
def test_hessians_stored_by_two_processes_are_solved_by_any(place, tmp_path):
    changes = {"gate": False, "inputs": "original"}
    flags = [*(word for word in FLAGS if word != "--gate"), "--inputs", "original", "--data", place / "text.txt"]
    expected = bakron.quantize(place / "model", tmp_path / "one", data=str(place / "text.txt"), **RECIPE | changes)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bakron"]
    for command in ("prepare", "quantize"):
        words = [*launch, command, place / "model", tmp_path / "out", *flags]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=WAIT)
        assert done.returncode == 0, done.stderr
        if command == "prepare":
            assert done.stdout.count("Hessians of 21 linears") == 1
            assert bakron.solve_shard(tmp_path / "out", 1, 2)["all_solved"] < 21  # the rest is left to the two
    assert_same_codes(tmp_path / "out", tmp_path / "one")
    summary = json.loads((tmp_path / "out" / "bakron" / "summary.json").read_text())
    assert summary["processes"] == 2 and summary["recipe"] == expected["recipe"] and summary["parameters"] == expected["parameters"]


@pytest.mark.timeout(900)
def test_a_lost_process_ends_the_run_and_any_number_goes_on(place, tmp_path):
    out = tmp_path / "out"
    (code, survivor), (status, _) = together(2, "quantize", place, out, "backward", 2, 1)
    assert status == -signal.SIGKILL and code == 1
    assert survivor.startswith("another process of this run was lost") and "with any number of processes" in survivor
    store = out / "bakron" / "gradients"
    assert sorted(file.name for file in store.glob("block*")) == [f"block_000{i}.safetensors" for i in range(1, BLOCKS)]
    assert not (out / "bakron" / "summary.json").exists()
    shutil.copytree(out, tmp_path / "three")
    told = []
    quantize(place, out, progress=lambda *step: told.append(step[0]))
    assert "backward" in told and "head" not in told  # from where the two had come to
    assert_same_codes(out, place / "one")
    for status, error in together(3, "quantize", place, tmp_path / "three", "none", 0, 0):
        assert status == 0, error
    assert_same_codes(tmp_path / "three", place / "one")
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.rglob("left_*"))


@pytest.mark.timeout(600)
def test_factors_agree_with_those_of_one_process(tmp_path):
    for status, error in together(2, "factors", tmp_path):
        assert status == 0, error


# --- such a process -----------------------------------------------------------------------------------------------------------------------


def lost_at(stage, number):
    def progress(*step):
        if step[:2] == (stage, number):
            os.kill(os.getpid(), signal.SIGKILL)

    return progress


def compare_factors(folder):
    """Every estimator on nine sequences, two of which gradients hold out, by this process alone and by all together; float64."""
    walk = Walk(tiny_model("llama").double(), 24, batch=2, precision="float32")
    ids = torch.randint(64, (9, 24), generator=torch.Generator().manual_seed(1))
    own = folder / os.environ["RANK"]
    makers = {
        "input": lambda _: InputEstimator(walk, skip=1),
        "local": lambda _: LocalEstimator(walk, ("attention", "value", "mlp"), "shampoo", skip=1),
        **{
            name: lambda store, name=name: BackpropEstimator(walk, ids, store / name, factor=name, clip=0.9, skip=1, held=2)
            for name in ("mixed", "shampoo:2", "kl:2", "sequence")
        },
    }
    for name, make in makers.items():
        alone = make(own)
        held = getattr(alone, "held", 0)
        expected = [(alone.block(i, hidden), facts(alone), tried_of(alone)) for i, hidden in enumerate(hidden_states(walk, ids))]
        gate = alone.heldout(1) if isinstance(alone, BackpropEstimator) else None
        with ranks.started():
            assert ranks.size() == 2
            several = make(folder / "all")
            for i, hidden in enumerate(hidden_states(walk, ids)):
                found, (krons, told, tried) = several.block(i, hidden[rows_here(9, held)]), expected[i]
                found_tried = tried_of(several)
                mine = [linear for linear, owner in walk.owners(i).items() if owner == ranks.rank()]
                assert 0 < len(mine) < len(walk.linears(i))
                assert sorted(found) == sorted(mine)
                for linear in mine:
                    pairs = [(found[linear].A, krons[linear].A), (found[linear].B, krons[linear].B)]
                    pairs += list(zip(found_tried[linear], tried[linear], strict=True)) if held else []
                    for here, there in pairs:
                        assert (here is None) == (there is None)
                        if here is not None:
                            torch.testing.assert_close(here.H, there.H, rtol=0, atol=1e-10 * float(there.H.abs().max()))
                    here, there = (flat(one[linear]) for one in (facts(several), told))
                    assert here == pytest.approx(there, rel=1e-9), (name, linear)
            if gate is not None:
                errors = several.heldout(1)
                for linear in mine:
                    E = torch.randn(walk.linears(1)[linear].weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
                    torch.testing.assert_close(errors.changes(linear, E), gate.changes(linear, E), rtol=1e-9, atol=1e-12)


def hidden_states(walk, ids):
    first = walk.embed(ids)
    return first, walk.apply(0, first)


def tried_of(estimator):
    return {name: (kron.A, kron.B) for name, (kron, _) in getattr(estimator, "tried", {}).items()}


def facts(estimator):
    return {name: [estimator.tokens[name], estimator.effective[name], estimator.outliers[name]] for name in estimator.tokens}


def flat(value):
    if isinstance(value, dict | list):
        return [number for one in (value.values() if isinstance(value, dict) else value) for number in flat(one)]
    return [float(value)]


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "factors":
        compare_factors(Path(arguments[0]))
    else:
        where, target, stage, number, victim = arguments
        dies = stage != "none" and os.environ["RANK"] == victim
        try:
            quantize(Path(where), Path(target), progress=lost_at(stage, int(number)) if dies else None)
        except bakron.BakronError as error:
            sys.exit(str(error))
