"""`recleak train`: federated training, and what the recommender is worth beside chance and the baselines."""

from __future__ import annotations

import dataclasses
import json
from importlib import import_module
from math import isnan
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from recleak.errors import RecleakError
from recleak.terminal import err, out, say, say_json

if TYPE_CHECKING:  # what is slow to import waits until a command needs it
    from recleak.defenses.base import Defense
    from recleak.metrics.intervals import Estimate
    from recleak.models.base import Model
    from recleak.protocols.federated import Federated, FederatedModel
    from recleak.recording import Tap
    from recleak.utility import Utility

MODELS = {
    "ncf": ("recleak.models.ncf", "NCF"),
    "mf": ("recleak.models.mf", "MF"),
    "gmf": ("recleak.models.mf", "GMF"),
    "lightgcn": ("recleak.models.lightgcn", "LightGCN"),
    "pfedrec": ("recleak.models.pfedrec", "PFedRec"),
}
_TABLE_WIDTH = 71  # characters that the table of metrics needs beside the names of models


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Who trains, and how. The defaults are those of IMIA's Fed-NCF, with half of its rounds."""

    model: Literal["ncf", "mf", "gmf", "lightgcn", "pfedrec"] = "ncf"
    "The recommender, with the settings of its paper."
    factors: int | None = None
    "Length of its vectors (default: its paper's)."
    rounds: int = 100
    "How many rounds; a finished run may be prolonged."
    clients_per_round: int = 9
    "Clients sampled for each round; `--all-clients` takes everybody."
    all_clients: Annotated[bool, Parameter(negative="")] = False
    "Every client takes part in every round."
    epochs: int = 20
    "Local epochs of a client in a round."
    batch_size: int = 64
    "Examples in a local batch."
    optimizer: Literal["adam", "sgd"] = "adam"
    "The clients' optimizer; it starts afresh in every round."
    learning_rate: float = 0.001
    "Its learning rate."
    aggregation: Literal["mean", "touched-mean", "weighted", "sum"] = "mean"
    "What the server makes of the updates; `touched-mean` divides an item's row by those who sent it."
    clip: float | None = None
    "Clip each client's upload to this l2 norm."
    noise: float | None = None
    "Add Gaussian noise of this standard deviation to the rows that a client sends."

    def protocol(self) -> Federated:
        """The options as the trainer takes them."""
        from recleak.protocols.federated import Federated
        from recleak.training.cohort import LocalTraining
        from recleak.training.optimizers import SGD, Adam

        step = (Adam if self.optimizer == "adam" else SGD)(self.learning_rate)
        return Federated(
            rounds=self.rounds,
            clients_per_round=None if self.all_clients else self.clients_per_round,
            aggregation=self.aggregation,
            local=LocalTraining(epochs=self.epochs, batch_size=self.batch_size, optimizer=step),
        )

    def recommender(self) -> Model:
        """The model."""
        if self.factors is not None and self.factors < 1:
            raise RecleakError(f"--factors {self.factors}: expected at least 1.")
        module, name = MODELS[self.model]
        model: Model = getattr(import_module(module), name)(
            **({} if self.factors is None else {"factors": self.factors})
        )
        return model

    def defense(self) -> Defense:
        """Clipping, then noise."""
        from recleak.defenses.base import Chain, Defense
        from recleak.defenses.clipping import ClipByNorm
        from recleak.defenses.noise import GaussianNoise

        chain: list[Defense] = []
        try:
            chain += [] if self.clip is None else [ClipByNorm(self.clip)]
            chain += [] if self.noise is None else [GaussianNoise(self.noise)]
        except ValueError as error:
            raise RecleakError(f"--clip or --noise: {error}") from error
        return Chain(tuple(chain)) if chain else Defense()


_DEFAULTS = TrainingOptions()


def train(
    *,
    data: str = "synthetic",
    preset: str | None = None,
    order: Literal["time", "random"] = "time",
    training: TrainingOptions = _DEFAULTS,
    negatives_eval: Annotated[
        int | None, Parameter(help="Rank against this many sampled items (default: all items).")
    ] = None,
    record: Literal["server", "aggregator"] | None = None,
    workers: int | None = None,
    seed: int = 0,
    out_dir: Annotated[Path, Parameter(name="--out")] = Path("runs/train"),
    json_only: Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON.")] = False,
) -> None:
    """Train a federated recommender, each user a client, and grade it beside chance, MostPop and ItemKNN.

    Leave-one-out; Hit, NDCG and MRR with 95 % intervals (bootstrap over users). The run is saved in the folder as it
    goes: after an interrupt, or a kill, the same command continues it and ends with the same result, bit for bit.

    Parameters
    ----------
    data
        A name of the catalog, `synthetic` (embedded, no download), or a path.
    preset
        A paper's preprocessing, as listed by `recleak data list`.
    order
        The held-out item is the last in time, or a random one.
    record
        Write what an adversary at the server (or behind secure aggregation) sees to the folder's `recording`.
    workers
        Train in this many processes (default: threads of this one, one per core).
    seed
        Decides all draws.
    out_dir
        Where the run and its result are written.
    """
    from recleak.data.source import open_data
    from recleak.data.split import leave_one_out
    from recleak.protocols.federated import train_federated
    from recleak.training.executor import InProcess, Workers
    from recleak.utility import BASELINES, compare, facts

    protocol, model, defense = training.protocol(), training.recommender(), training.defense()
    protocol.check()
    if negatives_eval is not None and negatives_eval < 1:
        raise RecleakError(f"--negatives-eval {negatives_eval}: expected at least 1; leave it out to rank all items.")
    interactions = open_data(data, preset)
    split = leave_one_out(interactions, by=order, seed=seed)
    start = perf_counter()
    trained = train_federated(
        protocol,
        model,
        split.train,
        defense=defense,
        taps=_taps(record, out_dir, model, defense, f"recleak train --data {data} --model {training.model}"),
        executor=InProcess() if workers is None else Workers(workers),
        seed=seed,
        directory=out_dir / "run",
        show_progress=not json_only,
    )
    seconds = perf_counter() - start
    models = {**BASELINES, training.model: lambda _: trained}
    comparison = compare(split, models, negatives=negatives_eval, seed=seed)
    *others, mine = comparison.rows
    rows = [*others, dataclasses.replace(mine, seconds=mine.seconds + seconds)]
    made = sum(trained.clients[trained.continued :])
    result = {
        **facts(data, preset, interactions, split, comparison),
        "settings": {**dataclasses.asdict(training), "seed": seed, "record": record, "workers": workers},
        "rounds": len(trained.loss),
        "rounds_of_an_earlier_call": trained.continued,
        "seconds": seconds,
        "clients_per_second": made / seconds,
        "loss": [None if isnan(loss) else loss for loss in trained.loss],
        "clients": trained.clients,
        "models": [dataclasses.asdict(row) for row in rows],
    }
    path = out_dir / "result.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if json_only:
        say_json(result)
        return
    show_utility(rows, Text(f"{data}: {interactions.n_users:,} users, {len(interactions):,} rows"))
    graded = f"{comparison.users:,} users graded"
    say(f"{split.recipe}; {comparison.candidates}; {graded}; 95 % intervals over users")
    _tell(trained, result)
    for note in [*interactions.notes, *_caveats(training)]:
        say(f"note: {note}", to=err, style="yellow")
    if record is not None:
        say(f"Recording: {out_dir / 'recording'}")
    say(f"Result: {path}")


def _taps(
    record: Literal["server", "aggregator"] | None, folder: Path, model: Model, defense: Defense, source: str
) -> list[Tap]:
    from recleak.defenses.base import all_components
    from recleak.recording import Recorder
    from recleak.wire import Aggregator, Server

    if record is None:
        return []
    vantage = Server() if record == "server" else Aggregator()
    return [
        Recorder(vantage, folder / "recording", components=all_components(model.components(), defense), source=source)
    ]


def _tell(trained: FederatedModel, result: dict[str, Any]) -> None:
    """How training went, in a line or two."""
    rounds, before = len(trained.loss), trained.continued
    if before == rounds:
        say(f"All {rounds:,} rounds were made before.")
        return
    continued = f" after {before:,} of an earlier call" if before else ""
    say(
        f"{rounds - before:,} rounds{continued} in {result['seconds']:.1f} s, "
        f"{result['clients_per_second']:,.1f} clients/s; loss {trained.loss[0]:.4f} -> {trained.loss[-1]:.4f}"
    )


def _caveats(training: TrainingOptions) -> list[str]:
    if training.noise and training.clip is None:
        return ["noise without --clip guarantees nothing: an upload is not bounded."]
    if training.noise:
        return ["noise on the rows that are sent gives no guarantee: which rows they are tells the client's items."]
    return []


def show_utility(rows: list[Utility], title: Text) -> None:
    """A table of recommenders; in a narrow terminal a line for each figure."""
    metrics = ("Hit@10", "Hit@20", "NDCG@10", "MRR")  # with one held-out item Recall is Hit
    if out.width < _TABLE_WIDTH + max(len(row.model) for row in rows):
        out.print(title)
        for row in rows:
            for name in metrics:
                say(f"{row.model} {name} {row.metrics[name]}")
        return
    table = Table(title=title, show_lines=True)
    for heading in ("model", *metrics, "seconds"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(row.model, *[_cell(row.metrics[name]) for name in metrics], f"{row.seconds:.2f}")
    out.print(table)


def _cell(estimate: Estimate) -> str:
    return f"{estimate.value:.3f}\n{estimate.low:.3f}-{estimate.high:.3f}"
