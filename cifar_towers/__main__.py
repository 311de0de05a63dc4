"""`python -m cifar_towers <program>` is the command `cifar-towers <program>`."""

import sys

from cifar_towers.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
