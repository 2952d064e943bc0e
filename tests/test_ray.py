"""Ray against this process: the same bits for chunks and cells, also when a worker is killed; clear ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recleak import runs
from recleak.cells import Cell, loaded, sent
from recleak.cli import main
from recleak.data import store
from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.defenses.base import Chain, Defense
from recleak.defenses.clipping import ClipByNorm
from recleak.defenses.noise import GaussianNoise
from recleak.deploy import away
from recleak.deploy import ray as deployed
from recleak.deploy.ray import RayCluster
from recleak.errors import ConfigError, RecleakError
from recleak.experiment import experiment
from recleak.models.base import Batch, Model, Params
from recleak.models.mf import MF
from recleak.models.ncf import NCF
from recleak.protocols.federated import Federated, FederatedModel, train_federated
from recleak.runs import RunError, audit_run
from recleak.testing.models import Wiretap, ragged
from recleak.training.cohort import LocalTraining
from recleak.training.executor import Executor, InProcess
from recleak.training.optimizers import Adam
from recleak.wire import Upload

CLUSTER = RayCluster(cpus=2, store_bytes=200_000_000)
PROTOCOL = Federated(rounds=3, local=LocalTraining(epochs=2, batch_size=4, optimizer=Adam(0.01, keep=True)))
NOISE = Chain((ClipByNorm(1.0), GaussianNoise(0.05, rows="all")))

pytestmark = [  # Ray leaves files of its own open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """One Ray for all tests: two CPUs on the loopback."""
    if find_spec("ray") is None:  # not by importing it, which would decide where it listens
        pytest.skip("Ray is not installed: pip install 'recleak[ray]'")
    with CLUSTER.connected():
        yield CLUSTER


@pytest.fixture(scope="module")
def data() -> Interactions:
    return ragged(n_users=150, n_items=40)  # three blocks


def trained(
    data: Interactions, executor: Executor, model: Model, defense: Defense | None = None, protocol: Federated = PROTOCOL
) -> tuple[FederatedModel, Wiretap]:
    tap = Wiretap()
    made = train_federated(
        protocol, model, data, defense=defense, taps=[tap], executor=executor, chunk=8, show_progress=False
    )
    return made, tap


def assert_same_run(one: tuple[FederatedModel, Wiretap], other: tuple[FederatedModel, Wiretap]) -> None:
    """Every bit of parameters, of what clients keep, and of every message."""
    (model, tap), (expected, heard) = one, other
    assert model.loss == expected.loss
    for name, value in expected.params.items():
        assert torch.equal(model.params[name], value), name
    users = torch.arange(expected.train.n_users)
    assert torch.equal(model.scores(users), expected.scores(users)), "what clients keep"
    assert [type(message) for message in tap.messages] == [type(message) for message in heard.messages]
    for got, want in zip(tap.messages, heard.messages, strict=True):
        if isinstance(got, Upload) and isinstance(want, Upload):
            assert torch.equal(got.update.client, want.update.client)
            assert torch.equal(got.update.item, want.update.item)
            for name, value in {**want.update.values, **want.update.rows}.items():
                assert torch.equal({**got.update.values, **got.update.rows}[name], value), name


# --- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize(("model", "defense"), [(NCF(8, (8,)), None), (MF(8), NOISE)], ids=["NCF", "MF with noise"])
def test_the_same_bits_as_here(cluster: RayCluster, data: Interactions, model: Model, defense: Defense | None) -> None:
    assert_same_run(trained(data, cluster, model, defense), trained(data, InProcess(1), model, defense))


@dataclass(frozen=True)
class Waits(MF):
    """Waits to be killed in the middle of a chunk, once."""

    marker: str = ""

    def logits(self, params: Params, batch: Batch) -> Tensor:
        try:
            descriptor = os.open(self.marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return super().logits(params, batch)
        os.write(descriptor, str(os.getpid()).encode())
        os.close(descriptor)
        time.sleep(120)
        raise AssertionError("nobody came")


@pytest.mark.heavy
def test_a_killed_worker_loses_and_doubles_nothing(cluster: RayCluster, data: Interactions, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    killed: list[int] = []

    def kill() -> None:
        while not (marker.exists() and marker.read_text()):
            time.sleep(0.02)
        killed.append(int(marker.read_text()))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    run = trained(data, cluster, Waits(8, marker=str(marker)))
    killer.join(60)
    assert killed
    assert killed[0] != os.getpid()
    assert_same_run(run, trained(data, InProcess(1), Waits(8, marker=str(marker))))
    uploads = [message for message in run[1].messages if isinstance(message, Upload)]
    for round in range(PROTOCOL.rounds):
        clients = torch.cat([upload.update.client for upload in uploads if upload.round == round])
        assert clients.tolist() == list(range(data.n_users)), "each client once, in order"


class Dies(MF):
    """A model whose scoring ends its process."""

    def logits(self, params: Params, batch: Batch) -> Tensor:
        os._exit(3)


class Refuses(MF):
    """A model that tells what is wrong."""

    def logits(self, params: Params, batch: Batch) -> Tensor:
        raise ConfigError("no score today")


class Locked(MF):
    """A model that cannot leave its process."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a lock")


@pytest.mark.heavy
def test_errors_and_deaths_are_told(cluster: RayCluster, data: Interactions, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Federated(rounds=1, clients_per_round=1)
    monkeypatch.setattr(deployed, "RETRIES", 1)
    with pytest.raises(RecleakError, match=r"(?s)Ray gave up on a chunk.*died 2 times.*smaller chunks"):
        trained(data, cluster, Dies(4), protocol=one)
    with pytest.raises(ConfigError, match="no score today"):
        trained(data, cluster, Refuses(4), protocol=one)
    with pytest.raises(ConfigError, match=r"(?s)cannot be sent to a worker \(.*lock.*InProcess"):
        trained(data, cluster, Locked(4), protocol=one)


@pytest.mark.heavy
def test_other_versions_are_refused(cluster: RayCluster, data: Interactions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away, "versions", lambda: {"recleak": "0.0.1"})
    with pytest.raises(ConfigError, match=r"Got recleak .* on a worker, expected 0\.0\.1"):
        trained(data, cluster, MF(4), protocol=Federated(rounds=1, clients_per_round=1))


# --- cells ------------------------------------------------------------------------------------------------------------


def table(data: str, **changes: Any) -> dict[str, Any]:
    protocol = {"use": "federated", "rounds": 3, "clients_per_round": 12, "local": {"epochs": 2}}
    made = {
        "title": "Tiny",
        "seeds": 1,
        "data": {"name": data, "candidates": 20},
        "model": {"use": "mf", "factors": 4},
        "protocol": protocol,
        "defenses": ["none", {"use": "gaussian-noise", "std": 1.0}],
        "attacks": ["k-means"],
    }
    return {**made, **changes}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "small"
    store.save(Synthetic(n_users=60, n_items=50, mean_activity=10, min_activity=4).generate(), folder, name="small")
    return str(folder)


def everything(folder: Path) -> dict[str, bytes]:
    """All files that a run leaves, but for its log, its lock and its page, which names the command."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if name not in ("log.json", ".lock")}


@dataclass(frozen=True)
class MarksAndDies:
    """The work of an audit; in its first process it dies in the middle of a cell, before anything is stored."""

    marker: Path

    def __call__(self, job: away.Job, threads: int) -> None:
        if isinstance(job, Cell):
            try:
                self.marker.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                (job.path / "work-begun").mkdir(parents=True)
                os.kill(os.getpid(), signal.SIGKILL)
        runs.work(job, threads)


@pytest.mark.heavy
def test_cells_have_the_same_bytes_also_if_a_worker_is_killed(
    cluster: RayCluster, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = experiment(table(small))
    audit_run(made, tmp_path / "here", command="test")
    monkeypatch.setattr(runs, "work", MarksAndDies(tmp_path / "marker"))
    audit_run(made, tmp_path / "there", command="test", cluster=cluster)
    assert (tmp_path / "marker").exists(), "a worker was killed"
    assert everything(tmp_path / "there") == everything(tmp_path / "here")


@pytest.mark.heavy
def test_a_cell_that_fails_is_told_and_the_others_are_stored(
    cluster: RayCluster, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "work", _fails_with_noise)
    with pytest.raises(RunError, match=r"1 of 3 cells failed \(.*gaussian-noise"):
        audit_run(experiment(table(small)), tmp_path / "run", cluster=cluster)
    assert "ArithmeticError: noise" in capsys.readouterr().err
    assert len(list((tmp_path / "run" / "cells").glob("*/utility.parquet"))) == 1


def _fails_with_noise(job: away.Job, threads: int) -> None:
    if "noise" in job.label:
        raise ArithmeticError("noise")
    runs_work(job, threads)


runs_work = runs.work


@pytest.mark.heavy
def test_the_command(cluster: RayCluster, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["--data", small, "--model", "mf,factors=4", "--defense", "none", "--attack", "k-means"]
    with pytest.raises(SystemExit) as ended:
        main(["audit", *short, "--rounds", "2", "--seeds", "1", "--executor", "ray", "--out", "run"])
    assert ended.value.code == 0
    assert (tmp_path / "run" / "report.html").exists()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[str]:
    """The client address of a cluster that other processes are, on the loopback."""
    if find_spec("ray") is None or find_spec("grpc") is None:
        pytest.skip("Ray or its client is not installed: pip install 'recleak[ray]'")
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        port, client = one.getsockname()[1], two.getsockname()[1]
    sizes = ["--num-cpus", "2", "--object-store-memory", "200000000"]
    ports = ["--port", str(port), "--ray-client-server-port", str(client)]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--include-dashboard=false"]
    patience = {"RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "300"}  # machines are shared
    forks = {"GRPC_ENABLE_FORK_SUPPORT": "0"}  # with it, what a head forks for a client dies of a signal now and then
    environment = {**os.environ, **deployed._QUIET, **deployed._LOOPBACK, **patience, **forks}
    with (tmp_path / "head.log").open("w") as log:
        head = subprocess.Popen([*command, *sizes, *ports], env=environment, stdout=log, stderr=log)
        try:
            yield f"ray://127.0.0.1:{client}"
        finally:
            head.terminate()  # with it goes what it has started
            head.wait(60)


@pytest.mark.heavy
def test_a_cluster_elsewhere(elsewhere: str, small: str, tmp_path: Path) -> None:
    """Through the client's port; the worker has neither the data nor the run directory from a file."""
    (tmp_path / "tiny.toml").write_text(
        f"""
        data = {{ name = "{small}", candidates = 20 }}
        model = {{ use = "mf", factors = 4 }}
        protocol = {{ use = "federated", rounds = 2, clients_per_round = 12 }}
        attacks = ["k-means"]
        """,
        encoding="utf-8",
    )
    audit = [sys.executable, "-m", "recleak", "audit", "tiny.toml"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    for options in (["--workers", "1", "--out", "here"], ["--executor", elsewhere, "--out", "there"]):
        subprocess.run([*audit, *options], cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)
    cells = [everything(tmp_path / name / "cells") for name in ("here", "there")]
    assert cells[0]
    assert cells[0] == cells[1]


def test_an_errand_brings_home_what_is_measured_away(small: str, tmp_path: Path) -> None:
    """Without Ray: another folder, the data sent along, the same bytes."""
    plan = runs._Plan(experiment(table(small, defenses=["none"])), tmp_path)
    for job in plan.missing():
        outcome, files = away.run(away.errand(job), loaded(away.data_of(job)), runs.work, 1)
        assert not outcome.problems
        assert not job.path.exists()
        away.bring(job, files)
    assert plan.missing() == []
    sent.clear()


def test_an_errand_is_refused_where_code_differs(small: str, tmp_path: Path) -> None:
    (job, *_) = runs._Plan(experiment(table(small)), tmp_path).missing()
    with pytest.raises(ConfigError, match=r"(?s)Modules of your own .* differ on a worker"):
        away.run(replace(away.errand(job), name="another"), loaded(away.data_of(job)), runs.work, 1)
    sent.clear()
    with pytest.raises(ConfigError, match="expected a plain name"):
        away.bring(job, {"../elsewhere.json": b""})


def test_whatever_decides_bits_must_be_the_same() -> None:
    here = away.versions()
    assert {"recleak", "source of recleak", "python", "torch", "numpy", "numba", "scipy", "polars"} <= set(here)
    away.Home(here, ()).require_same()
    for name, mine in here.items():
        with pytest.raises(ConfigError, match=rf"Got {name} {re.escape(mine)} on a worker, expected another"):
            away.Home({**here, name: "another"}, ()).require_same()


class _Crashed(Exception):
    pass


class _NoMemory(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_Crashed("The worker died."), r"(?s)a cell \(_Crashed\): its workers died 4 times\..*smaller chunks"),
        (_NoMemory("Task was killed due to the node running low on memory.\nMore"), r"(?s)low on memory\.\n.*smaller"),
        (LookupError("\n Object 12 is lost.\nTraceback"), r"(?s)a cell \(LookupError\): Object 12 is lost\.\n.*Check"),
        (LookupError(), r"it does not say why\.\n"),
    ],
)
def test_what_ray_says_is_told(error: Exception, words: str) -> None:
    """Not everything is the death of a worker."""
    kinds = {"RayTaskError": ArithmeticError, "WorkerCrashedError": _Crashed, "OutOfMemoryError": _NoMemory}
    ray = SimpleNamespace(exceptions=SimpleNamespace(**kinds, RayError=Exception))
    with pytest.raises(RecleakError, match=words), deployed._told(ray, "a cell"):
        raise error


@pytest.mark.parametrize(
    ("protocol", "words"),
    [
        ({"use": "recorded", "recording": "seen"}, "Got a recording and"),
        ({"use": "vectors", "vectors": "v.npz"}, "vectors"),
    ],
)
def test_other_outputs_that_exist_are_called_by_their_name(
    tmp_path: Path, protocol: dict[str, Any], words: str
) -> None:
    made = experiment(
        table("synthetic", protocol=protocol, model="unknown", attacks=["from-lists"], attributes=["gender"])
    )
    with pytest.raises(ConfigError, match=words):
        audit_run(made, tmp_path, cluster=RayCluster())


def test_lists_that_exist_are_not_sent_to_a_cluster(tmp_path: Path) -> None:
    lists = {"use": "published", "lists": "lists.parquet"}
    made = experiment(
        table("synthetic", protocol=lists, model="unknown", attacks=["from-lists"], attributes=["gender"])
    )
    with pytest.raises(ConfigError, match=r"(?s)lists that exist already and a cluster.*Leave the executor out"):
        audit_run(made, tmp_path, cluster=RayCluster())


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["raay", "ray://", "spark", ""])
def test_other_executors_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"expected 'ray' .* or 'ray://HOST:10001'"):
        RayCluster(address)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="workers is 0"):
        RayCluster(workers=0)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"(?s)needs Ray.*pip install 'recleak\[ray\]'"), RayCluster().connected():
        pass
