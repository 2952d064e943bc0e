"""recleak measures what a recommender system leaks about its users, to whom, and what stopping it costs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recleak.experiment import Experiment
    from recleak.findings import Findings

# Where torch multiplies by Intel's MKL: a product's last bits shall not depend on where in memory a client lies. It is
# read at the first product of a process.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__version__ = "0.1.0"
__all__ = ["__version__", "audit"]


def audit(
    experiment: Experiment | Mapping[str, Any] | Path | str | None = None,
    *,
    out: Path | str = "runs/audit",
    workers: int = 1,
    executor: str | None = None,
    **fields: Any,
) -> Findings:
    """Attack every system of an experiment and grade the attacks: what `recleak audit` does.

    `experiment` is a TOML file, the same as a mapping, or None for the quick start; `fields` replace its fields, as in
    `audit(data="ml-100k", defenses=["none", {"use": "proximal", "strength": 0.1}], seeds=5)`. The run directory `out`
    is reused: what is measured in it is not measured again. With more than one worker the caller must be importable
    (`if __name__ == "__main__":`). `executor` is `ray` or `ray://HOST:10001`: cells are measured on a Ray cluster.
    """
    from recleak import experiment as experiments
    from recleak.runs import audit_run

    if isinstance(experiment, experiments.Experiment):
        table: Mapping[str, Any] = experiment.model_dump()
    elif experiment is None:
        table = experiments.quick_start()
    else:
        table = experiment if isinstance(experiment, Mapping) else experiments.read(Path(experiment))
    made = experiments.experiment(experiments.with_fields(table, fields))
    cluster = None
    if executor is not None:
        from recleak.deploy.ray import RayCluster

        cluster = RayCluster(executor)
    return audit_run(made, Path(out), workers=workers, command="recleak.audit(...)", cluster=cluster)
