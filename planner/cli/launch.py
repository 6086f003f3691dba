"""Start a program on several processes of this machine, through torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def launch(command: Sequence[str], *, num_processes: int) -> int:
    """Run ``command`` (a script and its arguments, or ``-m module …``) on ``num_processes``; returns the exit code.

    Raises:
        ValueError: if ``num_processes`` is not positive.
    """
    if num_processes < 1:
        raise ValueError(f"the number of processes must be at least 1, got {num_processes}")
    environment = dict(os.environ)
    # Without a limit every process would start one thread for each core.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    return subprocess.run([*torchrun, *command], env=environment, check=False).returncode
