"""Which items are a client's own? Four readers of the same uploads, under no defense, noise and a regularizer.

    python examples/membership.py

Nothing is downloaded. Every attack listens to the same run; each claims as many items as it believes there are.
"""

from __future__ import annotations

from recleak.attacks.alignment import GradientAlignment
from recleak.attacks.base import Knowledge, WhichItems
from recleak.attacks.membership import AllPositive, FromUploads, RandomGuess
from recleak.attacks.shadow import ShadowClients
from recleak.data.source import open_data
from recleak.data.split import leave_one_out
from recleak.defenses.base import Defense
from recleak.defenses.noise import GaussianNoise
from recleak.defenses.proximal import Proximal
from recleak.grading import grade_items, pairs_seen, truth_of
from recleak.models.ncf import NCF
from recleak.protocols.federated import Federated, train_federated
from recleak.recording import Listening
from recleak.training.cohort import LocalTraining
from recleak.wire import Server, ServerMessage

ATTACKS: dict[str, FromUploads] = {
    "random guess": RandomGuess(),
    "all touched items": AllPositive(),
    "IMIA's shadow clients": ShadowClients(),
    "gradient alignment": GradientAlignment(),
}
DEFENSES: dict[str, Defense] = {
    "no defense": Defense(),
    "noise 0.1 on what is sent": GaussianNoise(0.1),
    "IMIA's regularizer, mu 1": Proximal(1.0, norm="squared"),
}


def main() -> None:
    """Train once for each defense, with all attacks at the wire."""
    train = leave_one_out(open_data("synthetic")).train
    model, local = NCF(), LocalTraining(epochs=20)
    for name, defense in DEFENSES.items():
        known = Knowledge(model, train.n_users, train.n_items, model.components(), local, defense)
        taps: dict[str, Listening[ServerMessage, WhichItems]] = {
            attack: Listening(Server(), made, known) for attack, made in ATTACKS.items()
        }
        protocol = Federated(rounds=2, clients_per_round=20, local=local)
        train_federated(protocol, model, train, defense=defense, taps=list(taps.values()), show_progress=False)
        for attack, tap in taps.items():
            question = pairs_seen(tap.state(), train.n_items)
            graded = grade_items(question, tap.answer(question), truth_of(question, train))
            f1, auc = graded.f1.value.mean(), graded.auc.value.mean()
            print(f"{name:26} {attack:22} F1 {f1:.2f}  AUC {auc:.2f}")


if __name__ == "__main__":
    main()
