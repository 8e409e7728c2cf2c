"""`mh.doctor`: every check with good and bad facts, and on this machine."""

from __future__ import annotations

import resource
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manyhands.diagnostics import CHECKS, Finding, disk, doctor, gpu, machine, network, nvidia, software
from manyhands.diagnostics.nvidia import Gpu, NvidiaDriver
from manyhands.distributed import Device
from manyhands.launcher import LocalEngine
from manyhands.launcher.leases import Holder

GIB = 2**30
FINE = Gpu(index=0, model="H200", used=GIB, total=140 * GIB)
UNLIMITED = resource.RLIM_INFINITY


def driver(**changes: Any) -> NvidiaDriver:
    return NvidiaDriver(version="570.86", cuda=(12, 8), gpus=(Gpu(**{**vars(FINE), **changes}),))


CASES: list[tuple[str, Callable[..., Finding], dict[str, Any], str, str]] = [
    # what is put in, the verdict, and a part of what is found or of the remedy
    ("Linux", software.system, {"platform": "linux"}, "ok", "Linux"),
    ("another system", software.system, {"platform": "darwin"}, "slow", "WSL"),
    ("Python", software.python, {"version": (3, 12, 1), "wanted": ">=3.11"}, "ok", "3.12.1"),
    ("an old Python", software.python, {"version": (3, 9, 1), "wanted": ">=3.11"}, "broken", "new environment"),
    ("torch", software.torch_version, {"version": "2.13.0+cu130", "wanted": ">=2.11,<2.16"}, "ok", "2.13.0+cu130"),
    ("an old torch", software.torch_version, {"version": "2.4.1", "wanted": ">=2.11,<2.16"}, "broken", "pip install"),
    ("a new torch", software.torch_version, {"version": "2.16.0", "wanted": ">=2.11,<2.16"}, "broken", "<2.16"),
    ("a compiler", software.compiler, {"found": "/usr/bin/g++", "has_headers": True}, "ok", "g++"),
    ("no compiler", software.compiler, {"found": "", "has_headers": True}, "slow", "apt install g++"),
    ("no headers", software.compiler, {"found": "/usr/bin/g++", "has_headers": False}, "slow", "python3-dev"),
    ("extras", software.extras, {"installed": frozenset({"wandb"})}, "ok", "[tune,serve,parameter-server,keras,tensor"),
    ("a driver", gpu.driver, {"found": driver(), "num_on_bus": 1, "cuda": "12.9"}, "ok", "up to 12.8"),
    ("an old driver", gpu.driver, {"found": driver(), "num_on_bus": 1, "cuda": "13.0"}, "broken", "update the driver"),
    ("torch sees GPUs", gpu.torch_build, {"num_gpus": 1, "cuda": "13.0", "is_available": True}, "ok", "uses CUDA"),
    ("no GPU", gpu.torch_build, {"num_gpus": 0, "cuda": None, "is_available": False}, "ok", "no NVIDIA GPU"),
    ("a CPU wheel", gpu.torch_build, {"num_gpus": 2, "is_available": False}, "broken", "install torch with CUDA"),
    ("blind torch", gpu.torch_build, {"num_gpus": 2, "cuda": "13.0", "is_available": False}, "broken", "sees none"),
    ("a known GPU", gpu.gpu_architecture, {"found": [Device("cuda", 0, model="H200")]}, "ok", "cuda:0 H200"),
    ("a strange GPU", gpu.gpu_architecture, {"found": [Device("cuda", 0, remedy="newer")]}, "broken", "newer"),
    ("shared GPU", gpu.gpu_mode, {"found": driver()}, "ok", "shared"),
    ("exclusive GPU", gpu.gpu_mode, {"found": driver(mode="Exclusive_Process")}, "slow", "nvidia-smi -i 0 -c DEFAULT"),
    ("prohibited GPU", gpu.gpu_mode, {"found": driver(mode="Prohibited")}, "broken", "cuda:0 Prohibited"),
    ("free GPU", gpu.gpu_memory, {"found": driver()}, "ok", "free"),
    ("taken GPU", gpu.gpu_memory, {"found": driver(used=70 * GIB, holders=("7 (python)",))}, "slow", "by 7 (python)"),
    ("no lease", gpu.leased_devices, {"found": {}}, "ok", "no device is held"),
    ("a lease", gpu.leased_devices, {"found": {"cuda:0": Holder(7, "a.py", "b")}}, "slow", "by process 7"),
    ("cool GPU", gpu.gpu_clocks, {"found": driver()}, "ok", "nothing"),
    ("hot GPU", gpu.gpu_clocks, {"found": driver(slowdowns=("too hot",))}, "slow", "cuda:0 too hot"),
    ("sleepy GPU", gpu.gpu_clocks, {"found": driver(is_persistent=False)}, "slow", "nvidia-smi -pm 1"),
    ("shared memory", machine.shared_memory, {"total": 8 * GIB, "free": 8 * GIB}, "ok", "8.0 GiB free"),
    ("a container's", machine.shared_memory, {"total": 64 * 2**20, "free": 64 * 2**20}, "broken", "--shm-size=8g"),
    ("a nearly full one", machine.shared_memory, {"total": 8 * GIB, "free": GIB // 2}, "slow", "512.0 MiB free"),
    ("files", machine.open_files, {"limit": 65536}, "ok", "65536"),
    ("few files", machine.open_files, {"limit": 1024}, "slow", "ulimit -n"),
    ("hardly any files", machine.open_files, {"limit": 256}, "broken", "at most 256"),
    ("processes", machine.processes, {"limit": UNLIMITED}, "ok", "unlimited"),
    ("a container's processes", machine.processes, {"limit": UNLIMITED, "group": 100}, "broken", "--pids-limit"),
    ("few processes", machine.processes, {"limit": 1000, "group": 5000}, "slow", "at most 1000"),
    ("locked memory", machine.locked_memory, {"limit": 65536, "has_infiniband": False}, "ok", "does not matter"),
    ("no locked memory", machine.locked_memory, {"limit": 65536, "has_infiniband": True}, "slow", "ulimit -l"),
    ("enough of it", machine.locked_memory, {"limit": UNLIMITED, "has_infiniband": True}, "ok", "unlimited"),
    ("threads by torch", machine.threads, {"setting": "", "cores": 8}, "ok", "torch chooses"),
    ("a thread per core", machine.threads, {"setting": "8", "cores": 8}, "ok", "OMP_NUM_THREADS=8"),
    ("too many threads", machine.threads, {"setting": "64", "cores": 8}, "slow", "compete"),
    ("too few threads", machine.threads, {"setting": "1", "cores": 8}, "slow", "idle"),
    ("a quota", machine.cpu_quota, {"quota": 2.5, "cores": 16}, "slow", "OMP_NUM_THREADS=2"),
    ("a wide quota", machine.cpu_quota, {"quota": 16.0, "cores": 16}, "ok", "none below"),
    ("one node", machine.numa, {"nodes": 1, "touched": 1}, "ok", "1 of 1"),
    ("two nodes", machine.numa, {"nodes": 2, "touched": 2}, "slow", "cpu*2"),
    ("one of two nodes", machine.numa, {"nodes": 2, "touched": 1}, "ok", "1 of 2"),
    ("memory", machine.memory, {"available": 8 * GIB, "total": 16 * GIB, "swapped": 0}, "ok", "8.0 GiB"),
    ("no memory", machine.memory, {"available": GIB // 4, "total": 16 * GIB, "swapped": 0}, "broken", "256.0 MiB"),
    ("swapping", machine.memory, {"available": 2 * GIB, "total": 16 * GIB, "swapped": 4 * GIB}, "slow", "from disk"),
    ("a clock", machine.clock, {"source": "tsc", "is_set": True, "jump": 0.0}, "ok", "tsc, synchronized"),
    ("a slow clock", machine.clock, {"source": "hpet", "is_set": True, "jump": 0.0}, "slow", "clocksource=tsc"),
    ("a jumping clock", machine.clock, {"source": "tsc", "is_set": True, "jump": -3.0}, "slow", "-3.000 s"),
    ("a free clock", machine.clock, {"source": "tsc", "is_set": False, "jump": 0.0}, "slow", "set-ntp"),
    ("loopback", network.loopback, {}, "ok", "reached in"),
    ("no such address", network.loopback, {"address": "203.0.113.7"}, "broken", "ip link set lo up"),
    ("a name", network.host_name, {"name": "a", "resolved": "10.0.0.1", "ours": frozenset({"10.0.0.1"})}, "ok", "10."),
    ("unresolved name", network.host_name, {"name": "a", "resolved": "", "ours": frozenset()}, "slow", "/etc/hosts"),
    ("another's name", network.host_name, {"name": "a", "resolved": "10.0.0.1", "ours": frozenset()}, "slow", "not t"),
    ("a quick sum", network.all_reduce, {"seconds": 1e-4}, "ok", "100 µs"),
    ("a slow sum", network.all_reduce, {"seconds": 1e-2}, "slow", "10000 µs"),
    ("a disk", disk.run_folder, {"folder": "/tmp", "free": 100 * GIB, "speed": 1e9}, "ok", "953.7 MiB/s"),
    ("a full disk", disk.run_folder, {"folder": "/tmp", "free": GIB // 8, "speed": 1e9}, "broken", "128.0 MiB free"),
    ("a small disk", disk.run_folder, {"folder": "/tmp", "free": GIB, "speed": 1e9}, "slow", "keep="),
    ("a slow disk", disk.run_folder, {"folder": "/tmp", "free": 100 * GIB, "speed": 1e6}, "slow", "local disk"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "facts", "verdict", "part"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_check_returns_the_expected_verdict(
    check: Callable[..., Finding], facts: dict[str, Any], verdict: str, part: str
) -> None:
    finding = check(**facts)
    assert finding.verdict == verdict
    assert part in f"{finding.found} {finding.why} {finding.remedy}"
    assert bool(finding.why and finding.remedy) == (verdict != "ok")


def test_every_check_is_tested_for_ok_and_failure() -> None:
    tried: dict[Any, set[str]] = {}
    for _, check, _, verdict, _ in CASES:
        tried.setdefault(check, set()).add(verdict)
    one_state = {check for check, verdicts in tried.items() if verdicts == {"ok"}}
    assert set(CHECKS) <= set(tried)
    assert one_state == {software.extras}
    assert all("ok" in verdicts for verdicts in tried.values())


def test_gpu_without_a_driver_is_reported_as_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "read_driver", lambda: None)
    for name, kind in (("a", "0x030200"), ("b", "0x0c0330")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text("0x10de\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert nvidia.count_on_bus(tmp_path) == 1
    finding = gpu.driver(num_on_bus=1)
    assert (finding.verdict, "--gpus all" in finding.remedy) == ("broken", True)
    assert gpu.driver(num_on_bus=0).verdict == "ok"


def test_hidden_gpus_are_not_blamed_on_the_torch_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    finding = gpu.torch_build(num_gpus=1, cuda="13.0", is_available=False)
    assert (finding.verdict, finding.remedy) == ("slow", "unset CUDA_VISIBLE_DEVICES")


SMI = """#!/bin/sh
case "$1" in
  --query-gpu=uuid*) echo GPU-aaaa; echo GPU-bbbb ;;
  --query-gpu=*)
    echo "0, NVIDIA H200, Default, Enabled, 4, 143771, 0x0000000000000001, 570.86.15"
    echo "1, NVIDIA H200, Exclusive_Process, Disabled, 70000, 143771, 0x0000000000000048, 570.86.15" ;;
  --query-compute-apps=*) echo "GPU-bbbb, 1" ;;
  *) echo "| NVIDIA-SMI 570.86.15   Driver Version: 570.86.15   CUDA Version: 12.8  |" ;;
esac
"""


def test_nvidia_smi_is_the_fallback_without_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program prints on a machine with two H200, from a program of that name."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = nvidia._from_smi()
    assert (found.version, found.cuda) == ("570.86.15", (12, 8))
    assert found.gpus[0] == Gpu(index=0, model="NVIDIA H200", used=4 * 2**20, total=143771 * 2**20)
    assert found.gpus[1].slowdowns == ("hardware slowdown", "too hot")
    assert [finding.verdict for finding in (gpu.gpu_mode(found), gpu.gpu_memory(found), gpu.gpu_clocks(found))] == [
        "slow", "slow", "slow"
    ]  # fmt: skip
    assert found.gpus[1].holders[0].startswith("1 (")


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("250000 100000", 2.5)])
def test_cpu_quota_is_read_from_cgroup_v2(text: str, cores: float | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(f"{text}\n")
    assert machine.read_quota(tmp_path) == cores


def test_cpu_quota_is_read_from_cgroup_v1(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.read_quota(tmp_path) == 1.5


def test_rank_start_failure_is_reported_as_broken() -> None:
    class Unable(LocalEngine):
        def warm_up(self) -> Any:
            raise OSError("fork: no more processes")

    finding = network.all_reduce(start=Unable)
    assert finding.verdict == "broken"
    assert "OSError: fork: no more processes" in finding.found


def test_unwritable_run_folder_is_reported_as_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.os, "access", lambda path, mode: False)
    finding = disk.run_folder(tmp_path / "not" / "there")
    assert (finding.verdict, finding.found) == ("broken", f"{tmp_path} is not writable")


def test_failing_check_is_reported_without_a_verdict() -> None:
    def odd_look() -> Finding:
        raise KeyError("x")

    finding = doctor(checks=[odd_look])[0]
    assert (finding.name, finding.verdict) == ("odd look", "ok")
    assert "could not be checked: KeyError" in finding.found
