"""Tiny vision-language models, made from configs, and batches of text, images and videos for them."""

from dataclasses import dataclass
from typing import Any

import torch
from oracle import Case
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

IMAGE, VIDEO, START, END = 60, 61, 62, 63
PATCH, MERGE, SEQ_LEN = 4, 2, 32
NUM_IMAGES = (0, 1, 2, 0, 0, 0, 1, 2)  # of the rows; of two a microbatch, one has none at all
GRIDS = ((1, 4, 4), (1, 2, 6), (1, 6, 4), (1, 2, 2), (1, 8, 2))
VIDEO_GRIDS = ((2, 4, 2), (3, 2, 4))
# Decoder layers that take features of the vision tower, the first ones.
NUM_DEEPSTACK = 2

_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "patch_size": PATCH}
_GRID_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": PATCH}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}

# What makes each architecture differ from a text model behind one projection is turned on.
VLMS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama"},
        "vision_config": {
            **_TOWER, "model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": 8,
        },
        "image_token_index": IMAGE,
        "vision_feature_layer": [-2, -1],
    },
    "pixtral": {
        "text_config": {"model_type": "mistral", "sliding_window": 6},
        "vision_config": {
            **_TOWER, "model_type": "pixtral", "num_hidden_layers": 2, "image_size": 32,
            "patch_size": PATCH * MERGE,
        },
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text",
            "sliding_window": 6,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 4,
            "final_logit_softcapping": 5.0,
        },
        "vision_config": {
            **_TOWER, "model_type": "siglip_vision_model", "num_hidden_layers": 2, "image_size": 16,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
    },
    "qwen2_vl": {
        "text_config": {**_WINDOWS, "rope_parameters": _MROPE},
        "vision_config": {
            "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": PATCH,
        },
        **_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": {**_WINDOWS, "rope_parameters": _MROPE},
        "vision_config": {
            **_GRID_TOWER, "depth": 2, "out_hidden_size": 32, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {
            "rope_parameters": {**_MROPE, "mrope_interleaved": True}, "attention_bias": True,
        },
        "vision_config": {
            **_GRID_TOWER, "depth": 3, "out_hidden_size": 32, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 2],
        },
        **_TOKENS,
    },
}  # fmt: skip
GRID_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@dataclass(frozen=True)
class VisionCase(Case):
    """One training run of a vision-language model; `batch` is a kind of `image_batch`."""

    def model(self) -> PreTrainedModel:
        return tiny_vlm(self.family, sum(self.layer_counts), self.dtype)

    def inputs(self, seed: int) -> dict[str, torch.Tensor]:
        return image_batch(self.family, self.batch, self.rows, seed)


def tiny_vlm(
    name: str, num_layers: int, dtype: torch.dtype = torch.float64, **overrides: Any
) -> PreTrainedModel:
    """Return a random model, the same in every process; `name` is one of `VLMS`."""
    settings = {"tie_word_embeddings": False, **VLMS[name], **overrides}
    text = {**_TEXT, **settings.pop("text_config"), "num_hidden_layers": num_layers}
    model_type = "llava" if name == "pixtral" else name
    config = AutoConfig.for_model(model_type, text_config=text, **settings)
    torch.manual_seed(11)
    model = AutoModelForImageTextToText.from_config(config)
    # Norms start as ones and biases as zeros, under which many a fault would not show.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def image_batch(name: str, kind: str, rows: int, seed: int) -> dict[str, Any]:
    """Return `input_ids`, `target` and the model's further arguments.

    Args:
        name: One of `VLMS`.
        kind: "text" (no images, padded), "images" (padded; rows with none, one and two, of differing
            sizes where the model takes them), "videos" (two videos beside the images).
        rows: Batch size.
        seed: Of ids and pixels.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [0] * rows if kind == "text" else [NUM_IMAGES[row % 8] for row in range(rows)]
    videos = {3: 0, rows - 2: 1} if kind == "videos" else {}
    sizes = [GRIDS[(i + seed) % len(GRIDS)] for i in range(sum(counts))]
    remaining = iter(sizes)
    ids = torch.randint(3, IMAGE, (rows, SEQ_LEN), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        padding = row % 4
        at = padding + 2 if row % 2 == 0 else 1
        runs = [[IMAGE] * _num_tokens(name, next(remaining)) for _ in range(counts[row])]
        if row in videos:
            runs += _video_runs(name, VIDEO_GRIDS[videos[row]])
        for run in runs:
            placed = [START, *run, END]
            ids[row, at : at + len(placed)] = torch.tensor(placed)
            at += len(placed) + 1
        assert at <= SEQ_LEN - 4
        (mask[row, :padding] if row % 2 == 0 else mask[row, SEQ_LEN - padding :]).zero_()
    ids = ids.masked_fill(mask == 0, 0)
    target = torch.randint(3, IMAGE, ids.shape, generator=generator)
    target = target.masked_fill((mask == 0) | (ids >= IMAGE), -100)
    batch = {"input_ids": ids, "target": target, "attention_mask": mask}
    types = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    if name == "gemma3":
        batch["token_type_ids"] = types
    elif name in GRID_MODELS:
        batch["mm_token_type_ids"] = types
    return batch | _pixels(name, sizes, generator) | _videos(name, len(videos), generator)


def _num_tokens(name: str, grid: tuple[int, ...]) -> int:
    t, h, w = grid
    return 4 if name in ("llava", "gemma3") else t * h * w // MERGE**2


def _video_runs(name: str, grid: tuple[int, ...]) -> list[list[int]]:
    t, h, w = grid
    frame = [VIDEO] * (h * w // MERGE**2)
    return [frame] * t if name == "qwen3_vl" else [frame * t]  # it has a time stamp for each


def _pixels(name: str, sizes: list[tuple[int, ...]], generator: torch.Generator) -> dict[str, Any]:
    if not sizes:
        return {}
    if name in GRID_MODELS:
        grid = torch.tensor(sizes)
        return {"pixel_values": _patches(grid, generator), "image_grid_thw": grid}
    pixels = {"llava": 8, "gemma3": 16, "pixtral": 32}[name]
    values = torch.randn((len(sizes), 3, pixels, pixels), generator=generator)
    if name == "pixtral":
        return {"pixel_values": values, "image_sizes": torch.tensor(sizes)[:, 1:] * PATCH}
    return {"pixel_values": values}


def _videos(name: str, count: int, generator: torch.Generator) -> dict[str, Any]:
    if not count:
        return {}
    grid = torch.tensor(VIDEO_GRIDS[:count])
    videos: dict[str, Any] = {"pixel_values_videos": _patches(grid, generator)}
    if name == "qwen2_5_vl":
        videos["second_per_grid_ts"] = [0.5, 1.0][:count]
    return videos | {"video_grid_thw": grid}


def _patches(grid: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    rows = int(grid.prod(dim=-1).sum())
    return torch.randn((rows, 3 * 2 * PATCH**2), generator=generator)
