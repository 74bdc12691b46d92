"""AutoPipeline: pipeline-parallel training of Hugging Face models in your own loop."""

from pp_autopipeline.autopipeline import AutoPipeline, AutoPipelineInfo, StepOutput
from pp_autopipeline.checkpoints import Checkpoints, Resumed
from pp_autopipeline.config import PipelineConfig
from pp_autopipeline.data import DataParallelSampler
from pp_autopipeline.estimate import estimate_costs
from pp_autopipeline.functional import pipeline_model
from pp_autopipeline.loss_probe import find_loss_reduction
from pp_autopipeline.measure import measure_costs
from pp_autopipeline.pipeline import ParallelizeFnProtocol
from pp_autopipeline.planning import ModelPlan, plan_model
from pp_autopipeline.stage_summary import StageSummary
from pp_mesh import DistInfo, ParallelSizes, build_mesh, initialize_distributed
from pp_patch_hf import patch_hf_model_for_pp
from pp_schedule import (
    Balance,
    Costs,
    build_pipeline_schedule,
    calculate_virtual_stages,
    clip_grad_norm,
    resolve_schedule,
    scale_grads_by_divisor,
    stage_ids_this_rank,
)
from pp_split_hf import (
    CheckpointError,
    generate_hf_model_fqn_per_model_part,
    init_empty_weights,
    validate_hf_model_for_pipeline_support,
)

__all__ = [
    "AutoPipeline",
    "AutoPipelineInfo",
    "Balance",
    "CheckpointError",
    "Checkpoints",
    "Costs",
    "DataParallelSampler",
    "DistInfo",
    "ModelPlan",
    "ParallelSizes",
    "ParallelizeFnProtocol",
    "PipelineConfig",
    "Resumed",
    "StageSummary",
    "StepOutput",
    "build_mesh",
    "build_pipeline_schedule",
    "calculate_virtual_stages",
    "clip_grad_norm",
    "estimate_costs",
    "find_loss_reduction",
    "generate_hf_model_fqn_per_model_part",
    "init_empty_weights",
    "initialize_distributed",
    "measure_costs",
    "patch_hf_model_for_pp",
    "pipeline_model",
    "plan_model",
    "resolve_schedule",
    "scale_grads_by_divisor",
    "stage_ids_this_rank",
    "validate_hf_model_for_pipeline_support",
]
