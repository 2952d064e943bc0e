"""Your own model, a plain `nn.Module`: federated, attacked, defended. `python examples/own_model.py`, seconds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recleak.attacks.alignment import GradientAlignment
from recleak.attacks.base import Knowledge, WhichItems
from recleak.data.split import leave_one_out
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.noise import GaussianNoise
from recleak.grading import grade_items, pairs_seen, truth_of
from recleak.metrics.ranking import rank
from recleak.models.adapter import TorchModel
from recleak.protocols.federated import Federated, train_federated
from recleak.recording import Listening
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import Adam
from recleak.wire import Server, ServerMessage


class Tower(nn.Module):
    """A user's vector through a layer, by an item's vector, plus the item's bias."""

    def __init__(self, users: int, items: int, factors: int = 16) -> None:
        super().__init__()
        sizes = (users, factors), (items, factors), (items, 1)
        self.user, self.item, self.bias = (nn.Embedding(*size, _weight=0.1 * torch.randn(size)) for size in sizes)
        self.layer = nn.Linear(factors, factors)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """One logit for each pair."""
        score: Tensor = (torch.tanh(self.layer(self.user(user))) * self.item(item)).sum(-1) + self.bias(item)[:, 0]
        return score


def adapted(users: int, items: int) -> TorchModel:
    """What has a row for each user stays with the user; the rest is sent."""
    torch.manual_seed(0)
    return TorchModel(Tower(users, items), per_user=("user.weight",), per_item=("item.weight", "bias.weight"))


DEFENSES = {"no defense": Defense(), "clip, noise": Chain((ClipByNorm(1.0), GaussianNoise(0.05, rows="all")))}
PROTOCOL = Federated(rounds=10, clients_per_round=30, local=LocalTraining(epochs=5, optimizer=Adam(0.02)))

if __name__ == "__main__":
    split = leave_one_out(Synthetic(n_users=150, n_items=300, mean_activity=40).generate())
    train, model = split.train, adapted(split.train.n_users, split.train.n_items)
    for name, defense in DEFENSES.items():
        known = Knowledge(model, train.n_users, train.n_items, model.components(), PROTOCOL.local, defense)
        tap: Listening[ServerMessage, WhichItems] = Listening(Server(), GradientAlignment(), known)
        trained = train_federated(PROTOCOL, model, train, defense=defense, taps=[tap], show_progress=False)
        question = pairs_seen(tap.state(), train.n_items)
        auc = grade_items(question, tap.answer(question), truth_of(question, train)).auc.value.mean()
        print(f"{name:12} Hit@10 {rank(trained, train, split.test).hit(10).mean():.3f}  attack AUC {auc:.2f}")
