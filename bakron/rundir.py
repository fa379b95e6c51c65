"""Files of a run: written whole or not at all (temporary file, fsync, rename), and one JSON line an event."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bakron.errors import OutputError

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "bakron"  # within the output directory


def check_output(out: str | Path) -> Path:
    """The output directory must be absent or empty, and its parent writable.

    Raises:
        OutputError: It is not.
    """
    path = Path(out).expanduser()
    if path.exists() and not path.is_dir():
        raise OutputError(f"{out} is a file", "a new or empty directory", "Choose another output directory")
    if path.is_dir() and any(path.iterdir()):
        raise OutputError(f"{out} is not empty", "a new or empty directory", "Choose another output directory or remove it first")
    _check_writable(path)
    return path


def check_store(path: str | Path) -> None:
    """A directory that is kept between runs must be there or be possible to make, and be writable.

    Raises:
        OutputError: It is not.
    """
    _check_writable(Path(path).expanduser())


def _check_writable(path: Path) -> None:
    ancestor = path
    while not ancestor.exists():
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        raise OutputError(f"{ancestor} is a file", "a directory", "Choose another directory")
    if not os.access(ancestor, os.W_OK):
        raise OutputError(f"{ancestor} cannot be written", "a writable directory", "Choose another directory")


def discard(out: Path) -> None:
    """Remove what an unfinished run left in its output directory, and the directory if nothing else is in it."""
    shutil.rmtree(out / FOLDER, ignore_errors=True)
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()


def codes_file(out: Path, i: int) -> Path:
    """Where the codes and scales of block i are kept."""
    return out / FOLDER / "codes" / f"block_{i:04d}.safetensors"


def write_text(path: Path, text: str) -> None:
    """Write a whole file, atomically."""
    _replace(path, text.encode("utf-8"))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a whole safetensors file, atomically."""
    from safetensors.torch import save

    _replace(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}, dict(metadata or {})))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file.

    Raises:
        OutputError: The file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{path} cannot be read: {error}", "a file of a finished run") from error


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
            OutputError: It holds a number that is not finite.
        """
        try:
            line = json.dumps(event, allow_nan=False)
        except ValueError as error:
            raise OutputError(
                f"a figure of {event.get('linear', 'the run')} is not finite", "a model whose losses float32 can hold"
            ) from error
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """All events of a file."""
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}", "a writable directory with room on its disk") from error
