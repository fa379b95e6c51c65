"""What a run is doing: on a terminal live bars and a line of figures; elsewhere plain lines, one at the start and end of a stage and every half minute between."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

EVERY = 30.0  # seconds between plain lines of one stage
NAMES = {
    "forward": "gradients: forward",
    "head": "gradients: head",
    "backward": "gradients: backward",
    "quantize": "quantize blocks",
    "store": "store Hessians",
    "shard": "round linears",
    "evaluate": "evaluate",
}
OF_BLOCKS = ("forward", "backward", "quantize", "store")  # stages whose steps are blocks, through each of which all tokens go
DOING = {
    "load": "loading",
    "calibrate": "running blocks on the text",
    "hessian": "making Hessians",
    "solve": "rounding",
    "write": "writing",
}


class Display:
    """A context manager whose `progress`, `log` and `observe` fit the arguments of that name in `bakron.quantize` and `bakron.evaluate`.

    Args:
        quiet: Show nothing.
        console: Where to show it; None = standard error.
    """

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._bars = Progress(
            TextColumn("{task.description:<20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._begun: dict[str, tuple[float, int]] = {}  # stage -> (time of its first step, steps done by then)
        self._said: dict[str, float] = {}  # stage -> time of its last line
        self._facts: dict[str, Any] = {"logs": []}

    def __enter__(self) -> Display:
        if self.console.is_terminal and not self.console.quiet:
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def log(self, message: str) -> None:
        """Show one line."""
        self.console.print(message, markup=False)

    def observe(self, event: dict[str, Any]) -> None:
        """Take note of what happens: see `bakron.quantize`."""
        for key in ("stage", "blocks", "tokens", "memory"):
            if key in event and "linear" not in event:
                self._facts[key] = event[key]
        if "linear" in event:
            self._facts |= {"linear": event["linear"], "block": event["block"] + 1, "memory": event["memory"]}
            if event.get("loss") and event.get("nearest_loss"):
                self._facts["logs"].append(math.log(event["loss"] / event["nearest_loss"]))

    def progress(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` steps of a stage are finished."""
        now = time.monotonic()
        if stage == "quantize":
            self._facts["block"] = min(done + 1, total)
        start, first = self._begun.setdefault(stage, (now, done))
        pace = (now - start) / (done - first) if done > first else 0.0  # seconds a step
        if stage in OF_BLOCKS and self._facts.get("tokens") and pace > 0:
            self._facts["speed"] = self._facts["tokens"] / pace
        if self._live is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(NAMES.get(stage, stage), total=total)
            self._bars.update(self._tasks[stage], completed=done)
        elif done == total or now - self._said.get(stage, -EVERY) >= EVERY:
            self._said[stage] = now
            left = f", about {pace * (total - done):.0f} s left" if pace > 0 and done < total else ""
            figures = self.figures() if stage == "quantize" else []
            self.log(", ".join([f"{NAMES.get(stage, stage)}: {done} of {total}, {now - start:.0f} s{left}", *figures]))

    def figures(self) -> list[str]:
        """Loss against nearest rounding so far (geometric mean over linears), speed and memory, as far as they are known."""
        parts, facts = [], self._facts
        if facts["logs"]:
            parts.append(f"loss {math.exp(sum(facts['logs']) / len(facts['logs'])):.3f} of nearest rounding's")
        if "speed" in facts:
            parts.append(f"{facts['speed']:,.0f} tokens/s through a block")
        if "memory" in facts:
            current, peak = facts["memory"].get("current"), facts["memory"]["peak"]
            parts.append((f"{current / 1e9:.2f} GB, " if current else "") + f"peak {peak / 1e9:.2f} GB")
        return parts

    def _render(self) -> Group:
        facts = self._facts
        where = f"block {facts['block']} of {facts.get('blocks', '?')}" if "block" in facts else None
        linear = f"{facts['linear']} done" if "linear" in facts and facts.get("stage") == "solve" else None
        line = " · ".join(filter(None, [DOING.get(facts.get("stage", "")), where, linear, *self.figures()]))
        return Group(*([self._bars] if self._tasks else []), *([Text(line, style="dim")] if line else []))
