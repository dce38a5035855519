"""`python -m accelerate_nb` is `accelerate-nb`."""

import sys

from accelerate_nb.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
