"""`bakron evaluate --tasks`: lm-evaluation-harness on a local task. The last tests run in an environment that has it (`make test-plugins`)."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from tiny import save_tiny

import bakron
from bakron import tasks

TASK = """
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["a", "b"]
doc_to_target: label
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture
def folder(tmp_path):
    where = tmp_path / "tasks"
    where.mkdir()
    lines = [json.dumps({"text": "abcabc"[: 2 + i % 4], "label": i % 2}) for i in range(12)]
    (where / "letters.jsonl").write_text("\n".join(lines), "utf-8")
    (where / "letters.yaml").write_text(TASK.format(file=where / "letters.jsonl"), "utf-8")
    return where


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    model = save_tiny(tmp_path / "model", "llama")
    with pytest.raises(bakron.BakronError, match=r"pip install lm-eval"):
        bakron.evaluate(model, tasks=["letters"])


@pytest.mark.parametrize("settings, message", [({"limit": 0, "tasks": ["a"]}, "limit 0"), ({"limit": 3}, "without tasks")])
def test_settings_that_cannot_be_meant(tmp_path, settings, message):
    model = save_tiny(tmp_path / "model", "llama")
    with pytest.raises(bakron.BakronError, match=message):
        bakron.evaluate(model, **settings)


def test_what_is_kept_of_the_results():
    values = {"alias": "x", "acc,none": 0.5, "acc_stderr,none": 0.1, "exact_match,strict": 1, "sample_len": 12}
    assert tasks._metrics(values) == {"acc": 0.5, "exact_match,strict": 1.0}


def test_a_local_task(tmp_path, folder, capsys):
    pytest.importorskip("lm_eval")
    from bakron import cli

    model, other = save_tiny(tmp_path / "model", "llama"), save_tiny(tmp_path / "other", "llama", seed=1)
    state = torch.get_rng_state()
    short = {"length": 32, "sequences": 2}
    found = bakron.evaluate(model, reference=other, tasks=["letters"], task_folder=folder, **short)
    assert torch.equal(state, torch.get_rng_state())
    assert found["tasks"].keys() == found["reference_tasks"].keys() == {"letters"}
    assert found["tasks"]["letters"]["acc"] in [i / 12 for i in range(13)]
    cli.app(
        [
            "evaluate",
            str(model),
            "--tasks",
            "let*",
            "--task-folder",
            str(folder),
            "--limit",
            "4",
            "--length",
            "32",
            "--sequences",
            "2",
            "-q",
        ],
        standalone_mode=False,
    )
    assert "letters acc " in capsys.readouterr().out


def test_tasks_that_do_not_exist(tmp_path, folder):
    pytest.importorskip("lm_eval")
    with pytest.raises(bakron.BakronError, match="task 'lettres'"):
        tasks.check(["letters", "lettres"], folder)
    with pytest.raises(bakron.BakronError, match="does not exist"):
        tasks.check(["letters"], folder / "none")
