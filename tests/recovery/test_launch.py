"""Custom training loops: when a rank fails, all ranks restart and resume from what they saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.core import NoProgress, WorkerFailed
from manyhands.launcher import write_token
from manyhands.testing import NamespaceHosts
from tests.recovery.test_local import Fault, kill
from tests.training.problems import problem

STEPS = 16


def train(hand: mh.Hand, folder: Path, kill_at: int = 0, times: int = 1) -> tuple[int, int, float]:
    """Learns, saves every fourth step, and loses a rank."""
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    model, _ = hand.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    data = torch.arange(64.0).view(32, 2) / 64, torch.ones(32, 1)
    hand.restore(folder)
    began = hand.num_steps
    while hand.num_steps < STEPS:
        for inputs, labels in hand.batches(data, batch_size=8):
            hand.backward((model(inputs) - labels).square().mean())
            hand.step()
            if hand.num_steps % 4 == 0:
                hand.save(folder)
                hand.checkpoints.store(folder).wait()
            if (hand.rank, hand.num_steps) == (1, kill_at) and hand.world.rank_info.generation < times:
                kill()
    return began, hand.world.rank_info.generation, float(hand.loss)


def test_launch_restarts_all_ranks_from_checkpoint_after_kill(
    engine: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    calm = mh.launch(lambda hand: train(hand, tmp_path / "calm"), mh.Mirrored(2), on="cpu*2")
    hit = mh.launch(lambda hand: train(hand, tmp_path / "hit", 7), mh.Mirrored(2), on="cpu*2")
    assert [(began, generation) for began, generation, _ in hit] == [(4, 1)] * 2
    assert hit[0][2] == pytest.approx(calm[0][2], rel=1e-5)
    said = capfd.readouterr().err
    assert f"rank 1 on {os.uname().nodename} was killed by signal 9" in said
    assert "all 2 ranks are restarted" in said


def test_launch_raises_no_progress_after_three_failed_restarts(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(NoProgress, match="rank 1 on .* was killed by signal 9") as caught:
        mh.launch(lambda hand: train(hand, tmp_path, 3, 99), mh.Mirrored(2), on="cpu*2")
    assert caught.value.exit_code == 70


def test_script_exception_fails_launch_without_restart(engine: Any, tmp_path: Path) -> None:
    def slip(hand: mh.Hand) -> None:
        with (tmp_path / f"begun-{hand.rank}").open("a") as file:
            file.write("x")
        train(hand, tmp_path)
        if hand.rank == 1:
            raise KeyError("typo")
        hand.barrier()

    with pytest.raises(WorkerFailed, match="rank 1 .*typo") as caught:
        mh.launch(slip, mh.Mirrored(2), on="cpu*2")
    assert not isinstance(caught.value, NoProgress)
    assert (tmp_path / "begun-1").read_text() == "x"


def test_fit_in_launched_script_resumes_its_run_after_kill(engine: Any, tmp_path: Path) -> None:
    def script(hand: mh.Hand) -> list[tuple[str, list[float]]]:
        runs = [
            mh.fit(
                problem("mlp"),
                epochs=4,
                folder=tmp_path,
                callbacks=[Fault(tmp_path, 1, 8, kill)],
                options=mh.options.Display(progress=False),
            )
            for _ in range(2)
        ]
        return [(run.path.name, run.losses) for run in runs]

    (first, losses), (second, again) = mh.launch(script, mh.Mirrored(2), on="cpu*2")[0]
    assert {path.parent.name for path in tmp_path.glob("*/run.json")} == {first, second}
    calm = mh.fit(
        problem("mlp"),
        mh.Single(),
        on="cpu",
        epochs=4,
        folder=tmp_path / "calm",
        options=mh.options.Display(progress=False),
    )
    for found in (losses, again):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(calm.losses), rtol=1e-5, atol=1e-7)


SCRIPT = """
import os, signal, manyhands as mh
hand = mh.hand()
print("generation", hand.world.rank_info.generation, "rank", hand.rank, "of", hand.size, "on", os.uname().nodename)
hand.barrier()
if hand.rank == hand.size - 1 and hand.world.rank_info.generation == 0:
    os.kill(os.getpid(), signal.SIGKILL)
hand.barrier()
print("total", int(hand.sum(hand.rank + 1)))
"""


@pytest.mark.root
def test_launch_restarts_ranks_on_two_hosts_with_two_devices_each(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    write_token(tmp_path / "token")
    command = [
        sys.executable, "-m", "manyhands", "launch", "script.py", "--hosts", "2", "--join", "host1:7777",
        "--token-file", "token", "--on", "cpu*2",
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(mh.__file__).parents[1])}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with NamespaceHosts(2) as hosts:
        programs = [host.popen(command, env=env, cwd=tmp_path, **options) for host in hosts]
        said = [program.communicate(timeout=120) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], said
    out, err = said[0]
    assert "rank 3 on host2 was killed by signal 9" in err
    for rank, host in enumerate(("host1", "host1", "host2", "host2")):
        assert f"[rank {rank}] generation 1 rank {rank} of 4 on {host}" in out
        assert f"[rank {rank}] total 10" in out
