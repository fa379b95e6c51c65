"""A hook of mkdocs: the reference of the command line, from the commands themselves."""

from __future__ import annotations

import re
from typing import Any

MARKER = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the commands in the place of the marker."""
    return markdown.replace(MARKER, commands()) if MARKER in markdown else markdown


def commands() -> str:
    """Every command with its arguments and options, as Markdown."""
    from typer.main import get_command

    from bakron.cli import app

    return "\n\n".join(_describe(command, f"bakron {name}") for name, command in _leaves(get_command(app)))


def _leaves(group: Any, prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, command in group.commands.items():
        whole = f"{prefix}{name}"
        found += _leaves(command, whole + " ") if hasattr(command, "commands") else [(whole, command)]
    return found


def _describe(command: Any, name: str) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and one.name != "help"]
    lines = [f"## {name}", "", _plain(command.help or ""), "", "```text"]
    lines += [" ".join([name, *(_name(one) for one in arguments), "[OPTIONS]"]), "```", "", "| | |", "|---|---|"]
    lines += [f"| `{_name(one)}` | {_cell(getattr(one, 'help', '') or '')} |" for one in arguments]
    panel = None
    for one in options:
        title = getattr(one, "rich_help_panel", None)
        if title != panel and title is not None:
            panel = title
            lines.append(f"| **{panel}** | |")
        flags = ", ".join(f"`{flag}`" for flag in [*one.opts, *one.secondary_opts])
        lines.append(f"| {flags} | {_cell(one.help or '')} |")
    return "\n".join(lines)


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _plain(text: str) -> str:
    return re.sub(r"[ \t]+", " ", text.replace("\b", "")).strip()


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
