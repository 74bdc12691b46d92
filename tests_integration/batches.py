"""Batches for parity tests: ids, labels in which some do not count, masks."""

from typing import Any

import torch

SEQ_LEN = 8


def make_batch(kind: str, rows: int, seed: int = 5, seq_len: int = SEQ_LEN) -> dict[str, Any]:
    """Return `input_ids`, `target` and the model's further arguments.

    Args:
        kind: "plain", "padded" (left and right, by row), "uneven" (padded; one microbatch in four
            has no label that counts, and the others have differing numbers).
        rows: Batch size.
        seed: Of the ids.
        seq_len: Length.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (rows, seq_len), generator=generator)
    target = torch.randint(3, 64, (rows, seq_len), generator=generator)
    if kind == "plain":
        return {"input_ids": ids, "target": target}
    mask = torch.ones_like(ids)
    for row in range(rows):
        padding = row % 4
        mask[row, :padding] = 0 if row % 2 else 1
        mask[row, seq_len - padding :] = 1 if row % 2 else 0
    target = target.masked_fill(mask == 0, -100)
    if kind == "uneven":
        target[: max(1, rows // 4)] = -100
        target[-1, 2:] = -100
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "target": target,
        "attention_mask": mask,
        "position_ids": position_ids,
    }
