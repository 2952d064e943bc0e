"""An experiment: a TOML file that names data, models, protocols, defenses, attacks and seeds; every combination is run.

    title = "Does the regularizer help?"
    seeds = 3
    data = { name = "ml-100k", preset = "imia" }
    model = "ncf"
    protocol = { use = "federated", rounds = 100, clients_per_round = 9, local = { epochs = 20 } }
    defenses = ["none", { use = "proximal", strength = [0.1, 1.0] }]
    attacks = ["alignment", "imia"]

Any value may be a list and spans the grid. `objects` says how a table becomes an object; a `name` in it is its label.
A *system* is what is attacked: data, model, protocol and defense.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

from recleak import objects
from recleak.data.marks import Mark
from recleak.errors import ConfigError, unknown_name
from recleak.objects import NAMES, Kind

_PLUS = re.compile(r"\+(?=\s*[A-Za-z_])")  # between parts of a chain; not that of 1e+2
Objects = str | dict[str, Any] | list[str | dict[str, Any]]
_KINDS: Mapping[str, Kind] = {
    "model": "model",
    "protocol": "protocol",
    "defenses": "defense",
    "attacks": "attack",
}


@dataclass(frozen=True)
class Data:
    """Which interactions, and how utility is measured on them."""

    name: str = "synthetic"
    "A name of the catalog, `synthetic`, or a path."
    preset: str | None = None
    "A paper's preprocessing."
    order: Literal["time", "random"] | None = None
    "What is held out: the last item in time, or a random one (default: by time, if the data have times)."
    candidates: int | None = None
    "Rank the held-out item against so many sampled others (default: all)."


@dataclass(frozen=True)
class Named:
    """A choice: its label and its settings, no list spans any more."""

    label: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class System:
    """What is attacked."""

    data: Data
    data_label: str
    model: Named
    protocol: Named
    defense: Named

    @property
    def labels(self) -> dict[str, str]:
        """As in the tables of findings."""
        return {
            "data": self.data_label,
            "model": self.model.label,
            "protocol": self.protocol.label,
            "defense": self.defense.label,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides it, but for the data's content and the seed."""
        parts = {kind: dict(getattr(self, kind).settings) for kind in ("model", "protocol", "defense")}
        for part in parts.values():
            part.pop("name", None)
        return {"data": asdict(self.data), **parts}


_MOST_SEEDS = 10_000


class Sensitive(BaseModel):
    """Items that mark a person, by category or title (`data.marks`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    categories: list[str] = []
    titles: list[str] = []
    least: int = 1

    @property
    def mark(self) -> Mark:
        """The same as a value."""
        return Mark(self.name, tuple(self.categories), tuple(self.titles), self.least)


class Experiment(BaseModel):
    """What a file says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = "Audit"
    data: Objects = "synthetic"
    model: Objects = "ncf"
    protocol: Objects = "federated"
    defenses: Objects = Field(default="none", description="The first one is what the others are compared with.")
    attacks: Objects = "alignment"
    attributes: list[str] = Field(
        default=[], description="Users' attributes, such as gender, that the attacks on attributes are asked about."
    )
    known: float = Field(
        default=0.1, gt=0, lt=1, description="Share of the users whose attributes an adversary knows, to learn from."
    )
    communities: int = Field(
        default=50,
        ge=0,
        description="How many users the community of each adversary has, for attacks on communities; 0: not asked.",
    )
    sensitive: list[str | Sensitive] = Field(
        default=[],
        description="Categories of items, or tables with a name, categories, titles and least: attacks on communities "
        "are also asked who has such items.",
    )
    seeds: int | list[int] = Field(default=1, description="How many, or which.")
    skip: list[dict[str, str]] = Field(
        default=[],
        description="Combinations to leave out, by labels: tables with some of data, model, protocol and defense.",
    )
    by_component: list[str] = Field(
        default=[], description="Attacks (by label) that the first seed also runs on each role's part of uploads alone."
    )
    canaries: bool = Field(
        default=False, description="Train each system once more with canary interactions: a lower bound of epsilon."
    )
    level: float = Field(default=0.95, gt=0, lt=1, description="Of all intervals.")
    validation: float = Field(
        default=0.25, gt=0, lt=1, description="Share of the users on whom the attacker chooses; the others grade it."
    )
    shuffle_labels: bool = Field(
        default=False, description="The self-test: the truth is shuffled within each user, so nothing can leak."
    )

    @property
    def marks(self) -> list[Mark]:
        """What `sensitive` names."""
        made = [Mark.of(each) if isinstance(each, str) else each.mark for each in self.sensitive]
        taken = Counter([*(mark.name for mark in made), *self.attributes, "membership", "community", "utility"])
        if twice := [mark.name for mark in made if taken[mark.name] > 1]:
            raise ConfigError(f"sensitive: the name {twice[0]!r} is taken, expected one of its own for each.")
        return made

    @field_validator("seeds")
    @classmethod
    def _some_seeds(cls, value: int | list[int]) -> int | list[int]:
        if isinstance(value, int) and value > _MOST_SEEDS:
            raise ValueError(f"expected at most {_MOST_SEEDS:,}")
        chosen = range(value) if isinstance(value, int) else value
        if not chosen or min(chosen) < 0 or len(set(chosen)) < len(chosen):
            raise ValueError("expected a number of at least 1, or a list of different numbers from 0")
        return value

    @property
    def seed_list(self) -> list[int]:
        """Which seeds."""
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    @cached_property
    def systems(self) -> list[System]:
        """All combinations; the defense varies fastest."""
        data = _spanned_data(self.data)
        model, protocol, defense = (self.choices(field) for field in ("model", "protocol", "defenses"))
        every = [
            System(one, label, of, by, against)
            for label, one in data
            for of in model
            for by in protocol
            for against in defense
        ]
        _check_skip(self.skip, every)
        left = [each for each in every if not any({**each.labels, **rule} == each.labels for rule in self.skip)]
        if not left:
            raise ConfigError("skip: it leaves out everything, expected some systems to be left.")
        return left

    @cached_property
    def attack_choices(self) -> list[Named]:
        """All attacks; their labels differ."""
        found = self.choices("attacks")
        for name in self.by_component:
            if name not in [each.label for each in found]:
                raise ConfigError(f"by_component: {unknown_name('attack', name, [each.label for each in found])}")
        return found

    def choices(self, field: str) -> list[Named]:
        """What a field spans, with labels that differ."""
        kind = _KINDS[field]
        given = [_table(kind, each) for each in _several(getattr(self, field))]
        if not given:
            raise ConfigError(f"{field}: got an empty list, expected at least one.")
        spanned = [objects.spans(kind, each) for each in given]
        named: list[Named] = []
        for some in spanned:
            vary = objects.varying(some)
            for each in some:
                objects.build(kind, each)  # an error comes here, before anything is run
                named.append(Named(_label(kind, each, vary), each))
        _different(field, [each.label for each in named])
        return named


def _check_skip(skip: Iterable[Mapping[str, str]], systems: Sequence[System]) -> None:
    """Every label is of a system."""
    for rule in skip:
        for name, label in rule.items():
            if name not in systems[0].labels:
                raise ConfigError(f"skip: {unknown_name('key', name, systems[0].labels)}")
            labels = dict.fromkeys(each.labels[name] for each in systems)
            if label not in labels:
                raise ConfigError(f"skip: {unknown_name(name, label, labels)}")


def _label(kind: Kind, settings: Mapping[str, Any], vary: Sequence[str]) -> str:
    """The given name, or what is used, with the arguments that vary; of defenses and attacks all that are given."""
    if "name" in settings:
        suffix = objects.label({**settings, "use": ""}, vary)
        return f"{settings['name']} {suffix}".strip()
    return objects.label(settings, vary if kind in ("model", "protocol") else None)


def _several(value: Objects) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _table(kind: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"use": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("use"), str):
        raise ConfigError(f"{kind}: got {value!r:.80}, expected a name, or a table with `use`.")
    return dict(value)


def _spanned_data(value: Objects) -> list[tuple[str, Data]]:
    tables = [{"name": each} if isinstance(each, str) else dict(each) for each in _several(value)]
    choices = [choice for each in tables for choice in objects.spanned(Data, each, "data")]
    if not choices:
        raise ConfigError("data: got an empty list, expected at least one.")
    vary = [name for name in objects.varying(choices) if name != "name"]
    labels = [
        " ".join([Path(str(each.get("name", "synthetic"))).name, *(str(each.get(name, "")) for name in vary)]).strip()
        for each in choices
    ]
    if len(set(labels)) < len(labels):  # folders of the same name
        labels = [" ".join(str(each.get(name, "")) for name in ("name", *vary)).strip() for each in choices]
    _different("data", labels)
    return [(label, objects.made(Data, each, "data")) for label, each in zip(labels, choices, strict=True)]


def _different(field: str, labels: Iterable[str]) -> None:
    twice = [label for label, count in Counter(labels).items() if count > 1]
    if twice:
        raise ConfigError(
            f"{field}: two are called {twice[0]!r}, expected different ones.\n  Give one of them a `name`."
        )


# --- reading ----------------------------------------------------------------------------------------------------------


def quick_start() -> dict[str, Any]:
    """The embedded experiment, as a table."""
    return tomllib.loads((files("recleak") / "quickstart.toml").read_text(encoding="utf-8"))


def read(path: Path) -> dict[str, Any]:
    """An experiment file as a table."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file.\n  Check the path, or leave it out for the quick start.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ConfigError(f"{path}: not a TOML file ({error}).") from error


def experiment(table: Mapping[str, Any], where: str = "experiment") -> Experiment:
    """The experiment that a table describes; all names, settings and types are checked."""
    for name in table:
        if name not in Experiment.model_fields:
            raise ConfigError(f"{where}: {unknown_name('key', name, Experiment.model_fields)}")
    try:
        made = Experiment.model_validate(table, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"][:1])
        raise ConfigError(f"{where}, {path}: got {first['input']!r:.80}, {first['msg']}.") from error
    _ = made.systems, made.attack_choices
    return made


def with_fields(table: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """A table with some fields replaced; other attacks have other labels, so what is said of them goes."""
    gone = {"by_component"} if "attacks" in fields else set()
    return {name: value for name, value in table.items() if name not in gone} | dict(fields)


def parse(kind: Kind, text: str) -> dict[str, Any]:
    """A choice as it is typed: `proximal,strength=0.1`; a chain of defenses with `+`; or an inline TOML table.

    >>> parse("defense", "clip,bound=1+gaussian-noise,std=[0.1, 0.2]")["defenses"][1]
    {'use': 'gaussian-noise', 'std': [0.1, 0.2]}
    """
    if text.lstrip().startswith("{"):
        return _table(kind, _toml(text))
    parts = [_parse_one(each) for each in (_PLUS.split(text) if kind == "defense" else [text])]
    return parts[0] if len(parts) == 1 else {"use": "chain", "defenses": parts}


def _parse_one(text: str) -> dict[str, Any]:
    use, *arguments = _split(text)
    found: dict[str, Any] = {"use": use.strip()}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{text!r}: got {argument!r}, expected `setting=value` after the name.")
        found[name.strip()] = _toml(value)
    return found


def _split(text: str) -> list[str]:
    """By commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _toml(text: str) -> Any:
    """A TOML value; what is none is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


# --- the schema, for editors ------------------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """A JSON schema of experiment files."""
    made = Experiment.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    kinds: tuple[Kind, ...] = get_args(Kind)
    made["$defs"] = {kind: _any_of(kind) for kind in kinds if NAMES[kind]}
    for field, kind in _KINDS.items():
        one: dict[str, Any] = {"$ref": f"#/$defs/{kind}"}
        given = {name: value for name, value in made["properties"][field].items() if name in ("default", "description")}
        made["properties"][field] = {**given, "anyOf": [one, {"type": "array", "items": one, "minItems": 1}]}
    table = {"type": "object", "additionalProperties": False, "properties": _properties(Data)}
    one = {"anyOf": [{"type": "string"}, table]}
    made["properties"]["data"] = {"default": "synthetic", "anyOf": [one, {"type": "array", "items": one}]}
    return made


def _any_of(kind: Kind) -> dict[str, Any]:
    path: dict[str, Any] = {"type": "string", "pattern": "^[^:]+:[^:]+$"}
    tables = []
    for name in NAMES[kind]:
        make = objects.find(kind, name)
        tables.append(_object({"const": name}, _properties(make), open_=False))
    names: dict[str, Any] = {"enum": sorted(NAMES[kind])}
    return {"anyOf": [names, path, *tables, _object(path, {}, open_=True)]}


def _object(use: dict[str, Any], properties: dict[str, Any], *, open_: bool) -> dict[str, Any]:
    every = {"use": use, "name": {"type": "string"}, **properties}
    return {"type": "object", "required": ["use"], "properties": every, "additionalProperties": open_}


def _properties(make: Callable[..., Any]) -> dict[str, Any]:
    found = {}
    for name, kind in objects.parameters(make).items():
        if (inner := objects.table_of(kind)) is not None:
            one: dict[str, Any] = {
                "type": "object",
                "properties": _properties(inner),
                "additionalProperties": False,
            }
        else:
            one = _of_type(kind)
        found[name] = {"anyOf": [one, {"type": "array", "items": one}]} if one else {}
    return found


def _of_type(kind: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = TypeAdapter(kind).json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, TypeError):
        return {}
    return {} if "$defs" in found else found


def canonical(value: Any) -> str:
    """Settings as one line of JSON, the same for equal settings."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest(value: Any) -> str:
    """A name for settings, the same for equal ones."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]
