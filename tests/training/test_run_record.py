"""The record of a run: labels, defaults of parameters, and the environment without secrets."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.api import recording
from manyhands.api.environment import git_commit, without_secrets
from manyhands.monitoring import HostUsage


def small(lr: float = 0.1, width: int = 8) -> mh.Task:
    return mh.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        data=(torch.ones(8, 4), torch.ones(8, 1)),
        batch_size=4,
    )


def test_record_has_labels_defaults_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fit.py", "--api-key", "hidden", "lr=0.5"])
    monkeypatch.setattr(recording, "HostUsage", functools.partial(HostUsage, interval=0.0))
    options = [mh.options.Display(progress=False), mh.options.Logging(tags="a, b", notes="a note")]
    run = mh.fit(functools.partial(small, lr=0.5), on="cpu", folder=tmp_path, name="first", options=options)
    record = json.loads((run.path / "run.json").read_text())
    assert record["defaults"] == {"lr": 0.5, "width": 8}
    assert (record["tags"], record["notes"]) == (["a", "b"], "a note")
    assert record["environment"]["command"] == "fit.py --api-key '***' lr=0.5"
    assert "hidden" not in json.dumps(record)
    kinds = [json.loads(line)["kind"] for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert "usage" in kinds


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--password=x", "PASSWORD=x"], ["--password=***", "PASSWORD=***"]),
        (["--hf-token", "x", "--lr", "0.1"], ["--hf-token", "***", "--lr", "0.1"]),
        (["--wandb", "0123456789abcdef0123456789abcdef01234567"], ["--wandb", "***"]),
        (["hf_abcdefghijkl", "x=sk-abcdefgh1234"], ["***", "x=***"]),
        (["https://user:pw@host/a"], ["https://***@host/a"]),
        (["--tokenizer", "gpt2", "--author", "me", "--keep=3"], ["--tokenizer", "gpt2", "--author", "me", "--keep=3"]),
        (["--use-key", "--next", "value"], ["--use-key", "--next", "value"]),
        (["data/train.parquet", "examples/digits.py"], ["data/train.parquet", "examples/digits.py"]),
    ],
)
def test_secrets_in_a_command_line_are_hidden(words: list[str], shown: list[str]) -> None:
    assert list(without_secrets(words)) == shown


def test_commit_is_read_from_the_files_of_git(tmp_path: Path) -> None:
    def git(*words: str, cwd: Path = tmp_path) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        done = subprocess.run(["git", *who, *words], cwd=cwd, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert git_commit(tmp_path) == {}
    git("init")
    (tmp_path / "sub").mkdir()
    assert git_commit(tmp_path) == {"branch": "main"}
    git("commit", "--allow-empty", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert git_commit(tmp_path / "sub") == {"commit": commit, "branch": "main"}
    git("pack-refs", "--all")
    assert git_commit(tmp_path) == {"commit": commit, "branch": "main"}
    git("worktree", "add", "-b", "other", str(tmp_path / "tree"))
    assert git_commit(tmp_path / "tree") == {"commit": commit, "branch": "other"}
    git("checkout", "--detach")
    assert git_commit(tmp_path) == {"commit": commit}
    (tmp_path / ".git" / "HEAD").write_text("ref: ../../../etc/passwd")
    assert "commit" not in git_commit(tmp_path)
