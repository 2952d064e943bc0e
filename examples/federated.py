"""Train a federated recommender under a defense, record what the server sees, and attack the recording.

`python examples/federated.py` (seconds; the embedded data).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recleak.attacks.base import Knowledge, State, WhichItems
from recleak.data.interactions import Interactions
from recleak.data.split import leave_one_out
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.noise import GaussianNoise
from recleak.metrics.ranking import rank
from recleak.models.mf import MF
from recleak.protocols.federated import Federated, train_federated
from recleak.recording import Recorder, replay
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import Adam
from recleak.wire import Server, ServerMessage, Upload


@dataclass(frozen=True)
class MovedRows:
    """How far a client's item rows moved in all. It tells items that were touched from items that were not."""

    vantage = Server

    def init(self, knowledge: Knowledge) -> State:
        """Nobody has moved anything."""
        return {"moved": torch.zeros(knowledge.n_users, knowledge.n_items)}

    def fold(self, knowledge: Knowledge, state: State, message: ServerMessage) -> State:
        """Add the length of each row's change."""
        if not isinstance(message, Upload):
            return state
        update = message.update
        place = update.client[update.owner], update.item
        return {"moved": state["moved"].index_put(place, update.rows["item"].norm(dim=1), accumulate=True)}

    def answer(self, knowledge: Knowledge, state: State, question: WhichItems) -> Tensor:
        """Higher is more likely."""
        return state["moved"][question.client, question.item]


def main() -> None:
    """The same training without and with a defense."""
    split = leave_one_out(Synthetic(n_users=300, n_items=400).generate(), seed=0)
    protocol = Federated(rounds=20, fraction=0.3, local=LocalTraining(epochs=2, optimizer=Adam(0.01)))
    defenses: dict[str, Defense] = {
        "no defense": Chain(()),
        "clip 1, noise 0.02 on all rows": Chain((ClipByNorm(1.0), GaussianNoise(0.02, rows="all"))),
    }
    model, attack = MF(16), MovedRows()
    known = Knowledge(model, split.train.n_users, split.train.n_items, model.components())
    for name, defense in defenses.items():
        with tempfile.TemporaryDirectory() as folder:
            recorder = Recorder(Server(), Path(folder) / "seen", components=model.components())
            trained = train_federated(protocol, model, split.train, defense=defense, taps=[recorder])
            state = attack.init(known)
            for message in replay(Path(folder) / "seen"):
                if (seen := Server().sees(message)) is not None:
                    state = attack.fold(known, state, seen)
        hit = rank(trained, split.train, split.test).hit(10).mean()
        print(
            f"{name:32} Hit@10 {hit:.3f}; attack AUC {mean_auc(attack, known, state, split.train):.2f} (0.50 is chance)"
        )


def mean_auc(attack: MovedRows, known: Knowledge, state: State, train: Interactions) -> float:
    """The chance that an item of a user scores above one that is not its own; the mean over users."""
    values = []
    for user, owned in enumerate(train.matrix().toarray() > 0):
        score = attack.answer(known, state, WhichItems(torch.full((train.n_items,), user), torch.arange(train.n_items)))
        mine, other = score[torch.from_numpy(owned)][:, None], score[torch.from_numpy(~owned)]
        values.append(((mine > other).float() + 0.5 * (mine == other).float()).mean().item())
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
