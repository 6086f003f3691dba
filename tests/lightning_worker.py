"""One rank of the test of a Lightning script on plans; rank 0 says what was logged."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.hugging_face_cases import FULL
from tests.lightning_cases import lightning_script
from tests.ranks import answer, task
from tests.tracing import traced_once


def main() -> None:
    folder = Path(task())
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    first = lightning_script("pp=2", str(folder / "pp"), sizes=FULL, max_epochs=1, own_loss=False, precision="64-true")
    path = first.checkpoint_callback.best_model_path
    second = lightning_script("tp=2", str(folder / "tp"), sizes=FULL, resume=str(folder / "stock.ckpt"))
    logged = {"pp=2": first, "resumed on tp=2": second}
    answer({"path": path, **{name: runner.lightning_module.logged for name, runner in logged.items()}})


if __name__ == "__main__":
    torch.set_num_threads(1)
    with traced_once():
        main()
