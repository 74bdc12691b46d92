"""Pipeline-parallel training in one command: `autopipeline train`."""

from pp_recipe.options import OptionsError, TrainOptions

__all__ = ["OptionsError", "TrainOptions"]
