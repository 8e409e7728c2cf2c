"""Settings: precedence of argument, file, environment and default; unknown ones are refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from manyhands.core import Resolved, SettingsError, resolve_settings


@dataclass(frozen=True, kw_only=True)
class Settings:
    strategy: str | None = None
    epochs: int = 1
    rate: float = 0.5
    resume: bool = False
    save_every: int | None = None


def resolve(text: str, tmp_path: Path, **environ: str) -> Resolved[Settings]:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return resolve_settings(Settings, {}, file=file, tables=["task"], environ=environ)


def test_setting_sources_follow_their_precedence(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('strategy = "single"\nepochs = 2\n')
    environ = {"MANYHANDS_EPOCHS": "5", "MANYHANDS_STRATEGY": "mirrored", "MANYHANDS_SAVE_EVERY": "7"}
    resolved = resolve_settings(Settings, {"epochs": 3, "strategy": None}, file=file, environ=environ)
    assert resolved.values == Settings(strategy="single", epochs=3, save_every=7)
    assert resolved.sources == {
        "strategy": "run.toml",
        "epochs": "argument",
        "rate": "default",
        "resume": "default",
        "save_every": "MANYHANDS_SAVE_EVERY",
    }
    assert resolved.chosen()["epochs"] == (3, "argument")
    assert "rate" not in resolved.chosen()


def test_argument_of_false_or_zero_overrides_other_sources(tmp_path: Path) -> None:
    resolved = resolve_settings(Settings, {"resume": False, "rate": 0.0}, environ={"MANYHANDS_RESUME": "yes"})
    assert resolved.values == Settings(resume=False, rate=0.0)
    assert resolved.sources["resume"] == "argument"


def test_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_EPOCHS", "4")
    assert resolve_settings(Settings, {}).values.epochs == 4


def test_empty_environment_variable_is_ignored() -> None:
    assert resolve_settings(Settings, {}, environ={"MANYHANDS_EPOCHS": ""}).sources["epochs"] == "default"


def test_file_accepts_dashes_in_names_and_integers_for_floats(tmp_path: Path) -> None:
    assert resolve("save-every = 3\nrate = 1\n", tmp_path).values == Settings(save_every=3, rate=1.0)


def test_toml_tables_are_returned_separately(tmp_path: Path) -> None:
    resolved = resolve("epochs = 2\n[task]\nlr = 0.1\n", tmp_path)
    assert resolved.tables == {"task": {"lr": 0.1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", r"may only set strategy, epochs, .*\[task\], but got 'epoch'"),
        ("[tasks]\nlr = 1", "but got 'tasks'"),
        ('epochs = "3"', r"epochs in .* must be of type int, but got '3' \(str\)"),
        ("epochs = true", "must be of type int"),
        ("resume = 1", "must be of type bool"),
        ("[epochs]\na = 1", "must be of type int"),
        ("epochs = = 3", "must be valid TOML"),
    ],
)
def test_invalid_settings_file_is_rejected(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve(text, tmp_path)


def test_missing_settings_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="must be readable"):
        resolve_settings(Settings, {}, file=tmp_path / "none.toml")


def test_invalid_environment_variable_is_named_in_the_error() -> None:
    with pytest.raises(SettingsError, match="MANYHANDS_EPOCHS must be of type int, but got 'many'"):
        resolve_settings(Settings, {}, environ={"MANYHANDS_EPOCHS": "many"})
