"""A plain `torch.nn.Module` as a model: slower than a model with a client axis, and it just works."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from recleak.models.base import Batch, Model, Params
from recleak.models.components import Component, Given, Init, Role, public_part, require_names, sharing


@dataclass(frozen=True, eq=False)
class TorchModel(Model):
    """Runs a module whose `forward(user: i64[B], item: i64[B])` returns logits f32[B].

    The module looks users and items up in `nn.Embedding` tables, named in `per_user` and `per_item` as
    `module.named_parameters()` names them. A client holds only the rows it needs, so `forward` does not get the numbers
    of users and items: it gets positions in the rows at hand (user 0, items 0 to B - 1), and its tables have just these
    rows. **Ids may be used as indices of these tables, and for nothing else.**

    Training starts from the weights that the module has. Tables of users are kept, all else is shared, unless `shared`
    says otherwise by name. A parameter outside the tables has the role user or item if its name says so, else head,
    and the modules that hold parameters of heads are numbered from 1 as layers. Parameters without `requires_grad` and
    buffers are constants.
    """

    module: nn.Module
    per_user: tuple[str, ...] = ("user.weight",)
    per_item: tuple[str, ...] = ("item.weight",)
    shared: Mapping[str, bool] = field(default_factory=dict)
    started: Mapping[str, Init] = field(default_factory=dict)  # how tables of users start that are not in the module
    _trained: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        trained = {name: value for name, value in self.module.named_parameters() if value.requires_grad}
        require_names("parameter", (*self.per_user, *self.per_item, *self.shared), trained)
        tables = (*self.per_user, *self.per_item)
        for name in tables:
            if tables.count(name) > 1:
                raise ValueError(f"Got {name!r} twice in per_user and per_item, expected each table once.")
            _require_table(name, self.module.get_submodule(name.rpartition(".")[0]), tuple(trained[name].shape))
        for name, part in self.module.named_modules():
            self._require_usable(name, part)
        object.__setattr__(self, "_trained", tuple(trained))

    def components(self) -> tuple[Component, ...]:
        """One for each parameter that is trained, under its own name."""
        parts: list[Component] = []
        layers: dict[str, int] = {}  # numbers of the modules that hold a head's parameters
        for name, value in self.module.named_parameters():
            given, shape = value.detach(), tuple(value.shape)
            if name in self.per_user:
                init = self.started.get(name, Given(given))
                parts.append(Component(name, "per_user", "user", shape[1:], init, shared=False))
            elif name in self.per_item:
                parts.append(Component(name, "per_item", "item", shape[1:], Given(given)))
            elif value.requires_grad:
                role = _role(name)
                owner = name.rpartition(".")[0] or name
                layer = layers.setdefault(owner, len(layers) + 1) if role == "head" else None
                parts.append(Component(name, "dense", role, shape, Given(given.unsqueeze(0)), layer))
        return sharing(parts, self.shared)

    def public(self) -> TorchModel:
        """With empty tables of users: the module's own rows are where its users start, or what they were trained to."""
        tables = {name: value for name, value in self.module.named_parameters() if name in self.per_user}
        if not any(len(value) for value in tables.values()):
            return self
        empty = {id(value): nn.Parameter(value.detach()[:0].clone()) for value in tables.values()}
        started = {part.name: public_part(part).init for part in self.components() if part.name in tables}
        module = copy.deepcopy(self.module, empty)
        return TorchModel(module, self.per_user, self.per_item, self.shared, started)

    def logits(self, params: Params, batch: Batch) -> Tensor:
        """The module under `vmap` over clients."""
        n_items, device = batch.own.shape[1], batch.own.device
        module = _own_copy(self.module)
        user, item = torch.zeros(n_items, dtype=torch.long, device=device), torch.arange(n_items, device=device)

        def one_client(values: Params) -> Tensor:
            logits = functional_call(module, values, (user, item))
            if not isinstance(logits, Tensor) or logits.shape != (n_items,):
                got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                raise ValueError(
                    f"Got {got} from the module's forward, expected logits of shape ({n_items},), one per item: "
                    "end forward with squeeze(-1), and not with squeeze(), which drops a single item too."
                )
            return logits

        values = {n: params[n].unsqueeze(1) if n in self.per_user else params[n] for n in self._trained}
        clients = len(batch.own)
        if clients == 1:  # matrix kernels give a client other last bits when it is alone
            values = {name: value.expand(2, *value.shape[1:]) for name, value in values.items()}
        scores: Tensor = vmap(one_client)(values)[:clients]
        return scores

    def _require_usable(self, name: str, part: nn.Module) -> None:
        """An error for a part of the module whose result would not be what its author means."""
        kind = type(part).__name__
        if isinstance(part, _NormBase):
            raise ValueError(
                f"Got {name!r} ({kind}), which changes its buffers or mixes the examples of a batch; "
                "expected a module whose parameters alone are trained: use nn.LayerNorm instead."
            )
        if isinstance(part, _DropoutNd) and part.training and part.p > 0:
            raise ValueError(
                f"Got {name!r} ({kind}), which is active; expected a forward without random draws: "
                "call module.eval() first, or set p=0."
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and f"{name}.weight" not in (
            *self.per_user,
            *self.per_item,
        ):
            raise ValueError(
                f"Got {name!r} ({kind}), which is neither in per_user={self.per_user} nor in per_item={self.per_item}; "
                f"expected every table to be one of a user's or an item's rows: add '{name}.weight' to one of them."
            )


_copies = threading.local()


def _own_copy(module: nn.Module) -> nn.Module:
    """The module for this thread alone: `functional_call` puts other parameters into a module for as long as it runs.

    The parameters that are trained are given at every call, so the copy holds none of them.
    """
    if not hasattr(_copies, "of"):
        _copies.of = weakref.WeakKeyDictionary()
    if module not in _copies.of:
        empty = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in module.parameters() if p.requires_grad
        }
        _copies.of[module] = copy.deepcopy(module, empty)
    own: nn.Module = _copies.of[module]
    return own


def _require_table(name: str, owner: nn.Module, shape: tuple[int, ...]) -> None:
    """An error unless the parameter is the weight of an embedding whose rows can be gathered and trained one by one."""
    if not isinstance(owner, nn.Embedding) or len(shape) != 2:
        raise ValueError(
            f"Got {name!r} of shape {shape}, held by {type(owner).__name__}, as a table; "
            "expected the 2-d weight of an nn.Embedding: put the rows of users and items into one."
        )
    special = {
        "padding_idx": owner.padding_idx is not None,
        "max_norm": owner.max_norm is not None,
        "scale_grad_by_freq": owner.scale_grad_by_freq,
        "sparse": owner.sparse,
    }
    for option, used in special.items():
        if used:
            raise ValueError(
                f"Got {name!r} with {option}={getattr(owner, option)}; expected a plain table, because rows are "
                f"gathered and have no numbers of their own: leave {option} out of nn.Embedding."
            )


def _role(name: str) -> Role:
    return "user" if "user" in name else "item" if "item" in name else "head"
