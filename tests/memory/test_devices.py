"""The table of devices, and how one is asked for."""

import pytest

from sn_memory import Device
from sn_memory.cost import devices
from sn_memory.cost.devices import CONTEXT_BYTES, DEVICES, named, speeds

# From the vendors' pages: bytes/s, dense bf16 flop/s where there are units for it, GB as sold.
STATED = {
    "v100": (900e9, None, 32),
    "a100-40": (1555e9, 312e12, 40),
    "a100-80": (2039e9, 312e12, 80),
    "h100": (3350e9, 1979e12 / 2, 80),
    "h200": (4800e9, 1979e12 / 2, 141),
    "b200": (7700e9, 36e15 / 8 / 2, 180),
    "l4": (300e9, 242e12 / 2, 24),
    "rtx4090": (1008e9, 165.2e12, 24),
    "mi300x": (5300e9, 1307.4e12, 192),
}


def test_the_table_is_what_vendors_state():
    assert list(DEVICES) == list(STATED)
    for name, (bytes_per_s, bf16, sold) in STATED.items():
        device = DEVICES[name]
        assert device.bytes_per_s == bytes_per_s
        assert device.flops_per_s.get("bf16") == (bf16 and pytest.approx(bf16))
        # Reported in GiB, and less than what is sold: error correction and the driver take some.
        assert 0.9 * sold * 1e9 < device.total_bytes < sold * 1.075e9
        assert device.usable_bytes == device.total_bytes - CONTEXT_BYTES


def test_speeds_are_shares_of_peaks():
    found, peaks = speeds("H100"), DEVICES["h100"]
    assert found.bytes_per_s == devices.BYTES_SHARE * peaks.bytes_per_s
    assert dict(found.flops_per_s_by_dtype)["bf16"] == devices.MATRIX_SHARE * 989.5e12
    assert found.to_host_bytes_per_s == found.to_device_bytes_per_s == devices.LINK_SHARE * 64e9
    assert found.launch_s > 0
    assert found.can_offload


@pytest.mark.parametrize("asked", ["A100-80", "a100 80gb", "A100_80GB", "NVIDIA A100", "a100"])
def test_names_are_read_generously(asked):
    assert named(asked) is DEVICES["a100-80"]


def test_what_is_no_name_of_the_table():
    with pytest.raises(ValueError, match=r"expected one of v100, .*Did you mean 'h100'\?"):
        named("h10")
    with pytest.raises(ValueError, match=r"got device 'cuda', .*leave device out"):
        named("cuda")
    with pytest.raises(TypeError, match="got a int as device"):
        speeds(3)
    own = Device("mine", 1.0, 1.0)
    assert speeds(own) is own
    assert speeds(None) is speeds("CPU") is None
