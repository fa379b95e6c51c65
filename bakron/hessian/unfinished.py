"""Files of a gradient pass: one a block that is done, and while the pass is under way, what it goes on from if it is cut short.

Of several processes each keeps the gradient of its own sequences, from which a pass of any other number of processes can go on.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from bakron import ranks, rundir
from bakron.errors import OutputError
from bakron.models.walk import Walk

LEFT = "left_{}_{}.safetensors"  # by units left and number of the process


def block_file(store: Path, i: int) -> Path:
    """Where the results of block i are kept."""
    return store / f"block_{i:04d}.safetensors"


def rows_here(sequences: int, held: int, place: ranks.Place | None = None) -> Tensor:
    """Which of all sequences fall to a process, this one by default: its share of those that count, then its share of those held out."""
    used = sequences - held
    return torch.cat([torch.arange(used)[ranks.share(used, place)], used + torch.arange(held)[ranks.share(held, place)]])


def left(walk: Walk, store: Path, key: str, sequences: int, held: int) -> tuple[int, Tensor]:
    """How many units a pass that was cut short has still to visit, the head being the last, and the gradient at the output of the last of them.

    Each process of that pass, however many there were, kept the gradient of its own sequences; this is that of the sequences of this process.
    """
    units, processes = ranks.by_first(lambda: _last_left(walk, store, key))
    rows, gradient = rows_here(sequences, held), torch.empty(0)
    for number in range(processes):
        there = rows_here(sequences, held, ranks.Place(number, processes))
        wanted = torch.isin(rows, there)
        if bool(wanted.any()):
            part = rundir.read_tensors(_left_file(store, units, number))["gradient"]
            gradient = gradient if gradient.numel() else walk.room.empty((len(part), len(rows), *part.shape[2:]), part.dtype)
            gradient[:, wanted] = part[:, torch.searchsorted(there, rows[wanted])]
    return units, gradient


def _last_left(walk: Walk, store: Path, key: str) -> tuple[int, int]:
    """Units left at the furthest point that every process of a pass has reached, and how many processes there were; all units and 0 if there is none."""
    for units in range(len(walk) + 1):
        processes, number = 1, 0
        try:
            while number < processes and all(block_file(store, i).is_file() for i in range(units, len(walk))):
                file = _left_file(store, units, number)
                found = rundir.read_metadata(file)
                processes = int(found["processes"]) if number == 0 else processes
                if (found["key"], found["processes"]) != (key, str(processes)):
                    break
                rundir.read_tensors(file)  # its checksum is right
                number += 1
        except (OutputError, KeyError, ValueError):  # none there, or damaged
            continue
        if number == processes:
            return units, processes
    return len(walk) + 1, 0


def keep_left(store: Path, key: str, units: int, gradient: Tensor) -> None:
    """Keep what a pass goes on from; that of the units before goes when every process has kept its own."""
    rundir.write_tensors(_left_file(store, units, ranks.rank()), {"gradient": gradient}, {"key": key, "processes": str(ranks.size())})
    ranks.meet()
    if ranks.first():
        forget_left(store, units)


def forget_left(store: Path, but: int = -1) -> None:
    """Remove what passes could go on from, but at that many units."""
    for file in store.glob(LEFT.format("*", "*")):
        if not file.match(LEFT.format(f"{but:04d}", "*")):
            file.unlink()


def _left_file(store: Path, units: int, number: int) -> Path:
    return store / LEFT.format(f"{units:04d}", f"{number:04d}")
