"""`python -m rwkv_spec` and `accelerate launch -m rwkv_spec`: the command line."""

from __future__ import annotations

import sys

from rwkv_spec.cli import main

if __name__ == "__main__":
    sys.exit(main())
