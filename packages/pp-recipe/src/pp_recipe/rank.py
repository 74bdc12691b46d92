"""One rank as `launch` starts it: `python -m pp_recipe.rank OPTIONS`, options as JSON."""

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import record

from pp_recipe.options import TrainOptions


@record
def run(options: TrainOptions) -> None:
    """Train; an exception, also one of the imports, is put on file for the launcher."""
    from pp_recipe.train import train

    train(options)


if __name__ == "__main__":
    try:
        run(TrainOptions.from_json(sys.argv[1]))
    except Exception:
        # The launcher reports it. Leaving at once tells the other ranks; an orderly end would
        # wait for them, and they wait for this one.
        os._exit(1)
