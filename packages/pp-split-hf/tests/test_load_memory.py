"""Reading takes the memory of the stage, and little more, whatever is converted on the way."""

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: what another test has freed would be used again and not be seen.
PROGRAM = """
import sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from pp_split_hf import *

family, dtype, folder = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3]
# Experts that are stored one by one, and fused in the model; a head larger than the layers.
settings = {
    "qwen3_moe": {"moe_intermediate_size": 256, "num_experts": 96, "num_experts_per_tok": 2},
    "llama": {"vocab_size": 150_000, "intermediate_size": 256},
}[family]
config = AutoConfig.for_model(
    family, **{"vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 4,
               "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, **settings},
)


def resident(which):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) * 1024


def stage():
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    layout = find_layout(model)
    [part] = split_model_into_stages(model, plan_stage_fqns(layout, [2, 2]), [1], layout)
    return part


if folder.startswith("write:"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder.removeprefix("write:"))
    sys.exit()
part = stage()
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = resident("VmRSS")
load_stage_weights(part, folder, "cpu", dtype)
print(sum(p.nbytes for p in part.parameters()), resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(("family", "dtype"), [("qwen3_moe", "float32"), ("llama", "bfloat16")])
def test_the_peak_is_the_stage(family: str, dtype: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, family, dtype]
    subprocess.run([*command, f"write:{tmp_path}"], check=True, timeout=120)
    done = subprocess.run(
        [*command, str(tmp_path)], check=True, timeout=120, capture_output=True, text=True
    )
    size, added = map(int, done.stdout.split())
    assert size > 70e6
    assert added < 1.15 * size, f"{added / 1e6:.1f} MB for {size / 1e6:.1f} MB"
