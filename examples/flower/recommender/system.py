"""What client and server have in common: the model, how it is trained, the defenses to choose from, who the users are.

A real client reads its own interactions from its device. Here they come from the embedded data, of which ten users take
part; what the others did is public, as sales figures are.
"""

from __future__ import annotations

from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.secure_aggregation import SecureAggregation
from recleak.models.ncf import NCF
from recleak.protocols.federated import Federated
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import Adam

USERS = 10
MODEL = NCF(factors=16, hidden=(32, 16))
DEFENSES: dict[str, Defense] = {
    "none": Defense(),
    "noise": Chain((ClipByNorm(1.0), GaussianNoise(0.1, rows="all"))),
    "sums": SecureAggregation(),  # a SuperNode sends the sum over its users
}


def protocol(rounds: int) -> Federated:
    """All SuperNodes in every round, three epochs on a device."""
    return Federated(rounds=rounds, local=LocalTraining(epochs=3, optimizer=Adam(0.005)))


def everybody() -> Interactions:
    """The embedded data, a small one."""
    return Synthetic(n_users=200, n_items=300, mean_activity=40).generate()
