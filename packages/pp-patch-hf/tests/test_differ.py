from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP

from pp_patch_hf.differ import first_difference

Tiny = Callable[..., PreTrainedModel]
INPUTS = {"input_ids": torch.arange(20).view(2, 10)}


class Jealous(LlamaMLP):
    """Adds what it sees of another layer, which another stage may have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + len(list(self.others[0].parameters()))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("counts", [(1, 2), (0, 3), (1, 0, 2)])
def test_where_nothing_differs(family: str, counts: tuple[int, ...], tiny: Tiny) -> None:
    assert first_difference(tiny(family, 3), counts, INPUTS, 1e-11) is None


@pytest.mark.parametrize("counts", [(2, 2), (1, 1, 1, 1)])
def test_the_innermost_module_is_named(counts: tuple[int, ...], tiny: Tiny) -> None:
    model = tiny("llama", 4)
    model.model.layers[3].mlp.__class__ = Jealous
    model.model.layers[3].mlp.others = [model.model.layers[2]]
    found = first_difference(model, counts, INPUTS)
    if len(counts) == 2:  # it has the other layer on its own stage
        assert found is None
    else:
        assert found is not None
        assert (found.fqn, found.stage) == ("model.layers.3.mlp", 3)
        assert found.error > 1e-3


def test_a_fault_of_the_model_itself(tiny: Tiny) -> None:
    model = tiny("llama", 2)

    class Counting(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + len(list(self.parameters()))
            return output

    model.__class__ = Counting
    found = first_difference(model, (1, 1), INPUTS)
    assert found is not None
    assert (found.fqn, found.stage) == ("", 1)
