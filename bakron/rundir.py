"""Files of a run: written whole or not at all (temporary file, fsync, rename), with checksums, so that an unfinished run can be gone on with.

`OUT/bakron/` holds `run.json` (what the run is: recipe, model, text; written before the work starts), `recipe.yaml`, while there are blocks to round
`gradients/` and, if they were asked for, `hessians/` and `solved/` (a file a linear), `codes/block_NNNN.safetensors` (the codes of a block, with its events and
a checksum), `events.jsonl` (made from those), and at the very end `summary.json`, which says that the run is finished.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bakron.errors import OutputError, RecipeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FOLDER = "bakron"  # within the output directory
CHECKSUM = "sha256"  # key in the metadata of a file
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def path_of(name: str | Path) -> Path:
    """A path as a user gives it, `~` being the home directory.

    Raises:
        OutputError: No file can have that name.
    """
    try:
        path = Path(name).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            path.lstat()
        return path
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, the home of nobody
        shown = f"{str(name)[:80]!r}{'...' if len(str(name)) > 80 else ''}"
        why = getattr(error, "strerror", None) or error
        raise OutputError(f"{shown} is no path that can be used: {why}", "a file or directory", "Choose another path") from error


def check_output(out: str | Path) -> Path:
    """The output directory must be absent, empty or hold an unfinished run, and be writable.

    Raises:
        OutputError: It is not.
    """
    path = path_of(out)
    if path.exists() and not path.is_dir():
        raise OutputError(f"{out} is a file", "a new or empty directory", "Choose another output directory")
    if (path / FOLDER / "summary.json").exists():
        raise OutputError(
            f"{out} holds a finished run",
            "a new or empty directory, or an unfinished run",
            "Choose another output directory or remove it first",
        )
    if path.is_dir() and not _begun(path) and any(file.name != "run.json.tmp" for file in _files(path)):
        raise OutputError(f"{out} is not empty", "a new or empty directory", "Choose another output directory or remove it first")
    _check_writable(path)
    return path


def _begun(path: Path) -> bool:
    return (path / FOLDER / "run.json").is_file()


def _files(path: Path) -> Iterator[Path]:
    return (file for file in path.rglob("*") if not file.is_dir())


def begun(out: Path) -> dict[str, Any] | None:
    """What the unfinished run in the output directory is, or None if there is none.

    Raises:
        OutputError: Its record cannot be read.
    """
    if not _begun(out):
        return None
    file = out / FOLDER / "run.json"
    try:
        found = json.loads(file.read_text("utf-8"))
        if not isinstance(found, dict) or not isinstance(found.get("recipe"), dict):
            raise ValueError("no recipe in it")
        seconds = found.get("seconds", {})
        if not isinstance(seconds, dict) or not all(isinstance(value, int | float) and 0 <= value < math.inf for value in seconds.values()):
            raise ValueError("seconds that are none")
        if not isinstance(sessions := found.get("sessions", 1), int) or not 1 <= sessions < 1 << 31:
            raise ValueError("sessions that are none")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise OutputError(f"{file} cannot be read: {error}", "the record of an unfinished run", f"Remove {out} and start again") from error


def note(out: Path, **facts: Any) -> None:
    """Add facts to the record of the unfinished run in the output directory, if there is one."""
    if (found := begun(out)) is not None:
        write_text(out / FOLDER / "run.json", json.dumps(found | facts, indent=1))


def same_run(out: Path, found: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse to go on with another run's work.

    Args:
        out: Output directory.
        found: Values by key of the run that was begun there.
        here: Those of this one; only keys that are in it are compared.

    Raises:
        RecipeError: Every key that differs is named, with both values.
    """
    there = {key: "not given" if found.get(key) is None else found[key] for key in here}
    if differing := [
        f"{key} ({there[key]} there, {'not given' if here[key] is None else here[key]} here)" for key in here if found.get(key) != here[key]
    ]:
        raise RecipeError(
            f"{out} holds an unfinished run of another kind: {'; '.join(differing)}",
            "the same run, or a new directory",
            "Choose another output directory, or remove it",
        )


@contextmanager
def held(out: Path, *, together: bool = False) -> Iterator[None]:
    """The output directory for this process alone, for the time of a with statement; however the process ends, it is free again.

    Args:
        out: Output directory.
        together: For this process and others that ask for it in the same way.

    Raises:
        OutputError: Another process has it.
    """
    folder = out / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder} cannot be made: {error.strerror}", "a writable directory with room on its disk") from error
    with _locked(folder, (fcntl.LOCK_SH if together else fcntl.LOCK_EX) | fcntl.LOCK_NB):
        yield


@contextmanager
def alone(file: Path) -> Iterator[None]:
    """A file for this process alone, for the time of a with statement; waits for another one that has it.

    Raises:
        OutputError: It is missing.
    """
    with _locked(file, fcntl.LOCK_EX):
        yield


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}", "a file or directory of a run") from error
    try:
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError as error:
            raise OutputError(
                f"another process is working in {path.parent}", "one run a directory", "Wait for it, or choose another"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.EBADF, errno.EINVAL):  # file systems without locks like these
                raise OutputError(f"{path} cannot be locked: {error.strerror}", "a writable directory") from error
        yield
    finally:
        os.close(descriptor)


def check_store(path: str | Path) -> None:
    """A directory that is kept between runs must be there or be possible to make, and be writable.

    Raises:
        OutputError: It is not.
    """
    _check_writable(path_of(path))


def _check_writable(path: Path) -> None:
    ancestor = path
    while not ancestor.exists():
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        raise OutputError(f"{ancestor} is a file", "a directory", "Choose another directory")
    if not os.access(ancestor, os.W_OK):
        raise OutputError(f"{ancestor} cannot be written", "a writable directory", "Choose another directory")


def worth_keeping(out: Path) -> bool:
    """Whether the output directory holds work: a finished run, a rounded block, or a part of a gradient pass."""
    folder = out / FOLDER
    return (folder / "summary.json").is_file() or any(folder.glob("*/*.safetensors"))


def first_damaged(folder: Path) -> str | None:
    """What is wrong with the first tensor file of a directory whose checksum is not right, or None."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            read_tensors(file, "a whole file")
        except OutputError as error:
            return str(error).rstrip(".")
    return None


def discard_scratch(out: Path, *names: str) -> None:
    """Remove what is of no use once every block is rounded, or some of it: the gradient pass, stored Hessians and what was solved from them, activations."""
    for name in names or ("gradients", "hessians", "solved", "spill"):
        shutil.rmtree(out / FOLDER / name, ignore_errors=True)


def discard(out: Path) -> None:
    """Remove what a run left in its output directory, and the directory if nothing else is in it."""
    shutil.rmtree(out / FOLDER, ignore_errors=True)
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()


def codes_file(out: Path, i: int) -> Path:
    """Where the codes and scales of block i are kept."""
    return out / FOLDER / "codes" / f"block_{i:04d}.safetensors"


def write_text(path: Path, text: str) -> None:
    """Write a whole file, atomically."""
    with _whole(path) as file:
        file.write(text.encode("utf-8"))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a whole safetensors file with a checksum, atomically."""
    metadata = dict(metadata or {})
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    stream_tensors(path, shapes, tensors.items(), metadata | {CHECKSUM: _checksum(tensors, metadata)})


def stream_tensors(
    path: Path,
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Write a whole safetensors file, atomically, with one tensor in memory at a time.

    Args:
        path: Of the file.
        shapes: Dtype and shape of every tensor.
        tensors: Names and tensors, in any order, each one once.
        metadata: Of the file.

    Raises:
        OutputError: It cannot be written.
        ValueError: The tensors are not those of `shapes`.
    """
    header, entries, _ = _header(shapes, metadata)
    left = set(shapes)
    with _whole(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in tensors:
            if name not in left or (tensor.dtype, tuple(tensor.shape)) != shapes[name]:
                raise ValueError(f"{name} is no tensor that was announced for {path}")
            left.remove(name)
            file.seek(8 + len(header) + entries[name]["data_offsets"][0])
            file.write(_bytes(tensor))
        if left:
            raise ValueError(f"{path} lacks {min(left)}")


def tensors_size(shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> int:
    """Bytes of the file that `stream_tensors` makes of these."""
    header, _, end = _header(shapes, metadata)
    return 8 + len(header) + end


def _header(shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, Any], int]:
    """Header of a safetensors file, what it tells of each tensor, and the bytes of all tensors."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name)):  # aligned, as readers want it
        dtype, shape = shapes[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[str(dtype).removeprefix("torch.")], "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    return header + b" " * (-len(header) % 8), entries, end


def read_tensors(path: Path, expected: str = "a file of a finished run") -> dict[str, Tensor]:
    """All tensors of a safetensors file; its checksum must be right, if it has one.

    Args:
        path: Of the file.
        expected: What it should be, for the message.

    Raises:
        OutputError: The file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors, metadata = load_file(path), read_metadata(path)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{path} cannot be read: {error}", expected) from error
    if (told := metadata.pop(CHECKSUM, None)) is not None and told != _checksum(tensors, metadata):
        raise OutputError(f"{path} is damaged: its checksum is wrong", expected)
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file.

    Raises:
        OutputError: The file is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as opened:
            return dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{path} cannot be read: {error}", "a safetensors file") from error


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode("utf-8"))
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


class Events:
    """`events.jsonl`: one line an event, flushed as it is written.

    Args:
        path: The file; made, with its directory, at the first event.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: Mapping[str, Any]) -> None:
        """Append one event.

        Raises:
            OutputError: It holds a number that is not finite, or cannot be written.
        """
        text = line(event) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written: {error.strerror}", "a writable directory with room on its disk") from error

    def replace(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Put these in place of all events there are."""
        write_text(self.path, "".join(line(event) + "\n" for event in events))

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """All events of a file."""
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def line(event: Mapping[str, Any]) -> str:
    """An event as one line of JSON.

    Raises:
        OutputError: It holds a number that is not finite.
    """
    try:
        return json.dumps(event, allow_nan=False)
    except ValueError as error:
        raise OutputError(f"a figure of {event.get('linear', 'the run')} is not finite", "a model whose losses float32 can hold") from error


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name when all of it is on the disk, and not at all if that fails."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OutputError(f"{path} cannot be written: {error.strerror}", "a writable directory with room on its disk") from error
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _sync(folder: Path) -> None:
    """Make a rename last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
