"""Progress on a terminal as a bar with the time left; elsewhere as plain lines, one at the start and end of a stage and every half minute between."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY = 30.0  # seconds between plain lines of one stage
NAMES = {
    "forward": "gradients: forward",
    "head": "gradients: head",
    "backward": "gradients: backward",
    "quantize": "quantize blocks",
    "evaluate": "evaluate",
}


class Display:
    """A context manager whose `progress` and `log` fit the arguments of that name in `bakron.quantize` and `bakron.evaluate`.

    Args:
        quiet: Show nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._bars: Progress | None = None
        self._tasks: dict[str, object] = {}
        self._said: dict[str, tuple[float, float]] = {}  # stage -> (start, last line)

    def __enter__(self) -> Display:
        if self.console.is_terminal and not self.console.quiet:
            columns = (
                TextColumn("{task.description:<20}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bars = Progress(*columns, console=self.console)
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def log(self, message: str) -> None:
        """Show one line."""
        self.console.print(message, markup=False)

    def progress(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` steps of a stage are finished."""
        if self._bars is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(NAMES.get(stage, stage), total=total)
            self._bars.update(self._tasks[stage], completed=done)  # type: ignore[arg-type]
            return
        now = time.monotonic()
        start, last = self._said.setdefault(stage, (now, -EVERY))
        if done == total or now - last >= EVERY:
            self._said[stage] = (start, now)
            left = f", about {(now - start) / done * (total - done):.0f} s left" if 1 < done < total else ""
            self.log(f"{NAMES.get(stage, stage)}: {done} of {total}, {now - start:.0f} s{left}")
