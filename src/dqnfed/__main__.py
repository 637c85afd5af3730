"""`python -m dqnfed` is the command `dqnfed`."""

from dqnfed.cli import main

if __name__ == "__main__":
    main()
