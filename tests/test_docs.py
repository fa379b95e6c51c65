"""Every command block of the README and of the documentation is executed, on a tiny model; blocks that cannot run here say why in the page and are counted."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch
from tiny import save_tiny

from bakron import cli

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = {
    "quantize": ["--length", "32", "--sequences", "4"],
    "prepare": ["--length", "32", "--sequences", "4"],
    "plan": ["--length", "32", "--sequences", "4"],
    "evaluate": ["--length", "32", "--sequences", "2"],
}
NOT_RUN = 7  # blocks of all pages that say so; a new one is a decision


def blocks(page: Path) -> list[re.Match]:
    return list(BLOCK.finditer(page.read_text("utf-8")))


def run_shell(code: str) -> None:
    """Lines that call bakron, one after the other, with fewer and shorter sequences than the page has: the model of this test is tiny."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        assert words[0] == "bakron", f"this test runs bakron only: {line}"
        given = [words[i + 1] if f == "--length" else None for i, f in enumerate(words)]
        assert not any(given), "leave lengths to the test"
        cli.app([*words[1:], *SHORT.get(words[1], [])], standalone_mode=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch, capsys):
    runnable = [block for block in blocks(page) if block["language"] in ("bash", "python") and not block["reason"]]
    if not runnable:
        return
    save_tiny(tmp_path / "MODEL", "llama", dtype=torch.bfloat16, intermediate_size=128)
    for name in ("calibration.txt", "evaluation.txt"):
        (tmp_path / name).write_text(f"the words of {name}: a model reads them one by one, and says what may come next. " * 40, "utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in runnable:
        if block["language"] == "bash":
            run_shell(block["code"])
        else:
            exec(block["code"], names)


def test_no_block_is_left_out_silently():
    found = [(page, block) for page in PAGES for block in blocks(page)]
    assert {block["language"] for _, block in found} <= {"bash", "python", "text"}, (
        "``` needs a language: bash and python are run, text is not code"
    )
    skipped = [f"{page.name}: {block['reason']}" for page, block in found if block["reason"]]
    assert len(skipped) == NOT_RUN, skipped
    assert sum(block["language"] in ("bash", "python") and not block["reason"] for _, block in found) >= 18


def test_pictures_are_what_the_script_draws():
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    assert {path.stem for path in pictures.IMAGES.glob("*.svg")} == set(pictures.PICTURES)
    for name, draw in pictures.PICTURES.items():
        assert (pictures.IMAGES / f"{name}.svg").read_text("utf-8") == draw(), "run python docs/pictures.py"


def test_the_reference_has_every_command_option_and_public_name():
    spec = importlib.util.spec_from_file_location("command_line", DOCS / "command_line.py")
    command_line = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command_line)
    page = command_line.on_page_markdown((DOCS / "reference" / "command-line.md").read_text("utf-8"))
    from bakron.config import Recipe

    assert command_line.MARKER not in page and "## bakron bench solver" in page
    for name, field in Recipe.model_fields.items():
        assert f"`--{name.replace('_', '-')}`" in page and (field.description or "")[:20] in page.replace("\\|", "|")
    import bakron

    library = (DOCS / "reference" / "library.md").read_text("utf-8")
    elsewhere = {"ESTIMATORS", "FACTORS", "FORMATS", "METHODS", "Factor", "Recipe"}  # told about in the text
    assert not [name for name in bakron.__all__ if name not in elsewhere and f"::: bakron.{name}\n" not in library]


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    assert "bakron quantize" in (tmp_path / "site" / "reference" / "command-line.html").read_text("utf-8")
