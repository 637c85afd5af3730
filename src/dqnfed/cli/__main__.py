"""`python -m dqnfed.cli`."""

from dqnfed.cli import main

main()
