"""What a user may write after --gpus, and what they read when it is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tightfit.hardware.catalogue import CARDS, GIB, MIB, native_bf16
from tightfit.hardware.words import connect, parse_hardware, parse_link, parse_network, parse_size, recognise
from tightfit.types import HardwareError

GEFORCE_AS_PRINTED = {
    # NVIDIA's white papers: TFLOP/s, fp16 with fp32 accumulation, dense.
    "RTX 2070": 29.9,
    "RTX 2080": 40.3,
    "RTX 2080 Ti": 53.8,
    "RTX 3070": 40.6,
    "RTX 3080 10GB": 59.5,
    "RTX 3090": 71.2,
    "RTX 4080": 97.5,
    "RTX 4090": 165.2,
    "RTX 5070": 61.7,
    "RTX 5070 Ti": 87.9,
    "RTX 5080": 112.6,
    "RTX 5090": 209.5,
}


@pytest.mark.parametrize(
    ("word", "nodes", "gpus", "name", "mib"),
    [
        ("6x32GB", 1, 6, "32GB card", 32768),
        ("4xRTX4090", 1, 4, "RTX 4090", 24564),
        ("8xK100-64GB", 1, 8, "K100", 65536),
        ("2x8xA100-80GB", 2, 8, "A100 80GB SXM", 81920),
        ("1xH200", 1, 1, "H200", 143771),
        ("A100-80GB", 1, 1, "A100 80GB SXM", 81920),
        ("32GB", 1, 1, "32GB card", 32768),
        ("24 gib", 1, 1, "24GB card", 24576),
        ("4×RTX 4090", 1, 4, "RTX 4090", 24564),
        ("4 X rtx-4090", 1, 4, "RTX 4090", 24564),
        ("4*4090", 1, 4, "RTX 4090", 24564),
        ("RTX4090x4", 1, 4, "RTX 4090", 24564),
        ("６ｘ３２ＧＢ", 1, 6, "32GB card", 32768),
        ("4\u0445RTX4090", 1, 4, "RTX 4090", 24564),
        ("7900 XTX", 1, 1, "RX 7900 XTX", 24560),
        ("8x7900XTX", 1, 8, "RX 7900 XTX", 24560),
        ("8xA100-80", 1, 8, "A100 80GB SXM", 81920),
        ("A100SXM4-40GB", 1, 1, "A100 40GB SXM", 40960),
        ("4xA10G", 1, 4, "A10G", 23028),
        ("A10-24G", 1, 1, "A10", 23028),
        ("RTX3080-12GB", 1, 1, "RTX 3080 12GB", 12288),
        ("K100_AI", 1, 1, "K100-AI", 65520),
        ("hygon dcu k100-ai 64GB", 1, 1, "K100-AI", 65520),
        ("RTX 3050 laptop 4GB", 1, 1, "RTX 3050 Laptop 4GB", 4096),
        ("4060 mobile", 1, 1, "RTX 4060 Laptop", 8188),
        ("H100-PCIe", 1, 1, "H100 PCIe", 81559),
        ("a6000", 1, 1, "RTX A6000", 49140),
    ],
)
def test_words(word: str, nodes: int, gpus: int, name: str, mib: int) -> None:
    hardware = parse_hardware(word)
    assert (hardware.nodes, hardware.gpus_per_node, hardware.gpu.name) == (nodes, gpus, name)
    assert hardware.gpu.memory_bytes == mib * MIB
    assert hardware.world == nodes * gpus


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX 4060 Laptop"),
        ("GeForce RTX 2070 with Max-Q Design", "RTX 2070 Laptop"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("Tesla V100-SXM2-32GB", "V100 32GB SXM"),
        ("Tesla P100-PCIE-16GB", "P100 16GB PCIe"),
        ("Tesla T4", "T4"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Max-Q"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Server"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD Instinct MI250X / MI250", "MI250"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("BW200, UBB BW1000", "BW1000"),
    ],
)
def test_names_as_drivers_print_them(printed: str, name: str) -> None:
    hardware = parse_hardware(printed)
    assert hardware.gpu.name == name
    assert hardware.because == (), "a driver's name leaves nothing to choose"


def test_a_plain_size_has_memory_and_no_rates() -> None:
    hardware = parse_hardware("6x32GB", host_ram="512GB", nvme="2TB")
    assert hardware.gpu.vendor == "unknown"
    assert hardware.gpu.arch is None
    assert hardware.gpu.bf16_flops is hardware.gpu.link_bytes_per_s is None
    assert hardware.host_ram_bytes == 512 * GIB
    assert hardware.nvme_bytes == 2048 * GIB
    assert hardware.because == ()


def test_an_unnamed_form_is_chosen_and_said() -> None:
    sxm, pcie = parse_hardware("A100-80GB"), parse_hardware("A100-PCIe-80GB")
    assert sxm.gpu.link == "nvlink"
    assert pcie.gpu.link == "pcie4"
    assert tuple(map(str, sxm.because)) == ("A100 is taken to be the SXM form; write A100-PCIe-80GB if it is not.",)
    assert pcie.because == ()


def test_one_mi250_is_two_gpus() -> None:
    cards, dies = parse_hardware("4xMI250X-128GB"), parse_hardware("8xMI250X-64GB")
    assert cards.gpus_per_node == dies.gpus_per_node == 8
    assert cards.gpu == dies.gpu
    assert "4 of them are 8 GPUs" in str(cards.because[0])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("RTX 3080", "RTX 3080 comes with 10GB or 12GB: write RTX3080-12GB, say."),
        ("v100", "V100 comes with 16GB or 32GB"),
        ("MI250X", "MI250X comes with 64GB or 128GB (the whole card, which is 2 GPUs)"),
        ("4xRTX4090-48GB", "RTX 4090 comes with 24GB, not 48GB"),
        ("RTX3080-16GB", "RTX 3080 comes with 10GB or 12GB, not 16GB"),
        ("H200-PCIe", "H200 comes as SXM, not as PCIe."),
        ("4xRTX4091", "did you mean RTX 4090"),
        ("RTX 6000", "RTX 6000 Ada"),
        ("8xK100-IA", "K100-AI"),
        ("0xA100-80GB", "the least is one"),
        ("0x8xA100-80GB", "the least is one"),
        ("-4xA100-80GB", "minus"),
        ("1000000000xA100-80GB", "more GPUs than there are"),
        ("1e9xA100-80GB", "did you mean A100"),
        ("2000xH100", "nodes x GPUs"),
        ("99999x8xH100", "99999 nodes"),
        ("2x2x2x24GB", "more than two counts"),
        ("8x80", "did you mean 80GB?"),
        ("6x0GB", "write a size like 24GB"),
        ("6x999999GB", "write a size like 24GB"),
        ("6x", "names no card"),
        ("", "names no card"),
        ("   ", "names no card"),
        ("banana", "`tightfit gpus` lists them"),
        ("9" * 5000 + "x24GB", "too long"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(word: str, said: str) -> None:
    with pytest.raises(HardwareError) as error:
        parse_hardware(word)
    assert said in str(error.value)
    assert_one_sentence(str(error.value))


def assert_one_sentence(message: str) -> None:
    assert "\n" not in message
    assert message[-1] in ".?"
    assert not re.search(r"[.?] [A-Z]", message)
    assert len(message) < 250


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512GB", 512 * GIB),
        ("512GiB", 512 * GIB),
        ("512g", 512 * GIB),
        ("1.5 TB", 1536 * GIB),
        ("65520 MiB", 65520 * MIB),
        ("100MB", 100 * MIB),
        ("1P", 2**50),
    ],
)
def test_sizes_are_powers_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["512", "", "GB", "-4GB", "0GB", "1e3GB", "12XB", "twelve GB", "1.GB", "inf GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(HardwareError) as error:
        parse_size(text)
    assert_one_sentence(str(error.value))


def test_host_ram_is_validated_too() -> None:
    with pytest.raises(HardwareError, match="'lots' is not a size"):
        parse_hardware("6x32GB", host_ram="lots")


@pytest.mark.parametrize(
    ("text", "gb_s"),
    [
        ("400Gb", 50),
        ("8x400Gb", 400),
        ("8 × 400 Gbps", 400),
        ("400Gbit/s", 50),
        ("400gb/s", 50),
        ("400G", 50),
        ("3.2Tb", 400),
        ("50GB/s", 50),
        ("4x12.5GBps", 50),
    ],
)
def test_networks_are_rates_of_a_node(text: str, gb_s: float) -> None:
    assert parse_network(text) == pytest.approx(gb_s * 1e9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fast", "like 400Gb or 8x400Gb."),
        ("400GB", "did you mean 400Gb?"),
        ("8x400", "did you mean 8x400Gb?"),
        ("100Gbs", "did you mean 100Gb?"),
        ("0Gb", "No node has a network of '0Gb'"),
        ("9999x999999Gb", "at most 100Tb."),
        ("", "like 400Gb"),
    ],
)
def test_what_is_no_network(text: str, said: str) -> None:
    with pytest.raises(HardwareError) as error:
        parse_network(text)
    assert said in str(error.value)
    assert_one_sentence(str(error.value))


@pytest.mark.parametrize(
    ("gpus", "text", "link", "gb_s"),
    [
        ("2xRTX3090", "nvlink", "nvlink", 56.25),
        ("8xH100", "NVLink", "nvlink", 450),
        ("8xH100", "pcie5", "pcie5", 63),
        ("8xH100", "200GB/s", "nvlink", 200),
        ("8xRTX4090", "PCIe 3.0", "pcie3", 15.76),
        ("8xRTX4090", "16GB/s", "pcie4", 16),
        ("2xRTX4060", "pcie4", "pcie4", 15.75),
        ("8xMI300X", "xgmi", "xgmi", 448),
        ("8xMI210", "100GB/s", "xgmi", 100),
        ("4x32GB", "20GB/s", "pcie4", 20),
        ("4x32GB", "300GB/s", "nvlink", 300),
    ],
)
def test_links_by_name_and_by_rate(gpus: str, text: str, link: str, gb_s: float) -> None:
    found = connect(parse_hardware(gpus), None, text)
    assert (found.gpu.link, found.link_given) == (link, True)
    assert found.gpu.link_bytes_per_s == pytest.approx(gb_s * 1e9, rel=0.001)


@pytest.mark.parametrize(
    ("gpus", "text", "said"),
    [
        ("8xH100", "nvlnk", "did you mean nvlink?"),
        ("8xH100", "pci4", "did you mean pcie4?"),
        ("8xH100", "50", "did you mean 50GB/s?"),
        ("8xH100", "400Gbps", "did you mean 50GB/s?"),
        ("8xH100", "400Gb/s", "did you mean 50GB/s?"),
        ("8xH100", "pcie", "it takes pcie3, pcie4, pcie5, or a rate"),
        ("8xH100", "fast", "or a rate like 50GB/s."),
        ("8xH100", "0GB/s", "at most 10TB/s."),
        ("8xRTX4090", "nvlink", "RTX 4090 has no NVLink: write pcie4"),
        ("8xMI300X", "nvlink", "MI300X has no NVLink: write xgmi"),
        ("8xRTX4090", "xgmi", "no known Infinity Fabric link"),
        ("4x32GB", "nvlink", "write it, like 300GB/s."),
    ],
)
def test_what_is_no_link(gpus: str, text: str, said: str) -> None:
    with pytest.raises(HardwareError) as error:
        connect(parse_hardware(gpus), None, text)
    assert said in str(error.value)
    assert_one_sentence(str(error.value))


@pytest.mark.thorough
@given(st.one_of(st.text(), st.text("0123456789x.GMTbBps/ invlkpce")))
def test_any_text_is_a_rate_or_a_sentence(word: str) -> None:
    for read in (parse_network, parse_link):
        with suppress(HardwareError):
            assert read(word)


PIECES = st.sampled_from(
    ["x", "X", "×", "*", "-", " ", "GB", "G", "A100", "4090", "RTX", "MI250X", "laptop", "80", "0"]
)


@pytest.mark.thorough
@given(st.one_of(st.text(), st.text("0123456789x.-GBMT RATX"), st.lists(PIECES, max_size=9).map("".join)))
@example("\x00")
@example("٣x٣٢GB")
@example("²x32GB")
@example("x" * 101)
@example("ﷺ" * 90)
def test_any_text_is_hardware_or_a_sentence(word: str) -> None:
    said = ""
    try:
        hardware = parse_hardware(word)
    except HardwareError as error:
        said = str(error)
    if said:
        assert "\n" not in said
        return
    assert hardware.nodes >= 1
    assert hardware.gpus_per_node >= 1
    assert hardware.gpu.memory_bytes >= 1


@given(st.text(), st.one_of(st.none(), st.integers(1, 2**50)))
def test_any_driver_name_is_recognised_or_not(name: str, memory_bytes: int | None) -> None:
    gpu, _ = recognise(name, memory_bytes)
    assert gpu is None or memory_bytes in (None, gpu.memory_bytes)


def test_the_reported_total_decides_between_sizes() -> None:
    assert recognise("NVIDIA GeForce RTX 3080", 12288 * MIB)[0] == parse_hardware("RTX3080-12GB").gpu
    either, _ = recognise("Navi 31 [Radeon RX 7900 XT/7900 XTX]", 20464 * MIB)
    assert either is not None
    assert either.name == "RX 7900 XT"
    assert recognise("NVIDIA GeForce RTX 3080", None) == (None, None), "two sizes, and nothing to choose by"


def test_a_card_with_other_memory_than_it_is_sold_with() -> None:
    gpu, sentence = recognise("NVIDIA GeForce RTX 4090", 49140 * MIB)
    assert gpu is not None
    assert gpu.memory_bytes == 49140 * MIB
    assert str(sentence) == "RTX 4090 is sold with 24 GiB, but the driver reports 48.0 GiB: taken as reported."


# --- the catalogue ------------------------------------------------------------------------------


def test_every_card_can_be_written() -> None:
    for card in CARDS:
        form = f"-{card.form}" if card.form else ""
        hardware = parse_hardware(f"2x{card.family}{form}-{card.size_gib}GB")
        assert hardware.gpu == card.gpu
        assert hardware.gpus_per_node == 2 * card.devices


def test_every_device_name_can_be_written_back() -> None:
    for card in CARDS:
        if card.devices == 1 and card.family not in {"MI250", "MI250X"}:
            assert parse_hardware(card.gpu.name).gpu == card.gpu


def test_every_alias_leads_to_a_card() -> None:
    named = [(alias, card) for card in CARDS for alias in card.aliases]
    assert len(named) > 10
    for alias, card in named:
        hardware = parse_hardware(alias)
        assert hardware.gpu.name.startswith(card.family)
        assert hardware.gpu.memory_bytes == pytest.approx(card.size_gib * GIB, rel=0.06)


def test_geforce_rates_are_those_that_nvidia_prints() -> None:
    rates = {card.gpu.name: card.gpu.fp16_flops for card in CARDS}
    for name, printed in GEFORCE_AS_PRINTED.items():
        assert rates[name] == pytest.approx(printed * 1e12, rel=0.005), name


def test_every_figure_is_plausible() -> None:
    for card in CARDS:
        gpu = card.gpu
        assert 0.93 * card.size_gib * GIB <= gpu.memory_bytes * card.devices <= card.size_gib * GIB, gpu.name
        assert gpu.arch is not None
        assert gpu.fp16_flops is None or 1e12 < gpu.fp16_flops < 3e15
        assert gpu.memory_bytes_per_s is None or 50e9 < gpu.memory_bytes_per_s <= 8e12
        assert (gpu.link is None) == (gpu.link_bytes_per_s is None)
        if not native_bf16(gpu.arch):
            assert gpu.bf16_flops is None, "no rate for what the card cannot do"
        elif gpu.vendor == "nvidia":
            assert gpu.bf16_flops == gpu.fp16_flops


@pytest.mark.parametrize(
    ("arch", "native"),
    [("sm_75", False), ("sm_80", True), ("sm_120", True), ("gfx906", False), ("gfx942", True), ("gfx1100", True)],
)
def test_native_bf16(arch: str, native: bool) -> None:
    assert native_bf16(arch) is native
    assert native_bf16(None) is native_bf16("gfx926") is native_bf16("sm_") is None


@pytest.mark.thorough
def test_looking_at_hardware_never_imports_torch() -> None:
    code = "import sys, tightfit.hardware.machine as m; m.this_machine(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
