"""`recleak audit`, `report`, `compare` and `schema`: the main job, and what is made of its result."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from recleak.addresses import without_password
from recleak.errors import ConfigError
from recleak.terminal import err, out, say, say_json

if TYPE_CHECKING:  # what is slow to import waits until a command needs it
    from recleak.findings import Findings


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Overrides:
    """What replaces a field of the experiment."""

    data: tuple[str, ...] = ()
    "A name of the catalog, `synthetic`, or a path; may be repeated."
    preset: str | None = None
    "A paper's preprocessing of the data."
    model: tuple[str, ...] = ()
    "Such as ncf, or `ncf,factors=32`, or `package.module:Name`; may be repeated."
    defense: tuple[str, ...] = ()
    "Such as none, `proximal,strength=0.1`, or a chain `clip,bound=1+gaussian-noise,std=0.1,rows=all`."
    attack: tuple[str, ...] = ()
    "Such as alignment or imia; may be repeated."
    rounds: int | None = None
    "Of training."
    seeds: int | None = None
    "How many."
    shuffle_labels: Annotated[bool, Parameter(negative="")] = False
    "The self-test: the truth is shuffled, so that the audit must find nothing."

    def apply(self, table: dict[str, Any]) -> dict[str, Any]:
        """The experiment with these in place of its own."""
        from recleak.experiment import parse, with_fields

        made: dict[str, Any] = {}
        if self.data:
            made["data"] = [{"name": name} for name in self.data]
        if self.preset is not None:
            made["data"] = _with(made.get("data", table.get("data", "synthetic")), "name", preset=self.preset)
        if self.model:
            made["model"] = [parse("model", text) for text in self.model]
        if self.defense:
            made["defenses"] = [parse("defense", text) for text in self.defense]
        if self.attack:
            made["attacks"] = [parse("attack", text) for text in self.attack]
        if self.rounds is not None:
            made["protocol"] = _with(table.get("protocol", "federated"), "use", rounds=self.rounds)
        if self.seeds is not None:
            made["seeds"] = self.seeds
        if self.shuffle_labels:
            made["shuffle_labels"] = True
        return with_fields(table, made)


def _with(given: Any, key: str, **setting: Any) -> list[dict[str, Any]]:
    """Each choice of a field with one more setting."""
    every = given if isinstance(given, list) else [given]
    return [{**({key: one} if isinstance(one, str) else one), **setting} for one in every]


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Outputs:
    """Outputs of a system that exists already, in place of an experiment: nothing is trained but the attacker."""

    recording: Path | None = None
    "A folder that a Recorder wrote: what the server of a federation saw. Needs --interactions, the truth."
    recommendations: Path | None = None
    "A table with a row for each place of a list: user, item, and maybe rank or score, and session."
    embeddings: Path | None = None
    "Vectors of users, a matrix: .npy, .npz or .safetensors."
    uploads: Path | None = None
    "What each user sent a server, a matrix likewise."
    item_embeddings: Path | None = None
    "Vectors of items: with --interactions, which items are a user's own is inferred too."
    user_array: str | None = None
    "The name of the users' matrix, if the file has several."
    item_array: str | None = None
    "The name of the items' matrix, in --item-embeddings or else in --embeddings."
    user_ids: Path | None = None
    "A table with the user of each row (default: an array user_ids beside the matrix, or the order of --users)."
    item_ids: Path | None = None
    "The same of items (default: an array item_ids beside the matrix, or ids are row numbers)."
    users: Path | None = None
    "A table with users' ids and their attributes."
    interactions: Path | None = None
    "A table of what users did: user, item. Without it lists or vectors alone are read; a recording needs it, with its "
    "numbers."
    attribute: tuple[str, ...] = ()
    "Which attributes to infer, maybe with a kind, as zip:categorical (default: all with few classes, and numbers, cut "
    "into thirds); may be repeated."
    known: float = 0.5
    "Share of the users whose attribute the adversary knows."
    user: str | None = None
    "The column of users, if it is not called user, user_id, ..."
    item: str | None = None
    "The column of items, likewise."

    def recorded(self, folder: Path, base: dict[str, Any]) -> dict[str, Any]:
        """The experiment on a recording; `base` says what is known of the system."""
        from recleak.recorded import experiment_of

        others = [self.recommendations, self.embeddings, self.uploads]
        if self.recording is None or self.interactions is None or any(others):
            raise ConfigError(
                "Got --recording without --interactions, or with other outputs, expected the recording and what "
                "its users really did:\n  recleak audit --recording DIR --interactions FILE --model NAME,SETTING=VALUE"
            )
        return experiment_of(_named(self.recording), self.interactions, self.users, folder, base, **self._asked)

    def table(self, folder: Path) -> dict[str, Any]:
        """The experiment on these files."""
        from recleak import embeddings, published

        options = {
            "--recommendations": self.recommendations,
            "--embeddings": self.embeddings,
            "--uploads": self.uploads,
        }
        if sum(file is not None for file in options.values()) != 1 or self.users is None:
            raise ConfigError(
                f"Got {', '.join(self.given)}, expected one of {', '.join(options)}, and --users: who its users are."
            )
        rest = self._asked
        if self.recommendations is not None:
            return published.experiment_of(self.recommendations, self.users, self.interactions, folder, **rest)
        names = ("user_array", "item_array", "user_ids", "item_ids")
        where = {name: getattr(self, name) for name in names}
        files = embeddings.Files(self.source, self.item_embeddings, **where)
        rest["kind"] = "uploads" if self.embeddings is None else "embeddings"
        return embeddings.experiment_of(files, self.users, self.interactions, folder, **rest)

    @property
    def given(self) -> list[str]:
        """The options that were given, as they are typed."""
        fields = dataclasses.fields(self)
        return [f"--{each.name.replace('_', '-')}" for each in fields if getattr(self, each.name) != each.default]

    @property
    def _asked(self) -> Any:
        """Which attributes of whom, and what columns are called."""
        from recleak.data.columns import ColumnMap, kinds_of

        kinds = kinds_of(self.attribute)
        columns = ColumnMap(user=self.user, item=self.item, attributes=kinds if any(kinds.values()) else {})
        return {"attributes": list(kinds), "known": self.known, "columns": columns}

    @property
    def source(self) -> Path:
        """The file of outputs."""
        return self.recommendations or self.embeddings or self.uploads or Path("outputs")


def _named(folder: Path) -> Path:
    """A folder by a name: `.` and `..` have none of their own."""
    return folder if folder.name not in ("", "..") else folder.resolve()


_SOURCES = ("--recording", "--recommendations", "--embeddings", "--uploads")
_NONE = Overrides()
_TRAINED = Outputs()


def audit(
    experiment: Path | None = None,
    /,
    *,
    overrides: Overrides = _NONE,
    outputs: Outputs = _TRAINED,
    workers: int | None = None,
    executor: str | None = None,
    mlflow: str | None = None,
    fail_if: Annotated[tuple[str, ...], Parameter(name="--fail-if")] = (),
    point: Annotated[bool, Parameter(negative="")] = False,
    out_dir: Annotated[Path | None, Parameter(name="--out")] = None,
    json_only: Annotated[bool, Parameter(name="--json", negative="", help="Print the findings as JSON.")] = False,
) -> None:
    """Attack a recommender, grade the attacks beside their nulls, and write a report; without a file, the quick start.

    Trains every combination of data, model, protocol and defense, with all attacks at the wire. After an interrupt, or
    a kill, the same command continues; what was measured is never measured again. With --recommendations, --embeddings
    or --uploads, and --users, it reads outputs of a system of yours instead, and trains nothing but the attacker; with
    --recording and --interactions, what the server of a federation saw.

    Parameters
    ----------
    experiment
        A TOML file; `recleak schema` helps editors to complete it.
    workers
        So many cells side by side, each in a process of its own (default: one per core).
    executor
        Where cells are measured, if not in processes of this machine: `ray` (a Ray of this machine, or of RAY_ADDRESS)
        or `ray://HOST:10001` (a Ray cluster). The findings are the same.
    mlflow
        Also log every system, its metrics with their intervals and the report to this MLflow: a server
        (`http://127.0.0.1:5000`), a database (`sqlite:///mlflow.db`) or a folder (`file:mlruns`).
    fail_if
        Exit with 1 if this is certain of any system, such as "membership.auc > 0.6"; may be repeated. Certain: the end
        of the interval nearer to the limit is beyond it.
    point
        For --fail-if the value itself is compared, not the end of its interval.
    out_dir
        The run directory (default: runs/quickstart, or runs/NAME of the file).
    """
    from recleak import experiment as experiments
    from recleak.conditions import Condition
    from recleak.machine import cores
    from recleak.runs import audit_run

    if mlflow is not None:
        from recleak import tracking

        tracking.check(mlflow)  # before hours of work
    folder = out_dir or Path("runs") / _name(experiment, outputs)
    if outputs.recording is not None:
        _check_apart(folder, outputs.recording)
        if overrides.data or overrides.preset or overrides.rounds is not None or overrides.seeds not in (None, 1):
            raise ConfigError(
                "Got --data, --preset, --rounds or --seeds with --recording, expected none: it is one run."
            )
        base = overrides.apply({} if experiment is None else experiments.read(experiment))
        table, where = outputs.recorded(folder, base), str(outputs.recording)
    elif outputs != _TRAINED:
        if experiment is not None:
            raise ConfigError(
                f"Got {experiment} and {', '.join(outputs.given)}, expected one of them: "
                f"{'this goes' if len(outputs.given) == 1 else 'these go'} with outputs of a system that exists "
                f"already ({', '.join(_SOURCES)}).\n  An experiment says such things in its file: "
                'attributes = ["gender"], known = 0.5; recleak schema has all of them.'
            )
        table, where = outputs.table(folder), str(outputs.source)
    elif experiment is None:
        table, where = experiments.quick_start(), "quick start"
    else:
        table, where = experiments.read(experiment), str(experiment)
    made = experiments.experiment(overrides.apply(table), where)
    conditions = [Condition.parse(text, made.attributes, [each.name for each in made.marks]) for text in fail_if]
    command = without_password(shlex.join(["recleak", *sys.argv[1:]]))
    cluster = None
    if executor is not None:
        from recleak.deploy.ray import RayCluster

        cluster = RayCluster(executor, workers=workers)
    count = cores() if workers is None else workers
    findings = audit_run(made, folder, workers=count, command=command, cluster=cluster)
    page = findings.report(folder / "report.html")
    if mlflow is not None:
        say(f"MLflow: {tracking.log(findings, folder, mlflow)}", to=err)
    if json_only:
        say_json(findings.as_json)
    else:
        show(findings)
        say(f"Findings: {folder / 'findings.json'}")
        say(f"Report: {page}")
    broken = [line for condition in conditions for line in condition.violations(findings, point=point)]
    for line in broken:
        say(f"failed: {line}", to=err, style="red")
    if broken:
        sys.exit(1)


def _check_apart(folder: Path, recording: Path) -> None:
    """A run directory is not in a recording: what was seen stays as it is."""
    if folder.resolve().is_relative_to(recording.resolve()):
        raise ConfigError(
            f"Got the run directory {folder}, which is in the recording {recording}, expected another place: nothing "
            "is written there.\n  Give another folder with --out."
        )


def _name(experiment: Path | None, outputs: Outputs) -> str:
    if outputs.recording is not None:
        return _named(outputs.recording).name or "recording"
    if outputs != _TRAINED:
        return outputs.source.stem
    return "quickstart" if experiment is None else experiment.stem


def report_command(
    run: Path,
    /,
    *,
    out_file: Annotated[Path | None, Parameter(name="--out")] = None,
    markdown: Path | None = None,
    picture: Path | None = None,
) -> None:
    """Build the report of a run again, from its findings alone; or the matrix for a page of your own.

    Parameters
    ----------
    run
        A run directory.
    out_file
        Where the report goes (default: report.html in the run directory).
    markdown
        Write every attack on every defense to this page instead: between its comments `begin RUN` and `end RUN`, with
        the name of the run directory for RUN, if it is there.
    picture
        Draw the same to this PNG file.
    """
    from recleak.findings import Findings

    findings = Findings.read(run)
    if markdown is not None or picture is not None:
        from recleak.report import matrix

        if markdown is not None:
            say(f"Matrix: {matrix.write_markdown(findings, markdown, run.resolve().name)}")
        if picture is not None:
            say(f"Picture: {matrix.write_picture(findings, picture)}")
    if out_file is not None or (markdown is None and picture is None):
        say(f"Report: {findings.report(out_file or run / 'report.html')}")


def compare(*runs: Path, out_file: Annotated[Path, Parameter(name="--out")] = Path("comparison.html")) -> None:
    """Put runs side by side in one page.

    Parameters
    ----------
    runs
        Two run directories or more.
    out_file
        The page.
    """
    from recleak import report
    from recleak.files import replace_text
    from recleak.findings import Findings

    if len(runs) < 2:
        raise ConfigError(f"Got {len(runs)} run directories, expected at least two to compare.")
    replace_text(out_file, report.compare([(run.name, Findings.read(run)) for run in runs]))
    say(f"Comparison: {out_file}")


def schema() -> None:
    """Print the JSON schema of experiment files, for editors: `recleak schema > experiment.schema.json`."""
    from recleak.experiment import schema as made

    say_json(made())


def show(findings: Findings) -> None:
    """The summary in the terminal: a line for each system, the strongest attack beside the strongest null."""
    out.print(findings)
    if findings.about["self_test"]:
        say("Self-test: the truth was shuffled; a leak found here is a false alarm.", style="yellow")
    level = round(100 * findings.about["level"])
    say(f"{level} % intervals over users and seeds; the attack was chosen on other users than those graded.")
    unmeasured = findings.verdicts.filter(verdict="not measured")
    for defense, question, words in unmeasured.select("defense", "question", "words").iter_rows():
        say(f"{defense}, {question}: {words}", style="yellow")
    for note in findings.about["notes"]:
        say(f"note: {note}", to=err, style="yellow")
