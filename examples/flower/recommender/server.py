"""The ServerApp: recleak's federation, recorded."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from recleak.deploy.flower import Federation, Recorder
from recommender.system import DEFENSES, MODEL, everybody, protocol

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds; the recording is complete when they are over."""
    config, data = context.run_config, everybody()
    plan = protocol(int(config["rounds"]))
    federation = Federation(
        MODEL,
        plan,
        n_users=data.n_users,
        n_items=data.n_items,
        defense=DEFENSES[str(config["defense"])],
        min_nodes=int(config["nodes"]),
    )
    recorder = Recorder(federation, Path(str(config["recording"])), source="examples/flower")
    recorder.start(grid, federation.first_arrays(), num_rounds=plan.rounds, timeout=150)
