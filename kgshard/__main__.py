"""`python -m kgshard`, so that `torchrun -m kgshard train ...` works."""

from kgshard_tools.cli import main

if __name__ == "__main__":
    main()
