"""Start a SuperLink and two SuperNodes on loopback, run the app with `flwr run`, write the truth beside its record.

python examples/flower/run.py runs/flower [DEFENSE [ROUNDS]]
recleak audit examples/flower/audit.toml --recording runs/flower/recording --interactions runs/flower/interactions.csv

Ten users: one behind the first SuperNode, nine behind the second (with the defense `sums`, five behind each).
Nothing leaves this machine: Flower's telemetry, its search for updates and its installation of dependencies are off,
and everybody listens on 127.0.0.1 only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import polars as pl
from recommender.system import everybody

APP = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
SHARES = {"sums": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]}
ALONE = [[0], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
PATIENCE = 400  # seconds for the whole run
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}


def main(folder: Path, defense: str = "none", rounds: int = 2) -> None:
    """The whole run; what the processes say is in the folder `logs`."""
    folder = folder.resolve()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    shares = SHARES.get(defense, ALONE)
    ports = free_ports(1 + len(shares))
    home = folder / "flower-home"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{ports[0]}"\ninsecure = true\n')
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", "")])  # Flower's processes start others by name
    environment = {**os.environ, **OFFLINE, "FLWR_HOME": str(home), "PATH": path}
    with ExitStack() as running:

        def start(name: str, *command: str) -> subprocess.Popen[bytes]:
            return running.enter_context(
                process([*command, "--insecure"], folder / "logs" / f"{name}.log", environment)
            )

        address = f"127.0.0.1:{ports[0]}"
        superlink = start("superlink", "flower-superlink", "--host", "127.0.0.1", "--port", str(ports[0]))
        wait_for(ports[0], superlink)
        for number, (users, port) in enumerate(zip(shares, ports[1:], strict=True), start=1):
            link = ["--superlink", address, "--host", "127.0.0.1", "--port", str(port)]
            names = ",".join(map(str, users))
            start(f"supernode-{number}", "flower-supernode", *link, "--node-config", f'users="{names}"')
        recording = folder / "recording"
        config = f'nodes={len(shares)} rounds={rounds} defense="{defense}" recording="{recording}"'
        run = [str(BIN / "flwr"), "run", str(APP), "here", "--run-config", config, "--stream"]
        with open(folder / "logs" / "run.log", "wb") as log:
            subprocess.run(run, check=True, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=PATIENCE)
    manifest = recording / "manifest.json"
    if not manifest.exists() or not json.loads(manifest.read_text())["complete"]:
        raise SystemExit(f"The run did not finish; {folder / 'logs'} says why.")
    data = everybody()
    pl.DataFrame({"user": data.user, "item": data.item}).write_csv(folder / "interactions.csv")
    print(f"Recording: {recording}")


@contextmanager
def process(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Flower that ends with the context."""
    with open(log, "wb") as file:
        started = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]], env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield started
    finally:
        started.terminate()
        with suppress(subprocess.TimeoutExpired):
            started.wait(10)
        if started.poll() is None:
            started.kill()
            started.wait()


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def wait_for(port: int, started: subprocess.Popen[bytes], patience: float = 120.0) -> None:
    """Until somebody listens."""
    until = time.monotonic() + patience
    while time.monotonic() < until and started.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise SystemExit(f"Nobody listens on 127.0.0.1:{port}: the SuperLink did not start; its log says why.")


if __name__ == "__main__":
    given = [*sys.argv[1:], *["runs/flower", "none", "2"][len(sys.argv) - 1 :]]
    main(Path(given[0]), given[1], int(given[2]))
