"""Devices: names, virtual ones, defaults, and errors that say what there is."""

from __future__ import annotations

import pytest
import torch

from manyhands.core import DeviceError
from manyhands.distributed import Device, devices, num_cores, resolve, this_host
from manyhands.distributed.devices import _capability_cure


def test_the_cpu_is_always_there() -> None:
    cpu = devices()[-1]
    assert cpu.kind == "cpu"
    assert cpu.memory > cpu.free > 0


def test_virtual_devices_share_a_real_one() -> None:
    found, notices = resolve("cpu*4")
    assert [device.name for device in found] == ["cpu#0", "cpu#1", "cpu#2", "cpu#3"]
    assert {device.share for device in found} == {0.25}
    assert resolve("cpu")[1] == []
    assert bool(notices) == (num_cores() < 4), "more processes than cores are worth a notice"


def test_a_host_name_is_accepted_when_it_is_ours() -> None:
    assert resolve(f"{this_host()}/cpu")[0][0].kind == "cpu"
    with pytest.raises(DeviceError, match="but got elsewhere; leave the host away"):
        resolve("elsewhere/cuda:1")


def test_a_device_prints_with_its_host() -> None:
    assert str(Device("cuda", 1, host="host2")) == "host2/cuda:1"


@pytest.mark.parametrize("text", ["", "cuda:0:1", "*2", "7", "cpu*", "c p u!"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(DeviceError):
        resolve(text)


def test_a_device_that_is_not_there_is_refused_with_what_there_is() -> None:
    with pytest.raises(DeviceError, match="this machine has .*cpu, but got cuda:99; name one of these"):
        resolve("cuda:99")


def test_more_than_there_are() -> None:
    with pytest.raises(DeviceError, match=r'needs 3 devices, but got 2 .*on="cpu\*3"'):
        resolve("cpu*2", 3)


def test_what_else_can_be_passed() -> None:
    assert resolve(torch.device("cpu"))[0] == resolve("cpu")[0] == resolve([Device("cpu")])[0]
    assert resolve(["cpu*2"])[0] == resolve("cpu*2")[0]
    with pytest.raises(DeviceError, match="on= is a text or a list of devices, but got 3"):
        resolve(3)  # type: ignore[arg-type]


def test_a_cluster_address_is_not_a_device() -> None:
    with pytest.raises(DeviceError, match="on= names devices of this machine"):
        resolve("ray://head:10001")


def test_replicas_without_accelerators_share_the_cpu_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    found, notices = resolve(None, 3)
    assert len(found) == 3
    assert "3 processes share" in notices[0]
    assert resolve("gpu")[0][0].kind == "cpu"
    assert "no accelerator" in resolve("gpu")[1][0]


@pytest.mark.parametrize(
    ("capability", "built_for", "usable"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 6), ["sm_80"], True),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_80", "sm_90", "compute_90"], True),
        ((12, 0), ["sm_80", "sm_90a"], False),
        ((9, 0), ["sm_90a"], True),
    ],
)
def test_a_build_for_other_devices_is_said_with_its_cure(
    capability: tuple[int, int], built_for: list[str], usable: bool
) -> None:
    cure = _capability_cure(capability, built_for, "13.0")
    assert (cure == "") == usable
    if not usable:
        assert "install a torch built for it" in cure
