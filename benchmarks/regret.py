"""How much slower the planner's choice is than the best of eight schedules, on real ranks.

    python benchmarks/regret.py

Stages sleep (see `sleeping.py`), uneven ones, of a model with a heavy head. Each schedule has the
best split that the planner found for it. All run in turn, on torch's runtime over gloo. Regret is
the measured time of the planner's choice over that of the best.
"""

import argparse

from pipelines import run
from sleeping import sleeping_pipeline

from pp_schedule import Candidate, Costs, LayerCosts, Plan, plan

MEMORY = (1.0, 1.5)  # of what 1F1B takes with an even split


def main() -> None:
    """Print a table per number of ranks and memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=8.0, help="of a layer's forward")
    arguments = parser.parse_args()
    for pp_size in arguments.ranks:
        costs = costs_of(pp_size, arguments.milliseconds / 1000)
        free = plan(costs, pp_size, 2 * pp_size, effort=0.3)
        for share in MEMORY:
            limit = share * max(free.baseline.peak_memory)
            found = plan(costs, pp_size, 2 * pp_size, memory_limit=limit)
            print(f"\n{pp_size} ranks, {2 * pp_size} microbatches, {share} x 1F1B's memory")
            show(costs, found, arguments.steps)


def costs_of(pp_size: int, unit: float) -> Costs:
    """A model whose layers alternate and whose head costs as much as three; seconds."""
    layers = [LayerCosts(unit * (1.0 + i % 2 / 4), 1.1 * unit, 0.7 * unit, 1.0, 1.0)
              for i in range(3 * pp_size)]  # fmt: skip
    return Costs(
        layers,
        first=LayerCosts(parameter_bytes=2.0),
        last=LayerCosts(3 * unit, 3 * unit, 3 * unit, 2.0, 2.0),
        latency=0.0005,
        overhead=0.0005,
    )


def show(costs: Costs, found: Plan, steps: int) -> None:
    """Run the candidates and print what they took beside what was expected."""
    chosen = found.best
    tried = [c for c in eight_named(found) if c is not chosen]
    pipelines = [
        sleeping_pipeline(
            c.order, costs.for_stages(c.layer_counts), len(c.peak_memory), c.num_microbatches
        )
        for c in [chosen, *tried]
    ]
    measured = [result.seconds for result in run(pipelines, steps)]
    print(f"{'schedule':<24}{'per rank':>9}{'simulated ms':>14}{'measured ms':>13}{'ratio':>7}")
    for candidate, seconds in zip([chosen, *tried], measured, strict=True):
        style = " V" if candidate.style == "v" else ""
        print(
            f"{candidate.schedule:<24}{f'{candidate.stages_per_rank}{style}':>9}"
            f"{1000 * candidate.step_time:>14.1f}{1000 * seconds:>13.1f}"
            f"{seconds / candidate.step_time:>7.3f}{'  chosen' if candidate is chosen else ''}"
        )
    fitting = [s for c, s in zip([chosen, *tried], measured, strict=True) if c.fits]
    print(f"regret {measured[0] / min(fitting):.3f} (target: at most 1.03)")


def eight_named(found: Plan) -> list[Candidate]:
    """The named schedules, each where it is best, those that fit first, and eight at most."""
    named = [c for c in found.candidates if c.is_named]
    return sorted(named, key=lambda c: (not c.fits, c.expected_time))[:8]


if __name__ == "__main__":
    main()
