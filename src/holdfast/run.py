"""`python -m holdfast.run`: the same as `holdfast run`, as `python -m torch.distributed.run` is to torchrun."""

import sys

from holdfast.cli.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
