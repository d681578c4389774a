"""``python -m chainer_hybridmem``: the command line without its console script."""

import sys

from chainer_hybridmem.commands import main

if __name__ == '__main__':
    sys.exit(main())
