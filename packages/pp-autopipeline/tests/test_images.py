import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pp_autopipeline import AutoPipeline
from pp_autopipeline.images import ImageRules, place_images

IMAGE, VIDEO = 60, 61
CPU = torch.device("cpu")


def rules(merge_size: int = 2, patch_size: int = 4, **others: Any) -> ImageRules:
    vision = SimpleNamespace(spatial_merge_size=merge_size, patch_size=patch_size)
    config = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_config": vision, **others}
    found = ImageRules.of(SimpleNamespace(**config))
    assert found is not None
    return found


def ids(images: list[int], videos: list[int] | None = None, length: int = 12) -> torch.Tensor:
    """Rows with so many placeholder tokens each."""
    rows = torch.zeros((len(images), length), dtype=torch.long)
    for row, count in zip(rows, images, strict=True):
        row[1 : 1 + count] = IMAGE
    for row, count in zip(rows, videos or [], strict=False):
        row[length - count :] = VIDEO
    return rows


def numbered(rows: int, *dims: int) -> torch.Tensor:
    return torch.arange(rows).reshape(-1, *[1] * len(dims)).expand(rows, *dims)


def given_to(
    rules: ImageRules,
    input_ids: torch.Tensor,
    kwargs: dict[str, Any],
    count: int,
    is_first: bool = True,
    has_first: bool = True,
) -> list[dict[str, Any]]:
    """What a stage's module is called with, by microbatch."""
    images, others = rules.cut(input_ids, kwargs, count)
    assert images is not None
    keywords, dims = images.keywords(CPU, has_first)
    assert list(dims.values()) == [0, None]
    number, table = keywords.values()
    module = Echo()
    place_images(module, is_first)
    return [
        module(**others, **dict(zip(dims, (each, table), strict=True)))
        for each in number.tensor_split(count)
    ]


class Echo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, **kwargs: Any) -> dict[str, Any]:
        return kwargs


GRID = torch.tensor([[1, 2, 4], [1, 4, 4], [1, 2, 2], [2, 2, 2]])  # 2, 4, 1 and 2 tokens


def test_patches_and_grid() -> None:
    kwargs = {"pixel_values": numbered(36, 5), "image_grid_thw": GRID, "use_cache": False}
    first, second, third, fourth = given_to(rules(), ids([0, 2, 0, 0, 5, 2, 0, 0]), kwargs, 4)
    assert first["pixel_values"][:, 0].tolist() == list(range(8))
    assert first["image_grid_thw"].tolist() == GRID[:1].tolist()
    assert first["use_cache"] is False
    # A batch without the grid would count its positions in another way.
    assert second.keys() == fourth.keys() == {"use_cache", "image_grid_thw"}
    assert second["image_grid_thw"].shape == (0, 3)
    assert third["pixel_values"][:, 0].tolist() == list(range(8, 36))
    assert third["image_grid_thw"].tolist() == GRID[1:].tolist()


@pytest.mark.parametrize("has_first", [True, False])
def test_later_stages_get_no_pixels(has_first: bool) -> None:
    kwargs = {"pixel_values": numbered(36, 5), "image_grid_thw": GRID}
    for entry in given_to(rules(), ids([2, 0, 5, 2]), kwargs, 2, False, has_first):
        assert entry.keys() == {"image_grid_thw"}


@pytest.mark.parametrize("tokens", [1, 3])
def test_images_of_one_size(tokens: int) -> None:
    """How many tokens an image has is found from their sum."""
    input_ids = ids([0, tokens, 2 * tokens, 0, 0, 0, tokens, tokens])
    entries = given_to(rules(), input_ids, {"pixel_values": numbered(5, 3, 8, 8)}, 4)
    assert [e["pixel_values"][:, 0, 0, 0].tolist() for e in entries if e] == [[0], [1, 2], [3, 4]]
    assert entries[2] == {}


def test_images_of_many_sizes() -> None:
    sizes = torch.tensor([[8, 16], [16, 16], [8, 8]])
    kwargs = {"pixel_values": numbered(3, 3, 16, 16), "image_sizes": sizes}
    first, second = given_to(rules(), ids([2, 4, 0, 1]), kwargs, 2)
    assert first["image_sizes"].tolist() == [[8, 16], [16, 16]]
    assert second["pixel_values"][:, 0, 0, 0].tolist() == [2]
    # Tokens that the sizes do not tell are as many for each if all have one size.
    kwargs = {"pixel_values": numbered(3, 3, 16, 16), "image_sizes": sizes[:1].repeat(3, 1)}
    first, second = given_to(rules(), ids([5, 0, 0, 10]), kwargs, 2)
    assert [len(first["pixel_values"]), len(second["pixel_values"])] == [1, 2]


def test_videos_beside_images() -> None:
    kwargs = {
        "pixel_values": numbered(24, 5),
        "image_grid_thw": GRID[:2],
        "pixel_values_videos": numbered(12, 5),
        "video_grid_thw": GRID[2:],
        "second_per_grid_ts": [0.5, 2.0],
    }
    input_ids = ids([2, 4, 0, 0], [0, 1, 2, 0])
    first, second = given_to(rules(), input_ids, kwargs, 2)
    assert [len(first["pixel_values"]), len(first["pixel_values_videos"])] == [24, 4]
    assert first["second_per_grid_ts"] == [0.5]
    assert second.keys() == kwargs.keys() - {"pixel_values"}
    assert second["second_per_grid_ts"] == [2.0]
    (later, _) = given_to(rules(), input_ids, kwargs, 2, is_first=False)
    assert later.keys() == {"image_grid_thw", "video_grid_thw", "second_per_grid_ts"}


def test_every_microbatch_has_its_own_rows_images() -> None:
    """Whatever images the rows have, the pieces are the whole, and fit their placeholder tokens."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        counts = torch.randint(0, 4, (12,), generator=generator).tolist()
        grid = torch.randint(1, 4, (sum(counts), 3), generator=generator)
        grid[:, 1:] *= 2
        tokens = (grid.prod(-1) // 4).tolist()
        ends = list(itertools.accumulate(counts, initial=0))
        rows = [sum(tokens[start:end]) for start, end in itertools.pairwise(ends)]
        input_ids = ids(rows, length=64)
        patches = torch.arange(4 * sum(tokens)).unsqueeze(1)
        for count in (1, 3, 12):
            entries = given_to(
                rules(), input_ids, {"pixel_values": patches, "image_grid_thw": grid}, count
            )
            pixels = [entry.get("pixel_values", patches[:0]) for entry in entries]
            assert torch.equal(torch.cat(pixels), patches)
            assert torch.equal(torch.cat([entry["image_grid_thw"] for entry in entries]), grid)
            placeholders = [int((part == IMAGE).sum()) for part in input_ids.chunk(count)]
            assert [len(part) // 4 for part in pixels] == placeholders


def test_text_alone() -> None:
    kwargs = {"attention_mask": numbered(2, 12), "pixel_values": None}
    assert rules().cut(ids([0, 0]), kwargs, 2) == (None, kwargs)
    assert ImageRules.of(SimpleNamespace(vocab_size=64)) is None
    assert ImageRules.of(None) is None


@pytest.mark.parametrize(
    ("in_rows", "kwargs", "said"),
    [
        ([2, 7], {"pixel_values": numbered(36, 5)}, ("without image_grid_thw",)),
        ([2, 7], {"image_sizes": GRID[:, 1:]}, ("image_sizes", "without pixel_values")),
        (
            [2, 7],
            {"pixel_values": numbered(35, 5), "image_grid_thw": GRID},
            ("pixel_values has 35 rows", "4 images of image_grid_thw", "36 patches"),
        ),
        ([2, 6], {"image_grid_thw": GRID}, ("4 images given take 9", "input_ids has 8")),
        (
            [3, 6],
            {"image_grid_thw": GRID},
            ("row 0 of input_ids has 3", "images 0 to 1", "take 6"),
        ),
        (
            [4, 5],
            {"pixel_values": numbered(4, 3, 8, 8)},
            ("pixel_values has 4 images", "input_ids 9 image"),
        ),
        ([0, 0], {"pixel_values": numbered(4, 3, 8, 8)}, ("4 images", "input_ids 0 image")),
        (
            [2, 4],
            {"pixel_values": numbered(2, 3, 8, 8)},
            ("row 0 of input_ids has 2", "images 0 to 0", "take 3"),
        ),
        (
            [4, 4],
            {"pixel_values": numbered(2, 3, 8, 8), "image_sizes": torch.tensor([[8, 8], [8, 16]])},
            ("image_sizes", "3 patches", "the 8 image placeholder tokens"),
        ),
        (
            [2, 1],
            {"pixel_values": numbered(3, 3, 8, 8), "image_sizes": torch.tensor([[8, 8], [8, 16]])},
            ("pixel_values has 3 rows for 2 images",),
        ),
        (
            [0, 0],
            {"pixel_values_videos": [numbered(2, 3)], "video_grid_thw": GRID},
            ("pixel_values_videos is a list",),
        ),
        ([0, 0], {"image_position_ids": numbered(2, 3)}, ("image_position_ids cannot be cut",)),
    ],
)
def test_what_does_not_add_up(in_rows: list[int], kwargs: Any, said: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="cannot cut the images") as error:
        rules().cut(ids(in_rows), kwargs, 2)
    for each in said:
        assert each in str(error.value)


def test_every_problem_is_told_at_once() -> None:
    kwargs = {"pixel_values": numbered(3, 3, 8, 8), "video_grid_thw": GRID, "pixel_mask": GRID}
    with pytest.raises(ValueError, match="cannot cut the images") as error:
        rules(video_token_id=None).cut(ids([4, 4]), kwargs, 2)
    for each in ("pixel_mask cannot be cut", "no video_token_id", "pixel_values has 3 images"):
        assert each in str(error.value)


def test_what_wraps_a_module_sees_its_images(mesh: DeviceMesh) -> None:
    """FSDP casts the arguments of a module that it shards."""
    module = Echo()
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    place_images(module, is_first=True)
    images, _ = rules().cut(ids([2, 2]), {"pixel_values": torch.ones(2, 3, 8, 8)}, 1)
    assert images is not None
    keywords, _ = images.keywords(CPU, has_first=True)
    assert module(**keywords)["pixel_values"].dtype == torch.bfloat16


def test_a_text_model_has_no_part_in_it(mesh: DeviceMesh, llama: Callable[..., Any]) -> None:
    ap = AutoPipeline(mesh, pp_batch_size=2).build(llama())
    assert not ap.parts[0]._forward_pre_hooks
