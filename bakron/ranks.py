"""The processes of one run, as torchrun starts them: who this one is, what falls to it, and sums and messages between all of them.

Alone, which is the rule, every function here is the identity and nothing of `torch.distributed` is imported. Tensors on the CPU go through gloo, those on GPUs
through nccl; objects always through gloo.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from bakron.errors import BakronError, ProcessError, RecipeError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
PATIENCE = timedelta(hours=4)  # for the slowest process, such as one that exports while others wait; one that ends is noticed at once


@dataclass(frozen=True)
class Place:
    """This process among those of its run."""

    rank: int = 0
    size: int = 1


_here = Place()
_joined: bool | None = None  # the processes' connections: not made yet, there, or lost


def launched() -> Place:
    """What torchrun says of this process in its environment; rank 0 of 1 without torchrun.

    Raises:
        RecipeError: It makes no sense.
    """
    told = {name: os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))}
    try:
        place = Place(int(told["RANK"]), int(told["WORLD_SIZE"]))
    except ValueError:
        place = Place(-1, 0)
    if not 0 <= place.rank < place.size:
        raise RecipeError(
            f"RANK {told['RANK']} and WORLD_SIZE {told['WORLD_SIZE']} in the environment", "those of torchrun, or none", "Unset both"
        )
    return place


@contextmanager
def started() -> Iterator[None]:
    """Together with the other processes of this run for the time of a with statement, if torchrun started it.

    Connections are made once and last as long as the program, unless an error ends the with statement: then they are cut, so that no process waits in vain.
    In a program that has a process group of its own, this process stays alone.

    Raises:
        ProcessError: Another process was lost on the way, or in an earlier run of the program.
    """
    global _here, _joined
    place = launched()
    if place.size == 1 or _here.size > 1:
        yield
        return
    import torch
    import torch.distributed as dist

    if dist.is_initialized() and not _joined:
        yield
        return
    if _joined is False:
        raise ProcessError("the processes of this program lost each other in an earlier run", None, "Start them all again")
    if _joined is None:
        with _together():
            gpus = torch.cuda.is_available() and dist.is_nccl_available()
            dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=PATIENCE)
        atexit.register(_part)
    _here, _joined = place, True
    try:
        with _told_to_stop():
            yield
    except BaseException:
        _joined = False
        _part()
        raise
    finally:
        _here = Place()


def _part() -> None:
    """Cut the connections, if they are there."""
    import torch.distributed as dist

    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def rank() -> int:
    """Number of this process, from 0."""
    return _here.rank


def size() -> int:
    """How many processes work on this run."""
    return _here.size


def first() -> bool:
    """Whether this is the process that writes and tells."""
    return _here.rank == 0


def local() -> int:
    """Number of this process among those on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) if _here.size > 1 else 0


def whose() -> str:
    """What to say of a sequence that this process has counted."""
    return "" if _here.size == 1 else f" of those that fall to process {_here.rank}"


def share(n: int, place: Place | None = None) -> slice:
    """Which of n things in a row fall to a process, this one by default: neighbours, and as many as to any other one, or one more."""
    place = place or _here
    least, more = divmod(n, place.size)
    start = place.rank * least + min(place.rank, more)
    return slice(start, start + least + (place.rank < more))


def owners(shapes: Mapping[str, tuple[int, int]], count: int | None = None) -> dict[str, int]:
    """Which process rounds which linear: the costliest first, each to the one with the least to do so far.

    Args:
        shapes: `(m, n)` of each linear; rounding it costs about `m n (m + n)`.
        count: Of how many; None for the processes of this run.
    """
    load = [0] * (count or _here.size)
    found = {}
    for name in sorted(shapes, key=lambda name: -_cost(*shapes[name])):
        found[name] = load.index(min(load))
        load[found[name]] += _cost(*shapes[name])
    return {name: found[name] for name in shapes}


def _cost(m: int, n: int) -> int:
    return m * n * (m + n)


def sum_(tensor: Tensor, at: int | None = None) -> Tensor:
    """The sum over all processes, in place; right on process `at` only, if it is given."""
    if _here.size > 1:
        import torch.distributed as dist

        with _together():
            dist.all_reduce(tensor) if at is None else dist.reduce(tensor, at)
    return tensor


def gather(value: T, at: int | None = None) -> list[T]:
    """What every process has, in their order; on processes other than `at`, if it is given, an empty list."""
    if _here.size == 1:
        return [value]
    import torch.distributed as dist

    wanted = at is None or at == _here.rank
    found: list[Any] = [None] * _here.size if wanted else []
    with _together():
        if at is None:
            dist.all_gather_object(found, _packed(value))
        else:
            dist.gather_object(_packed(value), found if wanted else None, at)
    return [pickle.loads(one) for one in found]


def joined(tensor: Tensor, at: int | None = None, dim: int = 0) -> Tensor:
    """The rows (along `dim`) of all processes, in their order; on processes other than `at`, if it is given, their own."""
    import torch

    found = gather(tensor, at) if _here.size > 1 else []
    return torch.cat(found, dim) if found else tensor


def told(value: T | None, by: int = 0) -> T:
    """What process `by` has; what others give does not matter."""
    if _here.size > 1:
        import torch.distributed as dist

        box = [_packed(value) if by == _here.rank else None]
        with _together():
            dist.broadcast_object_list(box, by)
        value = pickle.loads(box[0])  # type: ignore[arg-type]
    return value  # type: ignore[return-value]


def by_first(work: Callable[[], T]) -> T:
    """Let process 0 do something while the others wait; all have its result, or its error."""
    if _here.size == 1:
        return work()
    result: tuple[T | None, BakronError | None] = None, None
    if first():
        try:
            result = work(), None
        except BakronError as error:
            result = None, error
    value, failed = told(result)
    if failed is not None:
        raise failed
    return value  # type: ignore[return-value]


def meet() -> None:
    """Wait until every process is here."""
    gather(None)


def _packed(value: Any) -> bytes:
    """As bytes, tensors with no more of their storage than they show."""
    return pickle.dumps(_own(value), protocol=pickle.HIGHEST_PROTOCOL)


def _own(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)
    if type(value) in (list, tuple):
        return type(value)(_own(one) for one in value)
    return {key: _own(one) for key, one in value.items()} if type(value) is dict else value


@contextmanager
def _together() -> Iterator[None]:
    """What torch raises over a connection that broke is one error."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessError(
            f"another process of this run was lost, or stopped with an error of its own ({str(error).splitlines()[0]})",
            None,
            "Run the same command again, with any number of processes: it goes on from what is done",
        ) from error


@contextmanager
def _told_to_stop() -> Iterator[None]:
    """SIGTERM, by which torchrun ends processes when one is lost, is an error with a message."""

    def stop(*_: Any) -> None:
        raise ProcessError(
            "this process was told to stop (SIGTERM), which is what torchrun does when another one is lost",
            None,
            "Run the same command again, with any number of processes: it goes on from what is done",
        )

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
