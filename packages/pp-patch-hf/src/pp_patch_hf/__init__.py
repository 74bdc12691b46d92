"""A pruned Hugging Face model that runs as a pipeline stage with its own forward."""

from pp_patch_hf.boundary import Boundary
from pp_patch_hf.differ import Difference, first_difference
from pp_patch_hf.patch import PipelinePatch, patch_hf_model_for_pp
from pp_patch_hf.shrink import shrink_config
from pp_patch_hf.verify import CutReport, VerifyReport, verify_pipeline

__all__ = [
    "Boundary",
    "CutReport",
    "Difference",
    "PipelinePatch",
    "VerifyReport",
    "first_difference",
    "patch_hf_model_for_pp",
    "shrink_config",
    "verify_pipeline",
]
