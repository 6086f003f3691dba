"""One rank of a measured step: two of a pipeline, profiled together."""

from __future__ import annotations

import planner
from tests.ranks import answer, task
from tests.small_models import Mlp, mlp_batch, seeded, squared_error


def main() -> None:
    asked = task()
    batch = mlp_batch(batch=8)
    fix = {"num_microbatches": 4, "schedule": "1f1b"}
    parallel = planner.compile(seeded(Mlp), "pp=2", example_inputs=batch, loss_fn=squared_error, fix=fix)
    parallel.train_step(*batch)
    with parallel.profile(asked["path"]):
        parallel.train_step(*batch)
    answer({})


if __name__ == "__main__":
    main()
