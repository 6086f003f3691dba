"""One rank of an example, ``example_worker.py NAME [OPTION…]``: its models are traced by one rank for all of them."""

from __future__ import annotations

import runpy
import sys

from tests.rank_server import ROOT
from tests.tracing import traced_once

if __name__ == "__main__":
    script = str(ROOT / "examples" / f"{sys.argv[1]}.py")
    sys.argv = [script, *sys.argv[2:]]
    with traced_once():
        runpy.run_path(script, run_name="__main__")
