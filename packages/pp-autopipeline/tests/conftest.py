from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

torch.set_num_threads(1)  # tensors this small are faster on one


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """The mesh of a world of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    dist.destroy_process_group()


def make_model(num_layers: int = 3, **overrides: Any) -> PreTrainedModel:
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(11)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).double()


@pytest.fixture
def llama() -> Callable[..., PreTrainedModel]:
    """Makes a small random Llama: `llama(num_layers, **config)`."""
    return make_model
