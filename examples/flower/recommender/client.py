"""The ClientApp, for the users that a SuperNode is started with: `--node-config 'users="0"'` or `'users="2,3,4"'`."""

from __future__ import annotations

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from recleak.deploy.flower import Cohort, client_app
from recommender.system import DEFENSES, MODEL, everybody, protocol


def cohort(context: Context) -> Cohort:
    """The interactions of the users behind this SuperNode, and of nobody else."""
    users = [int(each) for each in str(context.node_config["users"]).split(",")]
    data = everybody()
    return Cohort(data.take(np.isin(data.user, users)))


app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Which defense is in force is part of the run's configuration."""
    rounds, defense = int(context.run_config["rounds"]), DEFENSES[str(context.run_config["defense"])]
    return client_app(MODEL, protocol(rounds), cohort, defense=defense)(message, context)
