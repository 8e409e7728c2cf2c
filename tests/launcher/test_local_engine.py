"""The local engine: forked ranks, their arguments and results, their end, and leaked resources."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from manyhands.core import DeviceError, Event, SendError, WorkerFailed, event
from manyhands.distributed import World, resolve
from manyhands.launcher import LocalEngine, stall_watch

Ranks = Callable[[Callable[[World], Any], int], list[Any]]


def quiet(*_: Any) -> None:
    """Hears an event or a line and does nothing."""


def test_closures_arrays_and_tensors_are_sent_to_ranks(run_ranks: Ranks) -> None:
    array, tensor = np.arange(100_000, dtype=np.int16), torch.linspace(0, 1, 50_000, dtype=torch.bfloat16)
    small = {"a": torch.tensor(3), "b": [np.float32(2)]}

    def look(world: World) -> tuple[Any, ...]:
        array[0] = world.rank  # private: other processes do not see it
        return int(array.sum()), tensor.clone(), small["a"].item()

    base = int(array.sum())
    for rank, (total, copy, three) in enumerate(run_ranks(look, 2)):
        assert (total, three) == (base + rank, 3)
        assert copy.dtype == torch.bfloat16
        assert torch.equal(copy, tensor)
    assert array[0] == 0


def test_functions_that_refer_to_torch_ops_are_sent_to_ranks(run_ranks: Ranks) -> None:
    kept = [torch.ops.aten.mm.default, torch.ops.aten.mm, torch.ops.aten]

    def work(world: World) -> bool:
        return kept[0] is torch.ops.aten.mm.default and kept[1] is torch.ops.aten.mm and kept[2] is torch.ops.aten

    assert run_ranks(work, 2) == [True, True]


def test_large_tensors_are_shared_by_ranks_without_copies(run_ranks: Ranks) -> None:
    big = torch.zeros(50_000_000)

    def private_megabytes(world: World) -> float:
        touched = float(big.sum())
        return psutil.Process().memory_full_info().uss / 1e6 + touched

    assert max(run_ranks(private_megabytes, 3)) < 180, "each rank holds its own 200 MB"


def test_large_results_are_returned_in_rank_order(run_ranks: Ranks) -> None:
    results = run_ranks(lambda world: torch.full((300_000,), world.rank), 3)
    assert [(len(r), r[0].item(), r[-1].item()) for r in results] == [(300_000, i, i) for i in range(3)]


def test_cores_and_threads_are_divided_among_ranks(run_ranks: Ranks) -> None:
    cores = len(os.sched_getaffinity(0))
    seen = run_ranks(lambda world: (torch.get_num_threads(), sorted(os.sched_getaffinity(0))), 2)
    assert [threads for threads, _ in seen] == [max(1, cores // 2)] * 2
    if cores >= 2:
        assert not set(seen[0][1]) & set(seen[1][1])


def test_output_is_forwarded_line_by_line_with_its_rank(engine: LocalEngine) -> None:
    def talk(world: World) -> None:
        print(f"hello {world.rank}\nwithout end", end="")
        print("trouble", file=sys.stderr)

    heard: list[tuple[int, str, str]] = []
    engine.start(talk, resolve("cpu*2")[0]).wait(quiet, lambda *line: heard.append(line))
    said = [("hello {}", "stdout"), ("trouble", "stderr"), ("without end", "stdout")]
    assert sorted(heard) == [(rank, text.format(rank), stream) for rank in range(2) for text, stream in said]


def test_first_failure_is_reported_instead_of_secondary_failures(engine: LocalEngine) -> None:
    def fail(world: World) -> None:
        if world.rank == 1:
            raise KeyError("the real reason")
        world.barrier()

    with pytest.raises(WorkerFailed, match="rank 1 .*the real reason") as caught:
        engine.start(fail, resolve("cpu*3")[0]).wait(quiet, quiet)
    assert "test_local_engine.py" in caught.value.traceback
    assert "raise KeyError" in caught.value.traceback
    assert "manyhands/launcher" not in caught.value.traceback


def test_library_errors_are_raised_with_their_original_type(engine: LocalEngine) -> None:
    def refuse(world: World) -> None:
        raise DeviceError("a rule", got=world.rank, remedy="a remedy")

    with pytest.raises(DeviceError, match="a rule, but got .. A remedy") as caught:
        engine.start(refuse, resolve("cpu*2")[0]).wait(quiet, quiet)
    assert caught.value.remedy == "a remedy"


def test_unpicklable_captured_variable_is_named_before_start(engine: LocalEngine) -> None:
    lock = threading.Lock()
    settings = {"deep": [lock]}
    with pytest.raises(SendError, match=r"captured variable 'settings' → \['deep'\] → \[0\], of type lock"):
        engine.start(lambda world: settings, resolve("cpu*2")[0])


def test_unpicklable_result_is_named(engine: LocalEngine) -> None:
    with pytest.raises(SendError, match="the result, of type lock"):
        engine.start(lambda world: threading.Lock(), resolve("cpu*2")[0]).wait(quiet, quiet)


def test_rank_that_exits_early_is_a_failure(engine: LocalEngine) -> None:
    with pytest.raises(WorkerFailed, match="exit code 3 before it was done|SystemExit"):
        engine.start(lambda world: os._exit(3), resolve("cpu*2")[0]).wait(quiet, quiet)


def test_orphaned_child_output_does_not_block_wait_or_kill_the_zygote(engine: LocalEngine, tmp_path: Path) -> None:
    def leave(world: World) -> None:
        pid = os.fork()
        if pid == 0:
            while True:
                os.write(1, b"still here\n")
                time.sleep(0.05)
        (tmp_path / "pid").write_text(str(pid))

    zygote = engine.warm_up()._process
    try:
        engine.start(leave, resolve("cpu")[0]).wait(quiet, quiet)
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert engine.warm_up()._process is zygote


def test_rank_that_does_not_exit_after_a_failure_is_killed(engine: LocalEngine) -> None:
    def stubborn(world: World) -> None:
        if world.rank == 0:
            raise RuntimeError("over")
        time.sleep(600)

    with pytest.raises(WorkerFailed, match="over"):
        engine.start(stubborn, resolve("cpu*2")[0], timeout=5).wait(quiet, quiet)


def test_rank_killed_before_fork_is_terminated(engine: LocalEngine) -> None:
    job = engine.start(lambda world: time.sleep(20), resolve("cpu")[0])
    # Its process id is not known yet.
    job.kill()
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        job.wait(quiet, quiet)


def test_stop_reaches_every_rank(engine: LocalEngine) -> None:
    def until_stopped(world: World) -> bool:
        world.channel.report({"kind": "ready"})
        while not world.channel.stopping:
            time.sleep(0.01)
        return True

    job = engine.start(until_stopped, resolve("cpu*2")[0])
    ready: set[int] = set()

    def heard(rank: int, entry: dict[str, Any]) -> None:
        ready.add(rank)
        if len(ready) == 2:
            job.stop()

    assert job.wait(heard, quiet) == [True, True]


def _standing(world: World) -> None:
    """Both listen, and each waits for what the other never sends."""
    world.channel.report({"kind": "listens", "is": not world.channel.stopping})
    world.start_receive(torch.empty(1), 1 - world.rank, 0).wait()


def _deaf(world: World) -> None:
    world.channel.report({"kind": "ready"})
    time.sleep(100)


def _slow(world: World) -> bool:
    """Takes its time for a step, after which it looks."""
    world.channel.report({"kind": "listens", "is": not world.channel.stopping})
    time.sleep(3 * HEED)
    while not world.channel.stopping:
        time.sleep(0.01)
    return True


HEED = 0.5


def test_script_that_ignores_stop_is_terminated(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_watch, "STOP_RESPONSE_SECONDS", HEED)

    def stopped(fn: Callable[[World], Any]) -> list[Any]:
        job = engine.start(fn, resolve("cpu*2")[0], after_loss="restart", timeout=60)
        return job.wait(lambda rank, entry: job.stop() if rank == 0 else None, quiet)

    for fn in (_standing, _deaf):
        with pytest.raises(KeyboardInterrupt):
            stopped(fn)
    assert stopped(_slow) == [True, True]


def test_collective_waiting_for_exited_ranks_fails_with_the_reason(engine: LocalEngine) -> None:
    begun: list[int] = []

    def work(world: World) -> None:
        world.channel.report({"kind": "begun"})
        world.barrier()
        if world.rank == 0:
            world.all_reduce(torch.ones(1))

    job = engine.start(work, resolve("cpu*2")[0], after_loss="restart", timeout=20)
    with pytest.raises(WorkerFailed, match="rank 0 on .* waits for ranks that have ended: PeerLost: all_reduce at .*"):
        job.wait(lambda rank, entry: begun.append(rank) if entry["kind"] == "begun" else None, quiet)
    assert sorted(begun) == [0, 1], "it was restarted"


def test_concurrent_jobs_are_isolated(engine: LocalEngine) -> None:
    def work(world: World, number: int) -> tuple[int, float]:
        total = torch.tensor([float(number)])
        for _ in range(20):
            world.all_reduce(total, "max")
            time.sleep(0.005)
        if number == 2 and world.rank == 1:
            raise RuntimeError("only this job fails")
        return number, total.item()

    outcomes: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            outcomes[number] = engine.start(partial(work, number=number), resolve("cpu*2")[0]).wait(quiet, quiet)
        except WorkerFailed as failed:
            outcomes[number] = failed

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "only this job fails" in str(outcomes.pop(2))
    assert outcomes == {number: [(number, float(number))] * 2 for number in (0, 1, 3)}


def test_ranks_exit_when_their_program_is_killed(tmp_path: Any) -> None:
    """A program that is killed leaves no rank and no zygote behind."""
    script = tmp_path / "program.py"
    script.write_text(
        "import time\nimport manyhands as mh\n"
        "def work(hand):\n    print('pid', __import__('os').getpid(), flush=True)\n    time.sleep(600)\n"
        "mh.launch(work, mh.Mirrored(2), on='cpu*2', progress=None)\n"
    )
    program = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    pids: list[int] = []
    while len(pids) < 2:
        line = program.stdout.readline()
        assert line, "the program ended early"
        if " pid " in line:
            pids.append(int(line.split()[-1]))
    family = [psutil.Process(pid) for pid in pids] + psutil.Process(program.pid).children()
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_ranks_inherit_environment_and_working_directory(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("MANYHANDS_TEST_VALUE", "seen")
    monkeypatch.chdir(tmp_path)
    job = engine.start(lambda world: (os.environ["MANYHANDS_TEST_VALUE"], os.getcwd()), resolve("cpu*2")[0])
    assert job.wait(quiet, quiet) == [("seen", str(tmp_path))] * 2
    monkeypatch.undo()


def test_listeners_are_on_loopback_only(run_ranks: Ranks) -> None:
    def listening(world: World) -> list[str]:
        world.barrier()
        return [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]

    addresses = {address for rank in run_ranks(listening, 2) for address in rank}
    assert addresses == {"127.0.0.1"}


def test_replaced_ranks_leak_no_file_descriptors(engine: LocalEngine) -> None:
    def die_a_few_times(world: World) -> int:
        if world.rank == 1 and world.rank_info.generation < 4:
            world.channel.report(event("step", step=world.rank_info.generation + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return world.rank_info.generation

    open_at: list[int] = []

    def look(rank: int, entry: Event) -> None:
        if entry["kind"] == "lost":
            open_at.append(len(os.listdir("/proc/self/fd")))

    job = engine.start(die_a_few_times, resolve("cpu*2")[0], after_loss="restart")
    assert job.wait(look, quiet) == [4, 4]
    assert len(open_at) >= 4
    # Each of two ranks has four, which may not have been heard of to the end; kept ones would be 24.
    assert open_at[-1] - open_at[0] <= 8, open_at


def test_large_output_at_exit_is_not_a_failure(engine: LocalEngine) -> None:
    def talk(world: World) -> int:
        print("\n".join(f"line {i}" for i in range(3000)))
        return world.rank

    for _ in range(5):
        heard: list[tuple[int, str, str]] = []
        job = engine.start(talk, resolve("cpu*2")[0])
        assert job.wait(quiet, lambda *line, into=heard: into.append(line)) == [0, 1]
        assert len(heard) == 6000


def test_result_that_resembles_a_failure_message_is_returned(run_ranks: Ranks) -> None:
    looks = {"error": None, "reason": "", "traceback": "", "echo": False}
    assert run_ranks(lambda world: looks, 2) == [looks] * 2


def test_starting_ranks_during_module_import_raises(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from manyhands.distributed import resolve\n"
        "from manyhands.launcher import LocalEngine\n"
        "def work(world): return world.rank\n"
        "LocalEngine().start(work, resolve('cpu*2')[0]).wait(print, print)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", "import mine"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert "must not start ranks while it is imported" in ended.stderr
    assert f"{tmp_path / 'mine.py'}, line 4" in ended.stderr
    assert 'under if __name__ == "__main__":' in ended.stderr


def test_file_named_like_a_stdlib_module_is_not_imported(tmp_path: Any) -> None:
    (tmp_path / "calendar.py").write_text("raise RuntimeError('imported by mistake')\n")
    program = "import manyhands as mh; print(mh.launch(lambda hand: hand.rank, 'dp=2', on='cpu*2', progress=False))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[0, 1]", done.stderr


def test_ctrl_c_ends_a_job_with_a_frozen_zygote(tmp_path: Path) -> None:
    own = LocalEngine()

    def work(world: World) -> None:
        (tmp_path / str(world.rank)).touch()
        time.sleep(600)

    job = own.start(work, resolve("cpu*2")[0])
    zygote = own.warm_up()._process

    def freeze_and_interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        zygote.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=freeze_and_interrupt, daemon=True)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            job.wait(quiet, quiet)
        thread.join()
    finally:
        own.close()
    assert zygote.poll() is not None


def test_ranks_and_services_survive_the_death_of_the_zygote(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = LocalEngine()
    try:
        before = own.warm_up()._process
        gate = tmp_path / "open"

        def work(world: World) -> tuple[int, int]:
            (tmp_path / str(world.rank)).touch()
            while not gate.exists():
                time.sleep(0.01)
            world.barrier()
            return world.rank, os.getpid()

        job = own.start(work, resolve("cpu*2")[0])
        with own.start_service(Counting, resolve("cpu")[0][0]) as service:
            first = service.call("add").result(60)
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.01)
            before.kill()
            before.wait()
            assert service.call("add").result(60) == (2, first[1])
            gate.touch()
            assert [rank for rank, _ in job.wait(quiet, quiet)] == [0, 1]
            # Later processes come from another zygote, and an orphan that is killed is noticed.
            assert own.start(lambda world: world.rank, resolve("cpu")[0]).wait(quiet, quiet) == [0]
            os.kill(first[1], signal.SIGKILL)
            with pytest.raises(WorkerFailed, match="its exit code is unknown"):
                service.ended.result(30)
        assert "killed by signal 9) and is replaced; ranks continue" in capfd.readouterr().err
        after = own.warm_up()._process
        assert after is not before
    finally:
        own.close()


def test_zygote_whose_exit_is_not_noticed_yet_is_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    """Its connections close first, and that is what a job notices."""
    own = LocalEngine()
    try:
        zygote = own.warm_up()
        before = zygote._process
        before.kill()
        zygote.revive(is_dying=True)
        assert zygote._process is not before
        assert "killed by signal 9) and is replaced; ranks continue" in capfd.readouterr().err
    finally:
        own.close()


def test_native_stack_traces_of_connections_go_to_the_event_log_only(engine: LocalEngine) -> None:
    head = "[W1118 socket.cpp:464] the peer has closed the connection"
    raised = "Exception raised from recvBytes at /pytorch/Utils.hpp:675 (most recent call first):"
    frames = [raised, *(f"frame #{number}: c10d::TCPStore::wait() + 0x1 (0x7f in lib.so)" for number in range(30))]
    own = ["terminate called", "frame #0: mine::work() + 0x1 (0x7f in mine.so)", "frame #1: main + 0x1 (0x7f in mine)"]

    def work(world: World) -> None:
        print("\n".join([head, *frames, "", *own]), file=sys.stderr)

    shown: list[str] = []
    events: list[Event] = []
    engine.start(work, resolve("cpu")[0]).wait(
        lambda rank, entry: events.append(entry), lambda rank, text, stream: shown.append(text)
    )
    assert shown == [head, "", *own]
    assert [entry["text"] for entry in events if entry["kind"] == "native_trace"] == ["\n".join([head, *frames])]


class Counting:
    def __init__(self, world: World) -> None:
        self.num = 0

    def add(self) -> tuple[int, int]:
        self.num += 1
        return self.num, os.getpid()


def test_orphaned_rank_exits_when_its_program_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, time\nfrom manyhands.launcher import LocalEngine\nfrom manyhands.distributed import resolve\n"
        "engine = LocalEngine()\n"
        "def work(world):\n    print(os.getpid(), flush=True)\n    time.sleep(600)\n"
        "job = engine.start(work, resolve('cpu')[0])\n"
        "job.wait(lambda rank, entry: None, lambda rank, text, stream: print(text, flush=True))\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        rank = psutil.Process(int(program.stdout.readline()))
        zygote = rank.parent()
        assert zygote is not None
        zygote.kill()
        psutil.wait_procs([zygote], timeout=10)
        time.sleep(0.2)
        assert rank.is_running()
        others = psutil.Process(program.pid).children()
        program.kill()
    _, alive = psutil.wait_procs([rank, *others], timeout=30)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
