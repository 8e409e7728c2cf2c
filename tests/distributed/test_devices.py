"""Devices: names, virtual devices, defaults, and errors that list the available ones."""

from __future__ import annotations

import pytest
import torch

from manyhands.core import DeviceError
from manyhands.distributed import Device, devices, num_cores, resolve, this_host
from manyhands.distributed.devices import _capability_remedy


def test_cpu_is_always_listed() -> None:
    cpu = devices()[-1]
    assert cpu.kind == "cpu"
    assert cpu.memory > cpu.free > 0


def test_virtual_devices_share_a_physical_device() -> None:
    found, notices = resolve("cpu*4")
    assert [device.name for device in found] == ["cpu#0", "cpu#1", "cpu#2", "cpu#3"]
    assert {device.share for device in found} == {0.25}
    assert resolve("cpu")[1] == []
    assert bool(notices) == (num_cores() < 4), "more processes than cores are worth a notice"


def test_only_the_local_host_name_is_accepted() -> None:
    assert resolve(f"{this_host()}/cpu")[0][0].kind == "cpu"
    with pytest.raises(DeviceError, match="but got elsewhere. Omit the host name"):
        resolve("elsewhere/cuda:1")


def test_a_device_prints_with_its_host() -> None:
    assert str(Device("cuda", 1, host="host2")) == "host2/cuda:1"


@pytest.mark.parametrize("text", ["", "cuda:0:1", "*2", "7", "cpu*", "c p u!"])
def test_malformed_device_string_raises(text: str) -> None:
    with pytest.raises(DeviceError):
        resolve(text)


def test_unavailable_device_error_lists_available_devices() -> None:
    with pytest.raises(
        DeviceError, match="must name devices of this machine .*cpu.*, but got cuda:99. Choose one of them"
    ):
        resolve("cuda:99")


def test_requesting_more_devices_than_available_raises() -> None:
    with pytest.raises(DeviceError, match=r'needs 3 devices, but got 2 .*on="cpu\*3"'):
        resolve("cpu*2", 3)


def test_resolve_accepts_torch_devices_and_lists() -> None:
    assert resolve(torch.device("cpu"))[0] == resolve("cpu")[0] == resolve([Device("cpu")])[0]
    assert resolve(["cpu*2"])[0] == resolve("cpu*2")[0]
    with pytest.raises(DeviceError, match="on must be a string or a list of devices, but got 3"):
        resolve(3)  # type: ignore[arg-type]


def test_cluster_address_is_rejected_as_a_device() -> None:
    with pytest.raises(DeviceError, match="on must name devices of this machine"):
        resolve("ray://head:10001")


def test_replicas_without_accelerators_share_the_cpu_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_torch_build_without_gpu_support_is_reported_with_a_remedy(
    capability: tuple[int, int], built_for: list[str], usable: bool
) -> None:
    remedy = _capability_remedy(capability, built_for, "13.0")
    assert (remedy == "") == usable
    if not usable:
        assert "install a torch built for it" in remedy
