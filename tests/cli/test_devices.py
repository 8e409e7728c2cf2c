"""`manyhands devices`."""

from __future__ import annotations

import json

from manyhands import distributed
from manyhands.cli.devices import as_dict
from manyhands.distributed import Device

from .conftest import Invoke


def test_table_lists_every_device(invoke: Invoke) -> None:
    result = invoke("devices")
    assert result.exit_code == 0
    assert all(device.name in result.stdout for device in distributed.devices())
    assert "GiB" in result.stdout


def test_json_output_is_a_list_of_device_objects(invoke: Invoke) -> None:
    found = json.loads(invoke("devices", "--json").stdout)
    assert [item["name"] for item in found] == [device.name for device in distributed.devices()]
    assert found[-1]["kind"] == "cpu"
    assert found[-1]["memory"] > 0


def test_unusable_device_is_described_with_the_reason() -> None:
    described = as_dict(Device("cuda", 0, remedy="install another torch"))
    assert described["usable"] is False
    assert described["note"] == "install another torch"
