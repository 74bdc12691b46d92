from typing import Any

import pytest
import torch

from pp_autopipeline.microbatch import find_batch_dims

B, S = 8, 16


def shaped(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    ("value", "dim"),
    [
        (shaped(B, S), 0),
        (shaped(B), 0),
        (shaped(B, 1, S, S), 0),
        (shaped(B, B), 0),
        (shaped(1, B, S), None),  # broadcasts over the batch
        (shaped(1, S), None),
        (shaped(1), None),
        (shaped(S), None),
        (shaped(), None),
        (3, None),
        (None, None),
        ("mode", None),
        ({"mask": 2}, None),
    ],
)
def test_batch_dim(value: Any, dim: int | None) -> None:
    assert find_batch_dims({"x": value}, B, S) == {"x": dim}


def test_a_batch_of_one() -> None:
    dims = find_batch_dims({"rows": shaped(1, S), "row": shaped(1)}, 1, S)
    assert dims == {"rows": 0, "row": 0}
    assert find_batch_dims({"x": shaped(1)}, 1, 1) == {"x": 0}


def test_all_that_cannot_be_cut_is_named() -> None:
    kwargs = {"a": shaped(5, S), "fine": shaped(B, S), "b": shaped(7)}
    with pytest.raises(ValueError, match=r"input_ids of shape \(8, 16\)") as caught:
        find_batch_dims(kwargs, B, S)
    assert "a has shape (5, 16)" in str(caught.value)
    assert "b has shape (7,)" in str(caught.value)
    assert "fine" not in str(caught.value)


def test_what_could_be_either_is_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"x has shape.*per row or per position"):
        find_batch_dims({"x": shaped(8)}, 8, 8)
    assert find_batch_dims({"x": shaped(8, 8)}, 8, 8) == {"x": 0}


def test_position_ids_of_three_dims() -> None:
    for rows in (3, 4, B):
        assert find_batch_dims({"position_ids": shaped(3, rows, S)}, rows, S) == {"position_ids": 1}


@pytest.mark.parametrize("value", [{"full": shaped(B, S)}, [shaped(B)], ({"a": [shaped(B)]},)])
def test_containers_of_tensors_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"mask is a .* that holds tensors"):
        find_batch_dims({"mask": value}, B, S)
