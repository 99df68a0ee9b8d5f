"""``python -m cunorm``; the commands are in `cunorm.cli`."""

from __future__ import annotations

import sys
import time

_STARTED = time.monotonic()


def main() -> int:
    """Run the command line; the exit code is 0, 2 for arguments that cannot be used, 1 for output that cannot be."""
    from cunorm.cli import run

    return run(sys.argv[1:], started=_STARTED)


if __name__ == "__main__":
    sys.exit(main())
