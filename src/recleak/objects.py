"""Objects from settings: a short name or an import path, and the arguments of its constructor.

`{ use = "proximal", strength = 0.1 }` is `Proximal(strength=0.1)`; `{ use = "my_package.attacks:Mine", k = 3 }` is an
object of your own, which needs no registration. What is checked comes from the constructor: names of arguments (the
nearest valid one is told) and types. A value that is a list stands for several objects, one for each element; an
argument that is itself a list takes a list of lists for that.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from recleak.errors import ConfigError, unknown_name

Kind = Literal["model", "protocol", "defense", "attack", "optimizer", "object"]
Settings = Mapping[str, Any]

NAMES: Mapping[str, Mapping[str, str]] = {
    "model": {
        "ncf": "recleak.models.ncf:NCF",
        "mf": "recleak.models.mf:MF",
        "gmf": "recleak.models.mf:GMF",
        "prme-g": "recleak.models.prme:PRMEG",
        "lightgcn": "recleak.models.lightgcn:LightGCN",
        "pfedrec": "recleak.models.pfedrec:PFedRec",
        "decoupled": "recleak.models.decoupled:Decoupled",
        "feature-gcn": "recleak.models.feature_gcn:FeatureGCN",
        "attention-gcn": "recleak.models.attention_gcn:AttentionGCN",
        "autoencoder": "recleak.models.autoencoder:Autoencoder",
        "rating-factorization": "recleak.models.factorization:RatingFactorization",
        "walk-factorization": "recleak.models.factorization:WalkFactorization",
        "rap": "recleak.models.rap:RAP",
        "unknown": "recleak.models.central:UnknownModel",
    },
    "protocol": {
        "federated": "recleak.protocols.until:FederatedUntil",
        "gossip": "recleak.protocols.gossip:Gossip",
        "centralized": "recleak.protocols.centralized:Centralized",
        "published": "recleak.protocols.published:Published",
        "vectors": "recleak.protocols.vectors:Vectors",
        "recorded": "recleak.protocols.recorded:Recorded",
    },
    "defense": {
        "none": "recleak.defenses.base:Defense",
        "chain": "recleak.defenses.base:Chain",
        "clip": "recleak.defenses.clipping:ClipByNorm",
        "gaussian-noise": "recleak.defenses.noise:GaussianNoise",
        "laplace-noise": "recleak.defenses.noise:LaplaceNoise",
        "proximal": "recleak.defenses.proximal:Proximal",
        "randomized-labels": "recleak.defenses.labels:RandomizedLabels",
        "fake-items": "recleak.defenses.labels:FakeItems",
        "sign-only": "recleak.defenses.sparsify:SignOnly",
        "share-less": "recleak.defenses.sharing:ShareLess",
        "share": "recleak.defenses.sharing:Share",
        "secure-aggregation": "recleak.defenses.secure_aggregation:SecureAggregation",
        "adaptive-noise": "recleak.defenses.adaptive_noise:AdaptiveNoise",
        "bounded-gaussian": "recleak.defenses.adaptive_noise:BoundedGaussian",
        "perturbed-features": "recleak.defenses.feature_noise:PerturbedFeatures",
        "functional-mechanism": "recleak.defenses.functional_mechanism:FunctionalMechanism",
        "objective-perturbation": "recleak.defenses.objective_perturbation:ObjectivePerturbation",
        "decoupling": "recleak.defenses.decoupling:Decoupling",
        "early-stop": "recleak.defenses.early_stop:EarlyStop",
        "user-consent": "recleak.defenses.consent:UserConsent",
        "dp-sgd": "recleak.defenses.dp_sgd:DPSGD",
        "clipped-mean-noise": "recleak.defenses.dp_sgd:ClippedMeanNoise",
        "blurme": "recleak.defenses.blurme:BlurMe",
        "popular-lists": "recleak.defenses.release:PopularLists",
    },
    "attack": {
        "alignment": "recleak.attacks.alignment:GradientAlignment",
        "alignment-of-sums": "recleak.attacks.alignment:AlignmentOfSums",
        "rehearsed-sums": "recleak.attacks.sums:RehearsedSums",
        "imia": "recleak.attacks.shadow:ShadowClients",
        "farthest-rows": "recleak.attacks.membership:FarthestRows",
        "k-means": "recleak.attacks.membership:KMeans",
        "popularity": "recleak.attacks.membership:Popularity",
        "popularity-of-sums": "recleak.attacks.membership:PopularityOfSums",
        "random": "recleak.attacks.membership:RandomGuess",
        "all-positive": "recleak.attacks.membership:AllPositive",
        "from-updates": "recleak.attacks.attribute:FromUpdates",
        "from-representations": "recleak.attacks.representation:FromRepresentations",
        "known-columns": "recleak.attacks.attribute:KnownColumns",
        "through-items": "recleak.attacks.attribute:ThroughItems",
        "true-items": "recleak.attacks.attribute:TrueItems",
        "majority": "recleak.attacks.attribute:MajorityClass",
        "proportional": "recleak.attacks.attribute:Proportional",
        "from-lists": "recleak.attacks.audience:FromLists",
        "shadow-lists": "recleak.attacks.audience:ShadowLists",
        "from-history": "recleak.attacks.audience:FromHistory",
        "majority-of-audience": "recleak.attacks.audience:MajorityOfAudience",
        "proportional-of-audience": "recleak.attacks.audience:ProportionalOfAudience",
        "from-vectors": "recleak.attacks.vectors:FromVectors",
        "scored-items": "recleak.attacks.vectors:ScoredItems",
        "popular-items": "recleak.attacks.vectors:PopularItems",
        "majority-of-holder": "recleak.attacks.vectors:MajorityOfHolder",
        "proportional-of-holder": "recleak.attacks.vectors:ProportionalOfHolder",
        "community": "recleak.attacks.community:ServerCommunity",
        "community-of-sums": "recleak.attacks.community_sums:AggregatorCommunity",
        "community-of-peers": "recleak.attacks.community:PeerCommunity",
        "community-through-items": "recleak.attacks.community_items:CommunityThroughItems",
        "community-of-peers-through-items": "recleak.attacks.community_items:PeerCommunityThroughItems",
        "items-of-peers": "recleak.attacks.peers:ItemsOfPeers",
        "attributes-of-peers-through-items": "recleak.attacks.peers:PeersThroughItems",
        "vectors-of-peers": "recleak.attacks.peers:VectorsOfPeers",
        "random-of-peers": "recleak.attacks.peers:RandomItemsOfPeers",
        "all-positive-of-peers": "recleak.attacks.peers:AllItemsOfPeers",
        "popularity-of-peers": "recleak.attacks.peers:PopularItemsOfPeers",
        "majority-of-peers": "recleak.attacks.peers:MajorityOfPeers",
        "proportional-of-peers": "recleak.attacks.peers:ProportionalOfPeers",
    },
    "optimizer": {"adam": "recleak.training.optimizers:Adam", "sgd": "recleak.training.optimizers:SGD"},
    "object": {
        "plateau": "recleak.protocols.stopping:Plateau",
        "reached": "recleak.protocols.stopping:Reached",
        "network": "recleak.attacks.learners:Network",
        "chosen-epoch": "recleak.attacks.learners:ChosenEpoch",
        "tree": "recleak.attacks.learners:Tree",
        "svc": "recleak.attacks.learners:Svc",
        "neighbors": "recleak.attacks.learners:Neighbors",
        "boosting": "recleak.attacks.learners:Boosting",
        "logistic": "recleak.attacks.learners:Logistic",
        "bayes": "recleak.attacks.learners:Bayes",
        "careful": "recleak.attacks.careful:Careful",
        "gaussian-process": "recleak.attacks.learners:GaussianProcess",
    },
}
_PARENTS = {"model": "recleak.models.base:Model", "defense": "recleak.defenses.base:Defense"}
_EXPECTED: Mapping[str, str] = {
    "model": "a subclass of recleak.models.base.Model",
    "defense": "a subclass of recleak.defenses.base.Defense",
    "attack": "a class with `vantage`, `init`, `fold` and `answer`, as recleak.attacks.base says",
    **dict.fromkeys(("protocol", "optimizer", "object"), "a dataclass"),
}
_LISTS = (tuple, list, set, frozenset, Sequence, Iterable)


def find(kind: Kind, name: str) -> Callable[..., Any]:
    """What a short name or an import path (`package.module:Name`) stands for."""
    module, colon, attribute = NAMES[kind].get(name, name).partition(":")
    if not colon:
        known = unknown_name(kind, name, NAMES[kind])
        raise ConfigError(f"{known} Your own: `package.module:Name`.")
    found: Any = _imported(module, f"{kind} {name!r}")
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [each for each in vars(found) if not each.startswith("_")]
            raise ConfigError(f"{kind} {name!r}: {unknown_name(f'name in {module}', part, public)}")
        found = getattr(found, part)
    if not isinstance(found, type) or not _fits(kind, found):
        raise ConfigError(f"{kind} {name!r}: got {found!r:.80}, expected {_EXPECTED[kind]}.")
    call: Callable[..., Any] = found
    return call


def _imported(module: str, where: str) -> types.ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] or str(Path.cwd()) in sys.path:
            raise ConfigError(f"{where}: {module} cannot be imported ({error}).") from error
        sys.path.append(str(Path.cwd()))  # what lies in the present folder counts, last
        return _imported(module, where)


def _fits(kind: Kind, found: type) -> bool:
    """Whether a class is what is asked for; a file that names any other is not obeyed."""
    if kind in _PARENTS:
        module, _, parent = _PARENTS[kind].partition(":")
        return issubclass(found, getattr(import_module(module), parent))
    if kind == "attack":
        return all(hasattr(found, name) for name in ("vantage", "init", "fold", "answer"))
    return dataclasses.is_dataclass(found)


def build(kind: Kind, settings: Settings) -> Any:
    """The object. `settings` has `use` and arguments of the constructor; no value spans any more."""
    return made(find(kind, settings["use"]), _arguments(settings), f"{kind} {settings['use']!r}")


def spans(kind: Kind, settings: Settings) -> list[dict[str, Any]]:
    """All combinations of the values that are lists, the last argument varying fastest; names are checked."""
    make = find(kind, settings["use"])
    found = spanned(make, _arguments(settings), f"{kind} {settings['use']!r}")
    extra = {name: settings[name] for name in ("use", "name") if name in settings}
    return [{**extra, **each} for each in found]


def sources(settings: Any) -> dict[str, str]:
    """The text of the modules that import paths name, here and in nested tables: other code makes another object."""
    if isinstance(settings, list | tuple):
        return {name: text for each in settings for name, text in sources(each).items()}
    if not isinstance(settings, Mapping):
        return {}
    found = sources(list(settings.values()))
    module, colon, _ = str(settings.get("use", "")).partition(":")
    file = _imported(module, repr(settings["use"])).__file__ if colon else None
    if file is not None and file.endswith(".py"):
        found[module] = Path(file).read_text(encoding="utf-8", errors="replace")
    return found


def varying(choices: Sequence[Settings]) -> list[str]:
    """The arguments in which combinations differ, as dotted paths."""
    flat = [dict(_leaves(each)) for each in choices]
    names = list(dict.fromkeys(name for each in flat for name in each))
    return [name for name in names if len({repr(each.get(name)) for each in flat}) > 1]


def label(settings: Settings, only: Iterable[str] | None = None) -> str:
    """A name for people: what is used, and its arguments (`only` some of them).

    >>> label({"use": "proximal", "strength": 0.1})
    'proximal strength 0.1'
    >>> label({"use": "chain", "defenses": [{"use": "clip", "bound": 1}, {"use": "gaussian-noise", "std": 0.1}]})
    'clip bound 1 + gaussian-noise std 0.1'
    """
    parts = settings.get("defenses")
    if settings["use"] == "chain" and isinstance(parts, list | tuple):
        return " + ".join(label({"use": each} if isinstance(each, str) else each) for each in parts) or "none"
    leaves = dict(_leaves(_arguments(settings)))
    shown = leaves if only is None else {name: leaves[name] for name in only if name in leaves}
    words = ", ".join(f"{name.rpartition('.')[2].replace('_', ' ')} {value}" for name, value in shown.items())
    return f"{settings['use'].rpartition(':')[2]} {words}".strip()


def _arguments(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in ("use", "name")}


def _leaves(settings: Settings, path: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def parameters(make: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a constructor with their types; an unreadable type is Any."""
    signature = inspect.signature(make)
    target = make.__init__ if isinstance(make, type) else make  # type: ignore[misc]
    hints = (_hints(make) if isinstance(make, type) else {}) | _hints(target)
    usual = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: hints.get(name, Any) for name, each in signature.parameters.items() if each.kind in usual}


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The types that a class or a function names; none if they cannot be read (an inherited `__init__` elsewhere)."""
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError):
        return {}


def _open(make: Callable[..., Any]) -> bool:
    """Whether it takes arguments of any name."""
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in inspect.signature(make).parameters.values())


def _known(make: Callable[..., Any], arguments: Settings, where: str) -> dict[str, Any]:
    known = parameters(make)
    for name in arguments:
        if name not in known and not _open(make):
            raise ConfigError(f"{where}: {unknown_name('setting', name, known)}")
    return known


def spanned(make: Callable[..., Any], arguments: Settings, where: str) -> list[dict[str, Any]]:
    """The same for a class that is at hand; `where` begins an error."""
    known = _known(make, arguments, where)
    choices = [_choices(known.get(name, Any), value, f"{where}, {name}") for name, value in arguments.items()]
    return [dict(zip(arguments, each, strict=True)) for each in itertools.product(*choices)]


def _choices(kind: Any, value: Any, where: str) -> list[Any]:
    if isinstance(value, Mapping):
        if "use" in value:
            return list(spans(_kind_of(value["use"], where), value))
        inner = table_of(kind)
        return [dict(value)] if inner is None else list(spanned(inner, value, where))
    if isinstance(value, list) and not value:
        if _is_list(kind):
            return [value]
        raise ConfigError(f"{where}: got an empty list, expected a value, or a list of values to try.")
    if not isinstance(value, list):
        return [value]
    value = _named(kind, value)
    if not _is_list(kind):
        return [choice for each in value for choice in _choices(kind, each, where)]
    if all(isinstance(each, list) for each in value) and _depth(value) > _depth_of(kind):
        return [choice for each in value for choice in _choices(kind, each, where)]
    inside = [_choices(Any, each, where) if isinstance(each, Mapping) else [each] for each in value]
    return [list(each) for each in itertools.product(*inside)]


def _kind_of(use: Any, where: str) -> Kind:
    """The kind of a nested object, by its short name."""
    if not isinstance(use, str):
        raise ConfigError(f"{where}: got use = {use!r:.80}, expected one short name or import path (`module:Name`).")
    for kind in get_args(Kind):
        if use in NAMES[kind]:
            found: Kind = kind
            return found
    if ":" in use:
        return "object"
    raise ConfigError(f"{where}: {unknown_name('object', use, itertools.chain(*NAMES.values()))}")


def made(make: Callable[..., Any], arguments: Settings, where: str) -> Any:
    """The object of a class that is at hand."""
    known = _known(make, arguments, where)
    values = {name: _value(known.get(name, Any), value, f"{where}, {name}") for name, value in arguments.items()}
    try:
        return make(**values)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _value(kind: Any, value: Any, where: str) -> Any:
    """A value of a type. TOML has no null: where None is possible, and no text is, "none" says it."""
    if isinstance(value, list):
        value = _named(kind, value)
    if value == "none" and types.NoneType in _alternatives(kind) and str not in _alternatives(kind):
        return None
    if isinstance(value, Mapping) and "use" in value:
        return build(_kind_of(value["use"], where), value)
    if isinstance(value, Mapping) and (inner := table_of(kind)) is not None:
        return made(inner, value, where)
    if isinstance(value, list) and any(isinstance(each, Mapping) and "use" in each for each in value):
        return tuple(_value(Any, each, where) for each in value)
    if isinstance(value, list) and (_is_list(kind) or kind is Any):
        value = _tuples(value) if _depth_of(kind) > 1 else tuple(value)
    try:
        adapter = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticSchemaGenerationError:
        return value
    except TypeError:  # a type that brings a configuration of its own
        adapter = TypeAdapter(kind)
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        wrong = dict.fromkeys(each["msg"].removeprefix("Input should be ") for each in error.errors())
        raise ConfigError(f"{where}: got {value!r:.80}, expected {' or '.join(wrong)}.") from error


def _named(kind: Any, value: list[Any]) -> list[Any]:
    """A name in a list of objects stands for one without arguments: ["share", {...}] in a chain of defenses."""
    within = [each for one in _alternatives(kind) for each in get_args(one) if _is_list(one)]
    if not any(isinstance(each, type) and each not in (str, int, float, bool) for each in within):
        return value
    return [{"use": each} if isinstance(each, str) else each for each in value]


def table_of(kind: Any) -> Callable[..., Any] | None:
    """The one dataclass that a type allows, if any: a table without `use` becomes one."""
    found = [each for each in _alternatives(kind) if isinstance(each, type) and dataclasses.is_dataclass(each)]
    return found[0] if len(found) == 1 else None


def _is_list(kind: Any) -> bool:
    return any((get_origin(each) or each) in _LISTS for each in _alternatives(kind))


def _depth_of(kind: Any) -> int:
    """How many lists are in each other in a type: 2 in a tuple of tuples."""
    inside = [get_args(each) for each in _alternatives(kind) if _is_list(each)]
    return max((1 + max((_depth_of(one) for one in each if one is not ...), default=0) for each in inside), default=0)


def _depth(value: Any) -> int:
    """The same in a value."""
    return 1 + max((_depth(each) for each in value), default=0) if isinstance(value, list) else 0


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
