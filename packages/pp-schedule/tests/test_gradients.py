import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage

from pp_schedule import clip_grad_norm, scale_grads_by_divisor


def two_parts() -> list[nn.Module]:
    torch.manual_seed(1)
    parts: list[nn.Module] = [nn.Linear(3, 4), nn.Linear(4, 2)]
    for part in parts:
        for parameter in part.parameters():
            parameter.grad = torch.randn_like(parameter)
    return parts


def flat(parts: list[nn.Module]) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for part in parts for p in part.parameters()])


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_is_that_of_one_model(norm_type: float, foreach: bool | None) -> None:
    parts = two_parts()
    one = nn.Sequential(*copy.deepcopy(parts))
    for mine, its in zip(nn.Sequential(*parts).parameters(), one.parameters(), strict=True):
        its.grad = mine.grad.clone()
    before = flat(parts)
    wanted = nn.utils.clip_grad_norm_(one.parameters(), 0.5, norm_type)
    norm = clip_grad_norm(0.5, parts, norm_type, foreach=foreach)
    assert norm.shape == ()
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(before.norm(norm_type).item(), rel=1e-6)
    assert norm.item() == pytest.approx(wanted.item(), rel=1e-6)
    torch.testing.assert_close(flat(parts), flat([one]))
    assert flat(parts).norm(norm_type).item() == pytest.approx(0.5, rel=1e-4)


def test_a_small_norm_is_not_made_larger() -> None:
    parts = two_parts()
    before = flat(parts)
    norm = clip_grad_norm(1000.0, parts)
    assert torch.equal(flat(parts), before)
    assert norm.item() == pytest.approx(before.norm().item())


def test_without_a_limit_it_only_measures() -> None:
    parts = two_parts()
    before = flat(parts)
    assert clip_grad_norm(None, parts).item() == pytest.approx(before.norm().item())
    assert torch.equal(flat(parts), before)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_a_shared_parameter_counts_once_and_is_clipped_once(norm_type: float) -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    first.weight.grad = torch.arange(9.0).reshape(3, 3)
    wanted = torch.arange(9.0).norm(norm_type).item()
    assert clip_grad_norm(1.0, [first, second], norm_type).item() == pytest.approx(wanted)
    assert first.weight.grad.norm(norm_type).item() == pytest.approx(1.0, rel=1e-4)


def test_parameters_without_gradients() -> None:
    parts = two_parts()
    parts[0].requires_grad_(False)
    for parameter in parts[0].parameters():
        parameter.grad = None
    wanted = flat([parts[1]]).norm().item()
    assert clip_grad_norm(1.0, parts).item() == pytest.approx(wanted)
    assert all(p.grad is None for p in parts[0].parameters())


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("parts", [[], [nn.Linear(2, 2)], [nn.Identity()]])
def test_nothing_has_gradients(parts: list[nn.Module], norm_type: float) -> None:
    norm = clip_grad_norm(1.0, parts, norm_type)
    assert norm.item() == 0.0
    assert norm.dtype == torch.float64


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite(bad: float) -> None:
    parts = two_parts()
    next(parts[0].parameters()).grad[0, 0] = bad
    assert not math.isfinite(clip_grad_norm(None, parts).item())
    before = flat(parts)
    with pytest.raises(RuntimeError, match="must not be taken"):
        clip_grad_norm(1.0, parts, error_if_nonfinite=True)
    assert torch.equal(flat(parts).nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("max_norm", "norm_type", "words"),
    [(0.0, 2.0, "max_norm=0.0"), (-1.0, 2.0, "max_norm=-1.0"), (1.0, 0.0, "norm_type=0.0"),
     (math.nan, 2.0, "max_norm=nan")],
)  # fmt: skip
def test_limits_that_make_no_sense(max_norm: float, norm_type: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        clip_grad_norm(max_norm, two_parts(), norm_type)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_over_a_mesh_of_one_rank(norm_type: float, one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    parts = two_parts()
    wanted = flat(parts).norm(norm_type).item()
    norm = clip_grad_norm(None, parts, norm_type, device_mesh=mesh)
    assert norm.item() == pytest.approx(wanted)
    with pytest.raises(ValueError, match=r"no axis 'pipe'.*'pp'"):
        clip_grad_norm(None, parts, device_mesh=mesh, pp_axis_name="pipe")
    # The axis is not asked for where nothing is to be sent.
    norm = clip_grad_norm(None, parts, norm_type, False, mesh, "pipe")
    assert norm.item() == pytest.approx(wanted)


def test_scaling_divides_each_gradient_once(one_rank: None) -> None:
    first, second = two_parts()
    second.weight = first.weight  # one parameter on two stages of this rank
    second.bias.grad = None
    stages = [
        PipelineStage(part, index, 2, torch.device("cpu"))
        for index, part in enumerate((first, second))
    ]
    weight, bias = first.weight.grad.clone(), first.bias.grad.clone()
    storage = first.weight.grad.data_ptr()
    scale_grads_by_divisor(stages, 8)
    torch.testing.assert_close(first.weight.grad, weight / 8)
    torch.testing.assert_close(first.bias.grad, bias / 8)
    assert first.weight.grad.data_ptr() == storage
    assert second.bias.grad is None
    scale_grads_by_divisor(stages, 0.5)
    torch.testing.assert_close(first.bias.grad, bias / 4)
    scale_grads_by_divisor([], 3)


@pytest.mark.parametrize("divisor", [0, -2, math.nan, math.inf])
def test_divisors_that_make_no_sense(divisor: float) -> None:
    with pytest.raises(ValueError, match=f"divisor={divisor} must be a positive finite number"):
        scale_grads_by_divisor([], divisor)
