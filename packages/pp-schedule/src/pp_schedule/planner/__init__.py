"""Which split, schedule and microbatch size to train with. No torch, but for torch's own orders."""

from pp_schedule.planner.judge import Candidate
from pp_schedule.planner.plan import Plan, plan

__all__ = ["Candidate", "Plan", "plan"]
