"""Attribute attacks: the contract, the exact leak on real runs, the parts against plain loops; and their grades."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recleak.attacks.attribute import (
    FromUpdates,
    KnownColumns,
    MajorityClass,
    Proportional,
    ThroughItems,
    TrueItems,
    known_labels,
    proportions,
)
from recleak.attacks.base import Knowledge, WhichAttribute
from recleak.attacks.learners import Logistic, Network
from recleak.attacks.membership import AllPositive
from recleak.attacks.rows import seen_rows
from recleak.data.synthetic import Synthetic
from recleak.defenses.adaptive_noise import AdaptiveNoise
from recleak.defenses.base import Defense
from recleak.defenses.noise import GaussianNoise
from recleak.errors import ConfigError
from recleak.models.base import Batch, Model, Params
from recleak.models.components import Component, Constant, Normal
from recleak.models.feature_gcn import FeatureGCN
from recleak.models.ncf import NCF
from recleak.protocols.federated import Federated, train_federated
from recleak.recording import Listening
from recleak.testing.attacks import AttackContract, Case, auc, chance_width
from recleak.training.chunks import one_thread
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import SGD, Adam, Optimizer
from recleak.update import Update
from recleak.wire import Broadcast, Message, Server, Upload

CLIENTS, ITEMS, FEATURES, FACTORS, KNOWN = 90, 30, 6, 3, 40
CLASSES = ("f", "m")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors are small here: threads that wait for each other take most of the time."""
    with one_thread():
        yield


# --- what a defense does by itself ------------------------------------------------------------------------------------


def clipped(still: Tensor, moved: Update, bound: float = 0.5) -> Update:
    """What a client sends whose values are clipped, number by number; `still` has all that was broadcast, f32[I, d]."""
    rows, name = moved.rows["item"].clone(), "item"
    for place, item in enumerate(moved.item.tolist()):
        for at in range(FACTORS):
            value = float(still[item, at] + moved.rows[name][place, at])
            rows[place, at] = min(max(value, -bound), bound) - float(still[item, at])
    return replace(moved, rows={name: rows})


@pytest.mark.parametrize("rounds", ["all", "last", 0])
def test_what_clipping_does_to_everybody_is_taken_away(rounds: Any) -> None:
    """Of who changed nothing, nothing is left; without it, the row of a first round is the broadcast's."""
    defense = AdaptiveNoise(levels={"user": 0, "item": 0, "head": 0}, moment="upload", rows="touched")
    known = replace(knowledge(torch.tensor([0, 1, 0])), defense=defense)
    generator = torch.Generator().manual_seed(3)
    received = {"item": 2 * torch.randn(ITEMS, FACTORS, generator=generator), "head.bias": torch.tensor(2.0)}
    received["user.encoder"] = torch.randn(FEATURES, FACTORS, generator=generator)
    item, offset = torch.tensor([1, 4, 7, 2, 4]), torch.tensor([0, 3, 3, 5])
    moved = Update(torch.arange(3), {}, {"item": torch.zeros(5, FACTORS)}, item, offset, ITEMS)
    moved.rows["item"][3:] = torch.randn(2, FACTORS, generator=generator)  # the last client alone trained
    sent = clipped(received["item"], moved)
    sent.values["head.bias"] = torch.full((3,), -1.5)  # 2 is clipped to 0.5 for all
    sent.values["user.encoder"] = (received["user.encoder"].clamp(-0.5, 0.5) - received["user.encoder"]).repeat(3, 1, 1)
    found = {}
    for shift in ("known", "ignored"):
        attack = FromUpdates(learner=Logistic(), rounds=rounds, shift=shift)
        state = attack.init(known)
        for message in (Broadcast(0, received), Upload(0, sent, torch.ones(3))):
            state = attack.fold(known, state, message)
        found[shift] = attack.read(state)[1]
    assert found["known"][:2].abs().max() < 1e-6
    assert found["ignored"][:2].abs().max() > 0.5
    value = (
        clipped(received["item"], moved).rows["item"][3:]
        - clipped(received["item"], moved_nothing(moved)).rows["item"][3:]
    )
    got = found["known"][2, FEATURES * FACTORS : -1].view(ITEMS, FACTORS)
    torch.testing.assert_close(got[item[3:]], value)
    assert got[[1, 7]].abs().max() == 0  # it did not send these
    exact = KnownColumns(rounds=rounds)
    state = exact.init(known)
    for message in (Broadcast(0, received), Upload(0, sent, torch.ones(3))):
        state = exact.fold(known, state, message)
    assert seen_rows(state)[1].abs().max() < 1e-6


def moved_nothing(moved: Update) -> Update:
    return replace(moved, rows={"item": torch.zeros_like(moved.rows["item"])})


# --- the contract -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toy(Model):
    """An item table, a matrix of user features and a bias, all sent."""

    def components(self) -> tuple[Component, ...]:
        return (
            Component("user.encoder", "dense", "user", (FEATURES, FACTORS)),
            Component("item", "per_item", "item", (FACTORS,)),
            Component("head.bias", "dense", "head", (), Constant()),
        )

    def logits(self, params: Params, batch: Batch) -> Tensor:
        raise AssertionError("no attack here asks for it")


def knowledge(label: Tensor, known: int = KNOWN, **public: Tensor) -> Knowledge:
    """The labels of the first users are known, and that the last two features are the two classes."""
    told = torch.where(torch.arange(len(label)) < known, label, -1)
    given = {"labels of sex": told, "columns of sex": torch.tensor([4, 5]), **public}
    return Knowledge(Toy(), len(label), ITEMS, Toy().components(), LocalTraining(), public=given)


def uploads(label: Tensor, of: Tensor, rounds: int = 3, seed: int = 0) -> list[Message]:
    """Clients send rows and features as the class `of` does; one group touches and moves early items, one late ones."""
    generator = torch.Generator().manual_seed(seed)
    n = len(label)
    likely = torch.where(torch.arange(ITEMS) < ITEMS // 2, of.unsqueeze(1), 1 - of.unsqueeze(1)).float()  # f32[C, I]
    messages: list[Message] = []
    for number in range(rounds):
        messages.append(Broadcast(number, {"item": torch.zeros(ITEMS, FACTORS), "head.bias": torch.zeros(())}))
        sent = torch.rand(n, ITEMS, generator=generator) < 0.1 + 0.6 * likely
        item = sent.nonzero()[:, 1]
        rows = 1 + 0.1 * torch.randn(len(item), FACTORS, generator=generator)
        features = torch.cat([torch.rand(n, 4, generator=generator), torch.eye(2)[of]], dim=1)
        move = torch.randn(n, 1, FACTORS, generator=generator)
        update = Update(
            torch.arange(n),
            {"user.encoder": features.unsqueeze(2) * move, "head.bias": torch.randn(n, generator=generator)},
            {"item": rows},
            item,
            torch.cat([torch.zeros(1, dtype=torch.int64), sent.sum(1).cumsum(0)]),
            ITEMS,
        )
        messages += [Upload(number, update.select(part), torch.ones(len(part))) for part in torch.arange(n).chunk(2)]
    return messages


def case(*, related: bool) -> Case:
    generator = torch.Generator().manual_seed(1)
    label, other = (torch.randint(2, (CLIENTS,), generator=generator) for _ in range(2))
    question = WhichAttribute(torch.arange(KNOWN, CLIENTS), "sex", CLASSES)
    messages = uploads(label, label if related else other)
    return Case(Server(), knowledge(label), messages, question, label[KNOWN:] == 1)


class OnAttributes(AttackContract):
    """The contract with two classes: the probability of the second is the score."""

    def planted(self) -> Case:
        return case(related=True)

    def unrelated(self) -> Case:
        return case(related=False)

    def _answer(self, case: Case) -> Tensor:
        return super()._answer(case)[:, 1]

    def test_the_answer_has_a_column_for_each_class(self) -> None:
        asked = self.planted()
        answer = super()._answer(asked)
        assert answer.shape == (len(asked.question.client), 2)
        torch.testing.assert_close(answer.sum(1), torch.ones(len(answer)))


class AGuess(OnAttributes):
    def test_a_planted_leak_is_found(self) -> None:
        """It is not: a leak must not reach what stands beside an attack as its null."""
        planted = self.planted()
        assert abs(auc(self._answer(planted), planted.truth) - 0.5) <= chance_width(planted.truth)


class TestRaw(OnAttributes):
    attack = FromUpdates(learner=Logistic(), rounds="last", parts=("item",))


class TestMeans(OnAttributes):
    attack = FromUpdates(learner=Logistic())


class TestNorms(OnAttributes):
    attack = FromUpdates(learner=Logistic(), rounds="all", summary="norms")


class TestSketch(OnAttributes):
    attack = FromUpdates(learner=Logistic(), rounds=1, sketch=64, parts=("item", "head"))


class TestKnownNoise(OnAttributes):
    """Rows are weighed in place when it answers; what it keeps is what it keeps without."""

    attack = FromUpdates(learner=Logistic(), rounds="last", noise="known")

    def planted(self) -> Case:
        return self._under_noise(super().planted())

    def unrelated(self) -> Case:
        return self._under_noise(super().unrelated())

    @staticmethod
    def _under_noise(case: Case) -> Case:
        return replace(case, knowledge=replace(case.knowledge, defense=GaussianNoise({"item": 0.5, "head.bias": 2.0})))


class TestNetwork(OnAttributes):
    attack = FromUpdates(learner=Network(epochs=20, members=1), rounds="all", parts=("item",))


class TestKnownColumns(OnAttributes):
    attack = KnownColumns(reading="norm")


class TestRankOne(OnAttributes):
    attack = KnownColumns()


class TestThroughItems(OnAttributes):
    attack = ThroughItems(membership=AllPositive(participation="all"))


class TestMajority(AGuess):
    attack = MajorityClass()


class TestProportional(AGuess):
    attack = Proportional(seed=1)


# --- what is kept of an upload ----------------------------------------------------------------------------------------


def listened(attack: FromUpdates, messages: list[Message], known: Knowledge) -> dict[str, Tensor]:
    state = attack.init(known)
    for message in messages:
        if isinstance(message, Broadcast | Upload):
            state = attack.fold(known, state, message)
    return state


@pytest.mark.parametrize("rounds", ["last", "all", 1])
@pytest.mark.parametrize("parts", [(), ("user",), ("item", "head")])
def test_rows_are_those_of_a_plain_loop(rounds: object, parts: tuple[str, ...]) -> None:
    """Client 4 misses round 1, client 7 the last one."""
    label = torch.arange(10) % 2
    messages: list[Message] = []
    for message in uploads(label, label):
        if isinstance(message, Upload):
            away = {1: 4, 2: 7}.get(message.round, -1)
            stay = (message.update.client != away).nonzero().squeeze(1)
            message = Upload(message.round, message.update.select(stay), message.weight[stay])
        messages.append(message)
    attack = FromUpdates(rounds=rounds, parts=parts)  # type: ignore[arg-type]
    state = listened(attack, messages, knowledge(label, 5))
    for client in range(10):
        found = []
        for message in messages:
            if not isinstance(message, Upload) or client not in message.update.client.tolist():
                continue
            one = message.update.select((message.update.client == client).nonzero().squeeze(1))
            table = torch.zeros(ITEMS, FACTORS)
            for item, row in zip(one.item.tolist(), one.rows["item"], strict=True):
                table[item] = row
            pieces = {
                "user.encoder": one.values["user.encoder"][0].flatten(),
                "item": table.flatten(),
                "head.bias": one.values["head.bias"],
            }
            kept = [value for name, value in pieces.items() if not parts or name.split(".")[0] in parts]
            found.append((message.round, torch.cat(kept)))
        wanted = {"last": found[-1:], "all": found}.get(str(rounds), [each for each in found if each[0] == rounds])
        assert int(state["participations"][client]) == (len(found) if rounds != 1 else len(wanted))
        if wanted:
            torch.testing.assert_close(state[f"row {client}"], torch.stack([row for _, row in wanted]).sum(0))
        else:
            assert f"row {client}" not in state


def test_a_fold_copies_nobody_else() -> None:
    label = torch.arange(10) % 2
    attack, known = FromUpdates(rounds="all"), knowledge(label, 5)
    first, second = (message for message in uploads(label, label, rounds=1) if isinstance(message, Upload))
    before = attack.fold(known, attack.init(known), first)
    after = attack.fold(known, before, second)
    assert all(after[f"row {c}"] is before[f"row {c}"] for c in first.update.client.tolist())


def test_a_sketch_keeps_inner_products() -> None:
    """On average over seeds: within four standard errors, for every pair of clients."""
    label = torch.arange(6) % 2
    messages, known = uploads(label, label, rounds=1), knowledge(label, 5)

    def products(attack: FromUpdates) -> Tensor:
        state = listened(attack, messages, known)
        rows = torch.stack([state[f"row {client}"] for client in range(6)])
        return rows @ rows.T

    exact = products(FromUpdates(parts=("item",)))
    found = torch.stack([products(FromUpdates(parts=("item",), sketch=40, seed=seed)) for seed in range(150)])
    error = found.std(0) / 150**0.5
    assert bool(((found.mean(0) - exact).abs() <= 4 * error + 1e-4).all())
    assert bool((error > 0).any())


def test_norms_are_movements_along_the_mean() -> None:
    label = torch.arange(4) % 2
    messages, known = uploads(label, label, rounds=1), knowledge(label, 3)
    raw = listened(FromUpdates(parts=("item",)), messages, known)
    short = listened(FromUpdates(parts=("item",), summary="norms"), messages, known)
    for client in range(4):
        rows = raw[f"row {client}"].view(ITEMS, FACTORS)
        mean = rows[rows.abs().sum(1) > 0].mean(0)
        torch.testing.assert_close(short[f"row {client}"], rows @ (mean / mean.norm()))


def test_who_was_never_seen_gets_the_proportions_and_who_is_known_gets_the_label() -> None:
    label = torch.tensor([0, 1, 1, 1, 0, 1, 0, 1])
    messages = uploads(label, label, rounds=1)
    only = [
        Upload(m.round, m.update.select(torch.arange(min(3, m.update.n_clients))), torch.ones(3))
        for m in messages
        if isinstance(m, Upload)
    ]
    known = knowledge(label, 4)
    for attack in (FromUpdates(learner=Logistic()), ThroughItems(membership=AllPositive(participation="all"))):
        listening = Listening(Server(), attack, known)
        for message in [messages[0], *only]:
            listening.receive(message)
        answer = listening.answer(WhichAttribute(torch.tensor([7, 0, 4, 1]), "sex", CLASSES))
        assert answer[0].tolist() == [0.25, 0.75]
        assert answer[1].tolist() == [1, 0]
        assert answer[2].tolist() != [0.25, 0.75]
        nobody = attack.answer(known, attack.init(known), WhichAttribute(torch.tensor([5]), "sex", CLASSES))
        assert nobody.tolist() == [[0.25, 0.75]]


def test_what_is_missing_is_named() -> None:
    label = torch.arange(10) % 2
    asked, nothing = WhichAttribute(torch.tensor([9]), "sex", CLASSES), replace(knowledge(label), public={})
    with pytest.raises(ConfigError, match=r"needs `labels of sex`, got nothing as public knowledge"):
        FromUpdates().answer(nothing, FromUpdates().init(nothing), asked)
    with pytest.raises(ConfigError, match=r"needs `columns of sex`"):
        KnownColumns().answer(nothing, KnownColumns().init(nothing), asked)
    with pytest.raises(ConfigError, match="knows the sex of no user"):
        known_labels(knowledge(label, 0), asked)
    with pytest.raises(ConfigError, match=r"labels of sex are \[3\]"):
        known_labels(knowledge(label, 5, **{"labels of sex": torch.zeros(3, dtype=torch.int64)}), asked)
    with pytest.raises(ConfigError, match=r"parts has 'ite', expected .* user.encoder, item, head.bias"):
        FromUpdates(parts=("ite",)).init(knowledge(label))
    with pytest.raises(ConfigError, match=r"component is 'head.bias', expected a shared matrix"):
        KnownColumns(component="head.bias").init(knowledge(label))
    with pytest.raises(ConfigError, match="rounds is 'first'"):
        FromUpdates(rounds="first")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sketch is 0"):
        FromUpdates(sketch=0)
    with pytest.raises(ConfigError, match="reading is 'sum'"):
        KnownColumns(reading="sum")  # type: ignore[arg-type]


# --- real runs --------------------------------------------------------------------------------------------------------

DATA = Synthetic(n_users=60, n_items=80, mean_activity=15, min_activity=8, communities=5).generate().distinct()
SEX = torch.from_numpy(np.random.default_rng(0).integers(3, size=60))  # three classes, and the features hold it
X = torch.cat([2 * torch.rand(60, 5, generator=torch.Generator().manual_seed(0)) - 1, torch.eye(3)[SEX]], dim=1)


def run(model: Model, attacks: dict[str, object], optimizer: Optimizer, defense: Defense | None = None) -> list[Tensor]:
    local = LocalTraining(epochs=2, batch_size=16, optimizer=optimizer)
    known = torch.where(torch.arange(60) < 20, SEX, -1)
    public = {"labels of sex": known, "columns of sex": torch.tensor([5, 6, 7])}
    parts = (defense or Defense()).sharing(model.components())
    told = Knowledge(model, 60, DATA.n_items, parts, local, defense or Defense(), public)
    taps = [Listening(Server(), attack, told) for attack in attacks.values()]  # type: ignore[arg-type, var-annotated]
    protocol = Federated(rounds=4, fraction=0.5, local=local)
    features = X if model.needs_user_features else None
    train_federated(protocol, model, DATA, defense=defense, taps=taps, user_features=features, show_progress=False)
    question = WhichAttribute(torch.arange(60), "sex", ("a", "b", "c"))
    return [tap.answer(question) for tap in taps]


GCN = FeatureGCN(8, factors=16, hidden=(16,), init=Normal(0.1), dense_init=Normal(0.1))


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.01)], ids=["sgd", "adam"])
def test_rows_of_other_classes_do_not_move(optimizer: Optimizer) -> None:
    """Without a label and without an error, whoever took part."""
    attacks = {reading: KnownColumns(reading=reading) for reading in ("norm", "rank one")}
    for answer in run(GCN, dict(attacks), optimizer):
        seen = answer.amax(1) > 0.5
        assert int(seen.sum()) > 45
        torch.testing.assert_close(answer[seen], torch.eye(3)[SEX][seen], atol=1e-5, rtol=0)
        torch.testing.assert_close(answer[~seen], torch.full((int((~seen).sum()), 3), 1 / 3))


def test_under_noise_all_rows_together_tell_more_than_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three uploads of x G and noise, with 18 numbers and two more one-hot attributes among the features."""
    sizes: list[int] = []
    decompose = torch.linalg.eigh

    def counted(matrices: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(len(matrices))
        value, vector = decompose(matrices)
        return value, vector

    monkeypatch.setattr(torch.linalg, "eigh", counted)
    generator = torch.Generator().manual_seed(0)
    label, others = torch.randint(2, (300,), generator=generator), torch.randint(3, (2, 300), generator=generator)
    numbers = 2 * torch.rand(300, 18, generator=generator) - 1
    x = torch.cat([numbers, torch.eye(2)[label], *torch.eye(3)[others]], dim=1)  # f32[C, 26]
    told = knowledge(label, 0, **{"columns of sex": torch.tensor([18, 19])})
    right = []
    for reading in ("norm", "rank one"):
        attack = KnownColumns(reading=reading)
        state = attack.init(told)
        noise = torch.Generator().manual_seed(1)
        for number in range(3):
            move = torch.randn(300, 1, 64, generator=noise) / 8
            moved = x.unsqueeze(2) * move + 0.3 * torch.randn(300, 26, 64, generator=noise)
            none = torch.empty(0, dtype=torch.int64), torch.zeros(301, dtype=torch.int64)
            update = Update(torch.arange(300), {"user.encoder": moved}, {}, *none, ITEMS)
            state = attack.fold(told, state, Upload(number, update, torch.ones(300)))
        answer = attack.answer(told, state, WhichAttribute(torch.arange(300), "sex", CLASSES))
        right.append(float((answer.argmax(1) == label).float().mean()))
        sizes.clear()
        some = torch.tensor([7, 250, 7, 31])
        assert torch.equal(attack.answer(told, state, WhichAttribute(some, "sex", CLASSES)), answer[some])
        assert sizes == ([] if reading == "norm" else [3])  # nobody else is decomposed
    assert right[0] < 0.93 < 0.97 < right[1], right


def test_who_moved_nothing_is_anything() -> None:
    told = knowledge(torch.arange(2), 0)
    none = torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    moved = torch.zeros(2, FEATURES, FACTORS)
    moved[1, 0] = 1.0  # another feature's row
    for reading in ("norm", "rank one"):
        attack = KnownColumns(reading=reading)
        sent = Upload(0, Update(torch.arange(2), {"user.encoder": moved}, {}, *none, ITEMS), torch.ones(2))
        state = attack.fold(told, attack.init(told), sent)
        assert bool((attack.answer(told, state, WhichAttribute(torch.arange(2), "sex", CLASSES)) == 0.5).all())


def test_the_chain_answers_on_a_real_run() -> None:
    (answer,) = run(NCF(8, (16,), init=Normal(0.1)), {"chain": ThroughItems()}, Adam(0.05))
    assert answer.shape == (60, 3)
    torch.testing.assert_close(answer.sum(1), torch.ones(60))


# --- guesses ----------------------------------------------------------------------------------------------------------


def test_guesses_follow_the_known_labels() -> None:
    label = torch.cat([torch.zeros(10), torch.ones(30), torch.zeros(5000)]).long()
    known, asked = knowledge(label, 40), WhichAttribute(torch.arange(40, 5040), "sex", CLASSES)
    assert proportions(known_labels(known, asked), 2).tolist() == [0.25, 0.75]
    assert MajorityClass().answer(known, {}, asked)[:, 1].mean() == 1
    drawn = Proportional().answer(known, {}, asked)
    assert float(drawn[:, 1].mean()) == pytest.approx(0.75, abs=4 * (0.25 * 0.75 / 5000) ** 0.5)
    assert not torch.equal(drawn, Proportional(seed=1).answer(known, {}, asked))
    some = WhichAttribute(torch.tensor([50, 41]), "sex", CLASSES)
    assert torch.equal(Proportional().answer(known, {}, some), drawn[[10, 1]])


def test_known_noise_weighs_components() -> None:
    """A component under noise of 2 counts half; one without noise is as it is."""
    label = torch.zeros(CLIENTS, dtype=torch.int64)
    known = replace(knowledge(label), defense=GaussianNoise({"item": 2.0}))
    update = next(message.update for message in uploads(label, label) if isinstance(message, Upload))
    hows: list[dict[str, Any]] = [{}, {"summary": "norms"}, {"parts": ("head",)}]
    for how in hows:
        attack, items = FromUpdates(noise="known", **how), FromUpdates(**{**how, "parts": ("item",)})
        plain = attack._rows(known, update)
        width = 0 if "parts" in how else items._rows(known, update).shape[1]
        factor = plain / attack.weighed(known, plain.clone())  # NaN where nothing changed
        twice, same = ((factor - expected).abs() < 1e-4 for expected in (2, 1))
        assert bool((twice | same | torch.isnan(factor)).all())
        assert 0.9 * width <= int(twice.any(0).sum()) <= width, "but for items that nobody touched"
    assert FromUpdates().weighed(known, plain) is plain
    with pytest.raises(ConfigError, match="noise is 'loud'"):
        FromUpdates(noise="loud")  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", ["all", "touched"])
@pytest.mark.parametrize("sketch", [None, 7, 400])
def test_what_is_noise_has_variance_one_when_it_is_known(rows: Any, sketch: int | None) -> None:
    """In every column of a sketch too, however many numbers are added up in it; 400 columns are more than numbers."""
    clients, touched, generator = 4_000, 12, torch.Generator().manual_seed(1)
    public = {"popularity": torch.full((ITEMS,), touched / 4 / ITEMS * CLIENTS)}  # 3 own items and 3 negatives for each
    training = LocalTraining(optimizer=SGD(0.1), negatives=3)
    known = replace(
        knowledge(torch.zeros(CLIENTS, dtype=torch.int64)),
        public=public,
        training=training,
        defense=GaussianNoise({"item": 0.3, "user.encoder": 2.0}, rows=rows),
    )
    count = ITEMS if rows == "all" else touched
    item = torch.rand(clients, ITEMS, generator=generator).argsort(1)[:, :count].sort(1).values.flatten()
    noise = {
        "user.encoder": 2.0 * torch.randn(clients, FEATURES, FACTORS, generator=generator),
        "head.bias": torch.zeros(clients),
    }
    table = {"item": 0.3 * torch.randn(len(item), FACTORS, generator=generator)}
    update = Update(torch.arange(clients), noise, table, item, torch.arange(clients + 1) * count, ITEMS)
    attack = FromUpdates(noise="known", sketch=sketch)
    spread = attack.weighed(known, attack._rows(known, update)).std(0)
    people, items = spread[: FEATURES * FACTORS], spread[FEATURES * FACTORS : -1]
    torch.testing.assert_close(people, torch.ones_like(people), rtol=0.08, atol=0)
    full = items[items > 0]
    torch.testing.assert_close(full, torch.ones_like(full), rtol=0.08, atol=0)
    assert len(full) == len(items) if sketch != 400 else len(full) > 60, "columns to which no number was added"


# --- what there is to find --------------------------------------------------------------------------------------------


def test_the_reference_is_the_chain_that_reads_every_item_right() -> None:
    """Who is told the own items has what `ThroughItems` has where its items are exact; without them, nothing."""
    generator = torch.Generator().manual_seed(5)
    label = torch.randint(2, (CLIENTS,), generator=generator)
    own = torch.rand(CLIENTS, ITEMS, generator=generator) < 0.2 + 0.3 * (torch.arange(ITEMS) < 9) * label.unsqueeze(1)
    known = knowledge(label)
    known = replace(known, public={**known.public, "own items": own.nonzero()})
    question = WhichAttribute(torch.arange(KNOWN, CLIENTS), "sex", CLASSES)
    found = TrueItems().answer(known, {}, question)
    chain = ThroughItems().learner.fit_predict(
        own[:KNOWN].float().numpy(), label[:KNOWN].numpy(), 2, own[KNOWN:].float().numpy(), 0
    )
    torch.testing.assert_close(found, torch.from_numpy(chain).float(), rtol=1e-4, atol=1e-5)
    assert auc(found[:, 1], label[KNOWN:] == 1) > 0.8
    with pytest.raises(ConfigError, match="needs `own items`"):
        TrueItems().answer(knowledge(label), {}, question)
