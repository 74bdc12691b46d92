import math

import pytest
import torch

from pp_schedule.tensor_lists import divide, multiply, norms

MIXED = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(2)
    shapes = ((3, 4), (5,), (), (0, 3), (2, 1, 2))
    return [torch.randn(shape).to(dtype) for dtype in MIXED for shape in shapes]


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, math.inf])
def test_norms(norm_type: float, foreach: bool | None) -> None:
    found = norms(tensors(), norm_type, foreach)
    assert {norm.dtype for norm in found} == {torch.float32, torch.float64}
    flat = torch.cat([norm.double() for norm in found])
    wanted = [t.double().norm(norm_type) for t in tensors() if t.numel()]
    assert sorted(flat.tolist()) == pytest.approx(sorted(map(float, wanted)), rel=1e-6)
    assert norms([], norm_type, foreach) == []


@pytest.mark.parametrize("foreach", [None, True, False])
def test_a_factor_finer_than_half_precision(foreach: bool | None) -> None:
    before, after = tensors(), tensors()
    factor = torch.tensor(0.7003, dtype=torch.float64)
    multiply(after, factor, foreach)
    for old, new in zip(before, after, strict=True):
        assert new.dtype == old.dtype
        torch.testing.assert_close(new, (old.double() * factor).to(old.dtype))


def test_division() -> None:
    before, after = tensors(), tensors()
    divide(after, 3.0)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, old / 3.0)
