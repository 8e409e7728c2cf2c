"""Initial weights from runs, files and Hugging Face folders; weights that do not fit are refused early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import manyhands as mh
from manyhands.core import CheckpointError, TaskError, read_events
from manyhands.storage import CheckpointStore

from ..grouped_options import fit_options
from .problems import classify, generator, mlp
from .test_fit import StopAt


class First(mh.Callback):
    """Writes the weights that a run begins with, and those of its average, to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_start(self, hand: mh.Hand) -> None:
        averages = {} if hand.averages is None else hand.averages.state_dict()
        torch.save(
            {"own": hand.model.state_dict(), "averages": averages, "step": hand.num_steps},
            self.path / f"rank-{hand.rank}.pt",
        )


def task(seed: int = 0, **changes: Any) -> mh.Task:
    return mh.Task(
        model=mlp,
        loss=classify,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
        data=(torch.randn(40, 12, generator=generator(seed)), torch.randint(0, 5, (40,), generator=generator(seed))),
        batch_size=10,
        seed=seed,
    ).replace(**changes)


def fit(made: mh.Task, folder: Path, on: str = "cpu", **settings: Any) -> mh.Run:
    return mh.fit(made, **fit_options(on=on, folder=folder, progress=False, timeout=60, **settings))


def notices(run: mh.Run) -> list[str]:
    return [entry["text"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "notice"]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("on", ["cpu", "cpu*2"])
def test_start_from_run_loads_weights_but_not_progress(on: str, tmp_path: Path) -> None:
    before = fit(task(0), tmp_path / "a", epochs=2)
    run = fit(task(1), tmp_path / "b", on, start_from=before, callbacks=[First(tmp_path)])
    for rank in range(len(run.record["devices"])):
        first = torch.load(tmp_path / f"rank-{rank}.pt")
        assert same(first["own"], before.state_dict())
        assert first["step"] == 0
    assert run.num_steps == 4  # neither the data cursor nor the optimizer state is loaded
    states = CheckpointStore(run.path / "checkpoints").load().optimizers[""]["state"]
    assert {int(slots["step"]) for slots in states.values()} == {4}
    assert run.record["start_from"] == str(before.path / "checkpoints")
    assert f"the run starts from {before.path / 'checkpoints'}" in notices(run)


def test_start_from_loads_averaged_weights(tmp_path: Path) -> None:
    before = fit(task(ema=0.9), tmp_path / "a")
    own, averaged = before.state_dict(averaged=False), before.state_dict()
    assert not same(own, averaged)
    fit(task(ema=0.9), tmp_path / "b", start_from=before, callbacks=[First(tmp_path)])
    first = torch.load(tmp_path / "rank-0.pt")
    assert same(first["own"], own)
    assert same(first["averages"], averaged)
    # A run without an average begins with what the other one ended with; one with it, from the weights there are.
    fit(task(), tmp_path / "b", start_from=before, callbacks=[First(tmp_path)])
    assert same(torch.load(tmp_path / "rank-0.pt")["own"], averaged)
    plain = fit(task(), tmp_path / "a")
    fit(task(ema=0.9), tmp_path / "b", start_from=plain.path, callbacks=[First(tmp_path)])
    assert same(torch.load(tmp_path / "rank-0.pt")["averages"], plain.state_dict())


def test_start_from_accepts_files_and_state_dicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    torch.save({f"module.{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "w.pt")
    monkeypatch.chdir(tmp_path)
    for source in ("w.pt", tmp_path / "w.pt", model.state_dict(), mh.storage.weights("w.pt")):
        run = fit(task(), tmp_path / "runs", "cpu*2", start_from=source, callbacks=[First(tmp_path)])
        assert same(torch.load(tmp_path / "rank-1.pt")["own"], dict(model.state_dict()))
        assert isinstance(source, dict) or any("without 'module.'" in text for text in notices(run))


@pytest.mark.parametrize(("strategy", "on"), [("single", "cpu"), ("mirrored", "cpu*2"), ("sharded", "cpu*2")])
def test_task_weights_are_loaded_on_start_and_not_needed_on_resume(strategy: str, on: str, tmp_path: Path) -> None:
    torch.manual_seed(9)
    model, path = mlp(), tmp_path / "w.safetensors"
    save_file(dict(model.state_dict()), path)
    made, settings = task(weights=path, ema=0.9), {"strategy": strategy, "name": "it", "callbacks": [StopAt(2)]}
    run = fit(made, tmp_path, on, **settings)
    brought = fit(task(ema=0.9), tmp_path, "cpu", start_from=path, callbacks=[StopAt(2)])
    assert run.losses == pytest.approx(brought.losses, rel=1e-5)
    path.unlink()
    assert fit(made, tmp_path, on, resume=True, **{**settings, "callbacks": []}).num_steps == 4
    with pytest.raises(CheckpointError, match="does not exist"):
        fit(made, tmp_path, on, strategy=strategy)


def test_resume_takes_precedence_over_start_from(tmp_path: Path) -> None:
    before = fit(task(0), tmp_path, name="before")
    fit(task(1), tmp_path, name="it", epochs=1, start_from=before)
    run = fit(task(1), tmp_path, name="it", epochs=2, start_from=before, resume=True, callbacks=[First(tmp_path)])
    assert torch.load(tmp_path / "rank-0.pt")["step"] == 4
    assert run.num_steps == 8


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (nn.Linear(12, 5).state_dict(), r"4 missing \(0.weight, .*2 unexpected \(weight, bias\)"),
        ({"0.weight": torch.ones(1)}, "3 missing .*1 of another shape"),
        (
            mlp(),
            r"start_from must be a run, a path of weights, or a state dict, but got Sequential. Pass its "
            r".state_dict",
        ),
        ("nowhere.safetensors", "nowhere.safetensors, which does not exist"),
        (3, "but got int"),
    ],
)
def test_mismatched_start_weights_are_rejected_before_the_run_starts(source: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        fit(task(), tmp_path, "cpu*2", start_from=source)
    assert list(tmp_path.iterdir()) == []


def test_start_weights_are_checked_for_models_not_buildable_on_meta(tmp_path: Path) -> None:
    def model() -> nn.Module:
        assert float(torch.ones(1)) == 1.0  # fails on the meta device
        return mlp()

    fit(task(model=model), tmp_path, start_from=mlp().state_dict())
    with pytest.raises(CheckpointError, match="4 missing"):
        fit(task(model=model), tmp_path, "cpu*2", name="it", start_from={"w": torch.ones(1)})
    assert not (tmp_path / "it").exists()


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 12)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("last.weight", lambda tensor: tensor + 1, "first.weight and last.weight are one tensor .* different"),
        ("first.bias", lambda tensor: tensor.to(torch.int8), "floating-point numbers, but got first.bias as int8"),
    ],
)
def test_inconsistent_tied_or_integer_start_weights_are_rejected(
    name: str, change: Any, message: str, tmp_path: Path
) -> None:
    made, tensors = task(model=Tied), {key: tensor + 1 for key, tensor in Tied().state_dict().items()}
    tensors["last.weight"] = tensors["first.weight"].clone()
    assert fit(made, tmp_path, start_from=tensors, name="good", steps=1).num_steps == 1
    tensors[name] = change(tensors[name])
    with pytest.raises(CheckpointError, match=message):
        fit(made, tmp_path, start_from=tensors, steps=1)


def test_start_from_does_not_disturb_seeded_random_numbers(tmp_path: Path) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    fit(task(), tmp_path, start_from=mlp_weights())
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), wanted)


def mlp_weights() -> dict[str, torch.Tensor]:
    return dict(mlp().state_dict())


class Wrapped(nn.Module):
    def __init__(self, num_inner: int = 1) -> None:
        super().__init__()
        self.inner = nn.ModuleList(hugging() for _ in range(num_inner))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner[0](input_ids).logits  # type: ignore[no-any-return]


def hugging() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=12, resid_pdrop=0.0))


def texts(model: Any, **changes: Any) -> mh.Task:
    return mh.Task(
        model=model,
        loss=lambda model, batch: model(**batch, labels=batch["input_ids"]).loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        data={"input_ids": torch.randint(0, 20, (8, 6), generator=generator(0))},
        batch_size=4,
    ).replace(**changes)


def test_save_pretrained_round_trips_through_hugging_face(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    run = fit(texts(hugging, ema=0.5), tmp_path / "runs")
    folder = run.save_pretrained(tmp_path / "gpt")
    again = GPT2LMHeadModel.from_pretrained(folder)
    assert same(dict(again.state_dict()), dict(run.model().state_dict()))
    raw = GPT2LMHeadModel.from_pretrained(run.save_pretrained(tmp_path / "raw", averaged=False))
    assert same(dict(raw.state_dict()), run.state_dict(averaged=False))
    fit(texts(hugging), tmp_path / "runs", start_from=folder, callbacks=[First(tmp_path)])
    assert same(torch.load(tmp_path / "rank-0.pt")["own"], dict(again.state_dict()))


def test_save_pretrained_finds_the_one_wrapped_hugging_face_model(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    def wrapped(num_inner: int) -> mh.Task:
        return texts(
            lambda: Wrapped(num_inner),
            loss=lambda model, batch: model(batch["input_ids"]).square().mean() + sum_of(model),
        )

    def sum_of(model: nn.Module) -> torch.Tensor:
        return 0 * sum(parameter.sum() for parameter in model.parameters())  # type: ignore[return-value]

    run = fit(wrapped(1), tmp_path / "runs")
    again = GPT2LMHeadModel.from_pretrained(run.save_pretrained(tmp_path / "gpt"))
    assert same(dict(again.state_dict()), dict(run.model().inner[0].state_dict()))  # type: ignore[index, union-attr]
    several = fit(wrapped(2), tmp_path / "runs")
    with pytest.raises(
        TaskError, match=r"one Hugging Face model in the network, but got Wrapped with inner.0, inner.1"
    ):
        several.save_pretrained(tmp_path / "no")
    with pytest.raises(TaskError, match="but got Sequential with none. Use run.export"):
        fit(task(), tmp_path / "runs").save_pretrained(tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_resume_logs_that_start_from_is_ignored(tmp_path: Path) -> None:
    before = fit(task(0), tmp_path / "a")
    fit(task(1), tmp_path, name="b", start_from=before)
    run = fit(task(1), tmp_path, name="b", start_from=before, epochs=2, resume=True)
    told = "start_from is ignored, because the run resumes from its checkpoint"
    assert notices(run).count(told) == 1
    assert run.num_steps == 8


def test_start_from_run_name_is_rejected_with_its_path(tmp_path: Path) -> None:
    fit(task(0), tmp_path, name="first")
    with pytest.raises(CheckpointError, match=f"got 'first', the name of a run. Pass '{tmp_path}/first'"):
        fit(task(1), tmp_path, start_from="first")
