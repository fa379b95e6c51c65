"""Kill a run at random moments, take its disk away, and see that nothing is lost: every run, asked for again, must end in the bytes of one that was not disturbed.

    python benchmarks/chaos.py [--kills 20] [--seed 0] [--blocks 12]

Each kill is SIGKILL, sent to a whole process of `bakron quantize` when it has written a number of files that is drawn at random, plus a random fraction of a
second: during the gradient pass, the rounding and the export. Then every kind of write fails in turn, once with a full disk and once read-only.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]

from machine import RESULTS, ROOT, describe  # noqa: E402
from tiny import save_tiny  # noqa: E402

import bakron  # noqa: E402
from bakron import api  # noqa: E402
from bakron.errors import BakronError  # noqa: E402

TEXT = "".join(f"the quick brown fox number {i} jumps over {i * i} lazy dogs; and so on.\n" for i in range(400))
RECIPE = {"levels": 7, "group_size": 32, "sequences": 8, "length": 64}


def main() -> None:
    """Run all disturbances, print a table, write benchmarks/results/chaos.json."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--kills", type=int, default=20)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--blocks", type=int, default=12)
    flags.add_argument("--json", type=Path, default=RESULTS / "chaos.json")
    given = flags.parse_args()
    with tempfile.TemporaryDirectory(prefix="bakron-chaos-") as place:
        rows = disturb(Path(place), given.kills, given.seed, given.blocks)
        rows = [row | {"at": row["at"].replace(f"{place}/", "")} for row in rows]  # no paths of this machine in the results
    lost = [row for row in rows if row["outcome"] != "equal"]
    record = {"machine": describe(), "blocks": given.blocks, "seed": given.seed, "rows": rows, "lost": len(lost)}
    given.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(f"{len(rows)} disturbances, {len(lost)} not byte-equal afterwards")
    if lost:
        raise SystemExit(1)


def disturb(place: Path, kills: int, seed: int, blocks: int) -> list[dict[str, Any]]:
    """All disturbances of one model; prints a row for each."""
    model, text, whole = save_tiny(place / "model", "llama", num_hidden_layers=blocks), place / "text.txt", place / "whole"
    text.write_text(TEXT)
    start = time.perf_counter()
    run(model, whole, text).wait()
    print(f"undisturbed: {time.perf_counter() - start:.0f} s\n{'disturbance':46} {'blocks left':>11}  {'outcome':8} at")
    expected, dice = fingerprint(whole), random.Random(seed)
    writes = 2 * blocks + 12  # gradients with the one at which they go on, codes and events, records, checkpoint
    rows = []
    for number in range(kills):
        out = place / f"kill{number}"
        moment, pause = dice.randrange(1, writes), dice.random() * 0.2
        at = kill(run(model, out, text), out, moment, pause)
        rows.append(row(f"SIGKILL {pause:.2f} s after {moment} files", at, out, model, text, expected))
    for name in (
        "gradients",
        "codes",
        "events.jsonl",
        "run.json",
        "recipe.yaml",
        "model.safetensors",
        "config.json",
        "README.md",
        "summary.json",
    ):
        for code in (errno.ENOSPC, errno.EROFS):
            out = place / f"{name}-{code}"
            told = fail(model, out, text, name, code)
            rows.append(row(f"{os.strerror(code)}: {name}", told, out, model, text, expected))
    for share in (0.2, 0.5, 0.8, 0.95):
        with small_disk(place / f"disk{share}", int(share * most_on_disk(model, text))) as folder:
            if folder is None:
                print("full disk: no file system can be mounted here")
                break
            told = attempt(model, folder / "out", text, planned=False)
            subprocess.run(["mount", "-o", "remount,size=1g", str(folder)], check=True)
            rows.append(row(f"a disk with {share:.0%} of the room needed", told, folder / "out", model, text, expected))
    return rows


def run(model: Path, out: Path, text: Path) -> subprocess.Popen[bytes]:
    """Start `bakron quantize` as a user would."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = [part for name, value in RECIPE.items() for part in ("--" + name.replace("_", "-"), str(value))]
    return subprocess.Popen(
        [sys.executable, "-m", "bakron", "quantize", str(model), str(out), "--data", str(text), *flags, "--quiet"],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )


def kill(process: subprocess.Popen[bytes], out: Path, files: int, pause: float) -> str:
    """Kill a run when it has made so many files, and a moment later; says what it was doing."""
    seen = set[Path]()
    while len(seen) < files and process.poll() is None:
        seen |= {path.with_name(path.name.removesuffix(".tmp")) for path in out.rglob("*.*")}
        time.sleep(0.001)
    time.sleep(pause)
    process.send_signal(signal.SIGKILL)
    process.wait()
    folder = out / "bakron"
    if (folder / "summary.json").exists():
        return "finished"
    if (out / "model.safetensors").exists() or (out / "model.safetensors.tmp").exists():
        return "export"
    return "rounding" if (folder / "codes").exists() else "gradients" if (folder / "gradients").exists() else "loading"


def fail(model: Path, out: Path, text: Path, name: str, code: int) -> str:
    """A run in this process in which the first write to files of that name fails, half written; says what the error told."""
    opened = Path.open

    def refusing(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if ("w" in mode or "a" in mode) and path.is_relative_to(out) and name in str(path.relative_to(out)):
            if code == errno.ENOSPC and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY))  # made, but there is no room in it
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, mode, *rest, **options)

    Path.open = refusing  # type: ignore[method-assign, assignment]
    try:
        return attempt(model, out, text)
    finally:
        Path.open = opened  # type: ignore[method-assign]


def attempt(model: Path, out: Path, text: Path, planned: bool = True) -> str:
    """A run in this process that is expected to end in one of bakron's own errors; not `planned`: without the look at the disk that comes first."""
    look = api.check_disk
    if not planned:
        api.check_disk = lambda *_: None
    try:
        bakron.quantize(model, out, data=str(text), **RECIPE)
        return "no error"
    except BakronError as error:
        return str(error)
    finally:
        api.check_disk = look


def most_on_disk(model: Path, text: Path) -> int:
    """Bytes that an undisturbed run has on its disk at most."""
    disk = api.plan(model, data=str(text), **RECIPE).disk
    assert disk is not None
    return disk["codes"] + max(disk["checkpoint"], disk["gradients"])


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path | None]:
    """A file system of so many bytes, where this user may mount one."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    try:
        yield folder if done.returncode == 0 else None
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", str(folder)], check=False)


def row(what: str, at: str, out: Path, model: Path, text: Path, expected: dict[str, str]) -> dict[str, Any]:
    """Ask for a disturbed run again, and compare."""
    left = len(list((out / "bakron" / "codes").glob("*.safetensors"))) if out.exists() else 0
    try:
        if not (out / "bakron" / "summary.json").exists():
            bakron.quantize(model, out, data=str(text), **RECIPE)
        found = fingerprint(out)
        outcome = (
            "equal"
            if found == expected
            else "differs: " + ", ".join(sorted({k for k in found | expected if found.get(k) != expected.get(k)}))
        )
    except BakronError as error:
        outcome = f"lost: {error}"
    print(f"{what:46} {left:11}  {outcome:8} {at}", flush=True)
    shutil.rmtree(out, ignore_errors=True)
    return {"disturbance": what, "at": at, "blocks_left": left, "outcome": outcome}


def fingerprint(out: Path) -> dict[str, str]:
    """SHA-256 of every file that a run must repeat to the byte, and of the codes."""
    from safetensors.torch import load_file

    found = {}
    for file in sorted(out.rglob("*")):
        name = str(file.relative_to(out))
        if file.is_dir() or name in ("bakron/events.jsonl", "bakron/summary.json", "bakron/run.json", "README.md"):
            continue
        if name.startswith("bakron/codes"):  # whose metadata tell of seconds
            content = b"".join(
                key.encode() + tensor.flatten().view(-1).numpy().tobytes() for key, tensor in sorted(load_file(file).items())
            )
        else:
            content = file.read_bytes()
        found[name] = hashlib.sha256(content).hexdigest()
    return found


if __name__ == "__main__":
    main()
