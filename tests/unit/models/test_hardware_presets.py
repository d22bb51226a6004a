"""The presets: complete, with a source for each number, and errors that help."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from commbench.models.hardware import hardware_names, load_hardware

NUMBERS = {"link_Bps", "link_latency_s", "reduce_Bps", "nic_Bps", "nic_latency_s"}


def test_every_generation_is_there() -> None:
    gpus = {name.split("-")[0] for name in hardware_names()}
    assert gpus >= {"a100", "h100", "h200", "b200", "b300", "gb200", "mi300x"}
    for name in ("h200-8x400g", "a100-8x200g", "h100-8x400g", "b200-8x400g", "b300-8x800g", "gb200-nvl72-4x400g",
                 "mi300x-8x400g", "h100-1x100g"):  # fmt: skip
        assert load_hardware(name).name == name


@pytest.mark.parametrize("name", hardware_names())
def test_each_preset_is_whole(name: str) -> None:
    hardware = load_hardware(name)
    numbers = hardware.constants()
    assert min(numbers.values()) > 0
    # GPUs talk faster and sooner to one another than through a NIC.
    assert hardware.link_Bps > hardware.nic_Bps
    assert hardware.link_latency_s < hardware.nic_latency_s
    # A usable rate is below the line's, and not by much.
    assert 0.9 < hardware.nic_Bps / (hardware.nic_line_Gbps / 8 * 1e9) < 1
    assert hardware.node_Bps == hardware.nics_per_node * hardware.nic_Bps
    assert hardware.gpus_per_node % hardware.gpus_per_host == 0
    assert len(hardware.node) > 20 and len(hardware.description) > 20
    assert (hardware.nccl is None) == (hardware.vendor == "amd")
    sources = dict(hardware.sources)
    assert set(sources) >= NUMBERS
    assert all(len(text) > 20 for text in sources.values())


@pytest.mark.parametrize("name", hardware_names())
def test_names_say_what_is_in_the_node(name: str) -> None:
    hardware = load_hardware(name)
    count, rate = name.removesuffix("-efa").split("-")[-1].removesuffix("g").split("x")
    hosts = hardware.gpus_per_node // hardware.gpus_per_host
    assert (int(count) * hosts, float(rate)) == (hardware.nics_per_node, hardware.nic_line_Gbps)


def test_rates_of_nvlink_are_those_of_its_links() -> None:
    """Links a GPU × NCCL's GB/s a link: 12 × 20, 18 × 20.6, 18 × 40.1; RCCL's 7 × 48 over xGMI."""
    rates = {"a100-8x200g": 240e9, "h100-8x400g": 370.8e9, "h200-8x400g": 370.8e9, "b200-8x400g": 721.8e9,
             "gb200-nvl72-4x400g": 721.8e9, "mi300x-8x400g": 336e9}  # fmt: skip
    for name, rate in rates.items():
        assert load_hardware(name).link_Bps == rate
    facts = load_hardware("h200-8x400g").nccl
    assert facts and (facts.pci_Bps, facts.nic_Bps, facts.compute_capability) == (48e9, 50e9, 90)


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown hardware 'h200-8x400': did you mean 'h200-8x400g'"):
        load_hardware("h200-8x400")


def test_every_number_in_the_file_has_a_source() -> None:
    content = json.loads(resources.files("commbench.models").joinpath("hardware.json").read_text())

    def check(value: object, path: str) -> None:
        if isinstance(value, dict):
            assert ("value" in value) == ("source" in value and "gpu" not in value), path
            for key, inner in value.items():
                check(inner, f"{path}/{key}")
        elif path.endswith("/source"):
            assert isinstance(value, str) and len(value) > 20, path

    check(content, "")
