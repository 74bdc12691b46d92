"""Which module of a Hugging Face model goes to which pipeline stage."""

from pp_split_hf.all_or_none import AllOrNone
from pp_split_hf.crossing import Crossing, Place, Slot
from pp_split_hf.empty import init_empty_weights
from pp_split_hf.fake_run import FakeModel, accepts, on_fake_tensors
from pp_split_hf.hub import resolve_checkpoint
from pp_split_hf.initialize import (
    allocate_stage_weights,
    initialize_stage_weights,
    move_stages,
)
from pp_split_hf.layout import ModelLayout, find_layout
from pp_split_hf.load import CheckpointWeights, load_stage_weights
from pp_split_hf.plan import (
    check_stage_fqns,
    generate_hf_model_fqn_per_model_part,
    plan_stage_fqns,
    spread_layers,
    spread_over_stages,
)
from pp_split_hf.prune import StagePart, skeleton_of, split_model_into_stages, stage_part
from pp_split_hf.router import RouterLoss, find_router_loss, router_modules
from pp_split_hf.safetensors_files import CheckpointError
from pp_split_hf.save import Saveable, save_pretrained_pipeline
from pp_split_hf.shapes import BoundaryShape
from pp_split_hf.stand_ins import IdentityStandIn, PassThroughLayer, Sizes, ZeroStandIn
from pp_split_hf.support import (
    check_config_support,
    check_pipeline_support,
    validate_hf_model_for_pipeline_support,
)
from pp_split_hf.ties import Tie, TiedParameters, find_ties
from pp_split_hf.trace import ForwardTrace, main_output, trace_forward

__all__ = [
    "AllOrNone",
    "BoundaryShape",
    "CheckpointError",
    "CheckpointWeights",
    "Crossing",
    "FakeModel",
    "ForwardTrace",
    "IdentityStandIn",
    "ModelLayout",
    "PassThroughLayer",
    "Place",
    "RouterLoss",
    "Saveable",
    "Sizes",
    "Slot",
    "StagePart",
    "Tie",
    "TiedParameters",
    "ZeroStandIn",
    "accepts",
    "allocate_stage_weights",
    "check_config_support",
    "check_pipeline_support",
    "check_stage_fqns",
    "find_layout",
    "find_router_loss",
    "find_ties",
    "generate_hf_model_fqn_per_model_part",
    "init_empty_weights",
    "initialize_stage_weights",
    "load_stage_weights",
    "main_output",
    "move_stages",
    "on_fake_tensors",
    "plan_stage_fqns",
    "resolve_checkpoint",
    "router_modules",
    "save_pretrained_pipeline",
    "skeleton_of",
    "split_model_into_stages",
    "spread_layers",
    "spread_over_stages",
    "stage_part",
    "trace_forward",
    "validate_hf_model_for_pipeline_support",
]
