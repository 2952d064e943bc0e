"""A model of one's own: the example passes the contracts, and an adversary learns no row of a user through it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

from recleak.attacks.alignment import GradientAlignment
from recleak.attacks.base import Knowledge, WhichItems
from recleak.attacks.shadow import ShadowClients
from recleak.errors import NotFoundError
from recleak.grading import truth_of
from recleak.models.adapter import TorchModel
from recleak.models.components import Normal, by_name
from recleak.protocols.federated import Federated, train_federated
from recleak.testing import AttackContract, Case, DefenseContract, ModelContract, NoiseLaw
from recleak.testing.models import Wiretap, ragged
from recleak.training.cohort import LocalTraining
from recleak.training.optimizers import Adam
from recleak.wire import Broadcast, Server, Upload

PATH = Path(__file__).parents[1] / "examples" / "own_model.py"
USERS, ITEMS = 24, 24


def _loaded() -> ModuleType:
    spec = spec_from_file_location("own_model", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = _loaded()
MODEL: TorchModel = EXAMPLE.adapted(USERS, ITEMS)
LOCAL = LocalTraining(epochs=5, batch_size=None, optimizer=Adam(0.05))


def test_the_example_is_short() -> None:
    assert len(PATH.read_text(encoding="utf-8").splitlines()) < 60


# --- the contracts ----------------------------------------------------------------------------------------------------


@pytest.mark.heavy
class TestTower(ModelContract):
    model = MODEL
    n_users, n_items = USERS, ITEMS


class TestDefenseOfTower(DefenseContract):
    defense = EXAMPLE.DEFENSES["clip, noise"]
    neutral = None
    components = MODEL.components()
    noise = NoiseLaw("norm", {part.name: 0.05 for part in MODEL.components() if part.shared})
    hides_support = True


@cache
def recorded() -> Case:
    """A run of the model, and the question about all pairs of an upload."""
    data, tap = ragged(USERS, ITEMS), Wiretap()
    train_federated(Federated(rounds=2, local=LOCAL), MODEL, data, taps=[tap], show_progress=False)
    knowledge = Knowledge(MODEL, USERS, ITEMS, MODEL.components(), LOCAL)
    uploads = [message.update for message in tap.messages if isinstance(message, Upload)]
    pair = torch.unique(torch.cat([update.client[update.owner] * ITEMS + update.item for update in uploads]))
    question = WhichItems(pair // ITEMS, pair % ITEMS)
    return Case(Server(), knowledge, tap.messages, question, torch.from_numpy(truth_of(question, data)))


@pytest.mark.heavy
class TestAttackOnTower(AttackContract):
    attack = GradientAlignment(shadow_rows=0)

    def planted(self) -> Case:
        return recorded()

    def unrelated(self) -> Case:
        """The same pairs with a truth that nobody trained on."""
        case = recorded()
        mixed = torch.randperm(len(case.truth), generator=torch.Generator().manual_seed(0))
        return replace(case, truth=case.truth[mixed])


# --- no row of a user -------------------------------------------------------------------------------------------------


def rows_told(told: object, rows: torch.Tensor) -> int:
    """How many rows can be found in all that hangs on an object, storages as a whole."""
    found, content = set(), b""
    waiting = [told]
    while waiting:
        each = waiting.pop()
        if id(each) in found or isinstance(each, (str, bytes, type)):
            continue
        found.add(id(each))
        if isinstance(each, torch.Tensor):
            content += bytes(each.detach().untyped_storage().tolist())  # type: ignore[no-untyped-call]
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, (list, tuple, set, frozenset)):
            waiting += each
        elif hasattr(each, "__dict__"):
            waiting += vars(each).values()
    return sum(row.numpy().tobytes() in content for row in rows)


def pretrained() -> TorchModel:
    """A module whose tables were trained before."""
    model: TorchModel = EXAMPLE.adapted(USERS, ITEMS)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.module.parameters():
            value.copy_(3 * torch.randn(value.shape, generator=generator) + 1)
    return model


def test_knowledge_has_no_row_of_a_user() -> None:
    model = pretrained()
    users, items = (model.module.get_parameter(f"{name}.weight").detach() for name in ("user", "item"))
    assert rows_told((model.module, model.components()), users) == USERS, "they could be found"
    known = Knowledge(model, USERS, ITEMS, model.components(), LOCAL)
    assert rows_told((known.model, known.components), users) == 0
    assert rows_told((known.model, known.components), items) == ITEMS, "what is broadcast anyway"
    assert replace(known, public={"popularity": torch.ones(ITEMS)}).model is known.model


def test_what_is_known_is_the_same_model() -> None:
    model = pretrained()
    public = model.public()
    mine, known = by_name(model.components()), by_name(public.components())
    assert [replace(part, init=Normal()) for part in mine.values()] == [
        replace(part, init=Normal()) for part in known.values()
    ]
    table = model.module.get_parameter("user.weight").detach()
    assert known["user.weight"].init == Normal(float(table.double().std(correction=0)), float(table.double().mean()))
    drawn = known["user.weight"].draw(5, list(range(USERS)))
    assert not torch.equal(drawn, table)
    assert public.public() is public


def test_an_attack_does_not_depend_on_where_users_start() -> None:
    """Two systems that differ in their users' own vectors alone look the same to who hears the same messages."""
    case, other = recorded(), pretrained()
    with torch.no_grad():
        for name, value in other.module.named_parameters():
            value.copy_(dict(MODEL.module.named_parameters())[name])
        table = other.module.get_parameter("user.weight")
        table.copy_(table.flip(0))
    swapped = Knowledge(other, USERS, ITEMS, other.components(), LOCAL)
    attack = ShadowClients(component="item.weight")
    state, same = attack.init(case.knowledge), attack.init(swapped)
    for message in case.messages:
        if isinstance(message, Broadcast | Upload) and message.round == 0:
            state = attack.fold(case.knowledge, state, message)
            same = attack.fold(swapped, same, message)
    answer = attack.answer(case.knowledge, state, case.question)
    assert bool(answer.any())
    torch.testing.assert_close(attack.answer(swapped, same, case.question), answer)


def test_a_component_that_the_model_does_not_have_is_told() -> None:
    case, attack = recorded(), ShadowClients()
    broadcast, upload = case.messages[:2]
    state = attack.fold(case.knowledge, attack.init(case.knowledge), broadcast)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match=r"Unknown component 'item'.*Known: bias\.weight, item\.weight"):
        attack.fold(case.knowledge, state, upload)  # type: ignore[arg-type]


def test_training_leaves_the_module_as_it_is() -> None:
    before = {name: value.detach().clone() for name, value in MODEL.module.named_parameters()}
    recorded()
    for name, value in MODEL.module.named_parameters():
        assert torch.equal(value, before[name]), name
