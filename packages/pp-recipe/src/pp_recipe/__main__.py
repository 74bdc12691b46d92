"""`python -m pp_recipe` is the `autopipeline` command."""

from pp_recipe.cli import main

main()
