"""`sluice plan`: figures from config.json alone, and one clear line for what cannot be planned."""

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import save_file

from admission.step_times.step_time import StepTime, StepWork
from backend.model.known_shapes import LLAMA_3_8B
from backend.roofline import GPUS, Footprint, Roofline
from tests.gateway.cli.conftest import Printed, Sluice

CONFIG = (
    '{"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, '
    '"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, '
    '"rope_theta": 500000.0, "torch_dtype": "bfloat16"}'
)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(CONFIG)
    return str(tmp_path)


def test_it_prints_the_memory_the_roofline_and_what_does_not_fit(model: str, printed: Printed) -> None:
    out = printed("plan", model, "--memory", "80GiB", "--max-num-seqs", "600")
    lines = {line.split("  ")[0].strip(): line for line in out.splitlines()}
    assert "14.96 GiB" in lines["weights"] and "131,072 B" in lines["KV"]
    assert "ridge at 184 tokens a step" in out
    assert any(line.split()[:3] == ["256", "12.85", "19,915"] for line in out.splitlines())
    assert next(line for line in out.splitlines() if line.startswith("  600")).endswith("does not fit")
    assert "warning: KV memory holds 62 sequences of 8,192 tokens, not max_num_seqs 600" in out


def test_keys_and_values_of_8_bits_take_half(model: str, printed: Printed) -> None:
    lines = printed("plan", model, "--memory", "80GiB", "--kv-cache-dtype", "fp8").splitlines()
    assert "65,536 B" in next(line for line in lines if line.startswith("KV"))


def test_no_step_of_a_small_model_takes_no_time(printed: Printed) -> None:
    table, prefill = (
        printed("plan", "embedded", "--memory", "4GiB").split("batch  step ms")[1].split("floor of a prefill")
    )
    steps = [float(line.split()[1]) for line in table.splitlines()[1:]]
    assert len(steps) > 5 and all(steps) and steps == sorted(set(steps))
    assert float(prefill.split()[-2]) > 0


def test_of_several_ranks_each_has_its_part_and_they_exchange_sums(model: str, printed: Printed) -> None:
    flags = ["--memory", "80GiB", "--gpu", "h100", "--tensor-parallel", "4", "--rank-link", "100GB"]
    out = printed("plan", model, *flags)
    lines = {line.split("  ")[0].strip(): line for line in out.splitlines()}
    assert out.startswith(f"{model}, each of 4 ranks, bfloat16")
    assert "3.74 GiB" in lines["weights"] and "32,768 B" in lines["KV"]
    exchanged = 65 * 1024 * 4096 * 2 * 1.5 / 100e9  # sums of a step of 1,024 tokens, by a ring of 4
    assert f"of which ranks exchange sums for {exchanged * 1e3:.2f} ms" in out


def test_packed_weights_take_fewer_bytes_and_steps_less_time(model: str, tmp_path: Path, printed: Printed) -> None:
    file = tmp_path / "planned.json"
    out = printed("plan", model, "--memory", "12GiB", "--quantization", "int4", "--save-device", file)
    assert "those of layers in 5 bits" in out
    footprint = Footprint(LLAMA_3_8B, "bfloat16", quantization="int4")
    reading = footprint.bytes_read(1) / GPUS["h200"].bandwidth
    assert json.loads(file.read_text())["coefficients"][0] == pytest.approx(reading)


def test_a_devices_own_figures_take_the_place_of_the_known_ones(model: str, printed: Printed) -> None:
    flags = ["--bandwidth", "2TB", "--flops", "100T", "--gpu", "a100"]
    assert "2.00 TB/s and 100 TFLOP/s; ridge at 50 tokens" in printed("plan", model, "--memory", "40GiB", *flags)


def test_steps_have_a_token_for_each_of_many_sequences(model: str, printed: Printed) -> None:
    assert "of 4,000 tokens a step" in printed("plan", model, "--memory", "80GiB", "--max-num-seqs", "4000")


A100 = ("--memory", "80GiB", "--gpu", "a100")


def test_it_saves_steps_that_read_the_weights_and_then_multiply(model: str, tmp_path: Path, printed: Printed) -> None:
    printed("plan", model, *A100, "--save-device", tmp_path / "planned.json")
    saved = json.loads((tmp_path / "planned.json").read_text())
    step = StepTime(tuple(saved["coefficients"]), saved["knee"])
    roofline = Roofline(Footprint(LLAMA_3_8B, "bfloat16"), GPUS["a100"])
    products = 2 * roofline.footprint.num_multiplied / roofline.rate
    assert step.seconds(StepWork(0, 1, 1024)) == pytest.approx(roofline.decode(1, 1024) + products, rel=0.01)
    pairs = 4 * 32 * 32 * 128 * (4096 * 4097 // 2) / roofline.rate
    reads = roofline.decode(1, 0)
    assert step.seconds(StepWork().with_prefill(0, 4096)) == pytest.approx(
        roofline.prefill(4096) + pairs + reads, rel=0.01
    )
    assert saved["kv_bytes_per_token"] == 131_072


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--memory", "2x"], "'2x' is not a size such as 512MiB or 2GiB"),
        (["--memory", "80GiB", "--flops", "fast"], "'fast' is not a number"),
        (["--memory", "80GiB", "--flops", "1TT"], "'1TT' is not a number"),
        (["--memory", "80GiB", "--flops", "0"], "'0' is not above 0"),
        (
            ["--memory", "80GiB", "--save-device", "/nowhere/device.json"],
            "--save-device /nowhere/device.json: cannot be",
        ),
        (
            ["--memory", "80GiB", "--max-num-batched-tokens", "255"],
            "--max-num-batched-tokens 255: each of --max-num-seqs 256 takes one token of a step",
        ),
        (["--memory", "80GiB", "--max-model-len", "10k"], "the model has 8,192 positions"),
        (["--quantization", "int4", "--tensor-parallel", "2"], "a GPU packs the weights of models without experts, on"),
        (["--memory", "12GiB"], "12.00 GiB of memory - weights 14.96 GiB"),
        (["--memory", "80GiB", "--gpu", "abacus"], "invalid choice"),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(model: str, flags: list[str], message: str, sluice: Sluice) -> None:
    done = sluice("plan", model, *flags)
    assert done.status == 2
    assert message in done.err


@pytest.mark.parametrize("asked", ["auto", "float16"])
def test_where_the_config_names_no_dtype_it_says_what_it_assumes(asked: str, tmp_path: Path, printed: Printed) -> None:
    (tmp_path / "config.json").write_text(CONFIG.replace("torch_dtype", "comment"))
    command = ["plan", str(tmp_path), "--memory", "80GiB", "--dtype", asked]
    out = printed(*command)
    note = "config.json names no dtype, and there are no weights to tell: float32 is assumed; --dtype says another\n"
    assert (note in out, f"{tmp_path}, {asked}" in out) == (asked == "auto", asked != "auto")
    save_file({"norm.weight": np.zeros(8, np.float16)}, tmp_path / "model.safetensors")
    out = printed(*command)
    assert ("float16 is assumed, in which the weights are stored" in out) == (asked == "auto")
    assert f"{tmp_path}, float16" in out


def test_of_a_hub_name_only_the_config_is_fetched(
    model: str, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file: f"{model}/{file}")
    assert printed("plan", "org/name", "--memory", "80GiB").startswith("org/name, bfloat16")


def test_without_a_network_a_hub_name_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, sluice: Sluice
) -> None:
    def unreachable(name: str, file: str) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError(f"cannot reach the hub for {name}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    done = sluice("plan", "org/name", "--memory", "80GiB")
    assert (done.status, "name a local directory" in done.err) == (1, True)


def test_it_does_not_wait_for_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG.replace("torch_dtype", "comment"))
    save_file({"norm.weight": np.zeros(8, np.float16)}, tmp_path / "model.safetensors")
    program = "import sys; from gateway.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", program, "plan", str(tmp_path), "--memory", "80GiB"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
