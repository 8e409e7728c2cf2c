"""`python -m manyhands` is the command line."""

from .cli import main

main()
