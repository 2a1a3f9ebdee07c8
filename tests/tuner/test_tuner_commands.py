"""``muzerox tune``, ``measure``, ``predict``, ``train --tune`` and the fingerprint of ``info`` as people meet them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muzerox.cli import main
from predictor import Hardware, RuntimePredictor, Store
from tuner.bridge import Config, concrete, load_config
from tuner.following.retune import Trained
from tuner.history import TuneDir
from tuner.measuring.fingerprint import _accelerators, _cheap_key, cpu_name, fingerprint
from tuner.measuring.workload import describe
from tuner.objective import STALENESS_PRICE
from tuner.result import TuneResult

TINY = {
    "replay.min_size": 64,
    "replay.capacity": 8192,
    "runtime.num_envs": 8,
    "runtime.loop_count": 1,
    "train.batch_size": 16,
    "search.num_simulations": 2,
    "network.width": 8,
    "network.depth": 1,
    "train.unroll_steps": 1,
    "train.td_steps": 4,
    "train.max_env_steps": 2000,
    "train.eval_episodes": 2,
}
OPTIONS = ["--env", "gymnax:CartPole-v1", *(part for path, value in TINY.items() for part in ("--set", f"{path}={value}"))]


def muzerox(*arguments: str, cwd: Path, home: Path | None = None, seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"MUZEROX_HOME": str(home)} if home else {})
    command = [sys.executable, "-m", "muzerox", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=seconds, check=False, env=environment)


def test_arguments_are_read_without_jax() -> None:
    """``--help``, and most mistakes, are answered in a fraction of a second."""
    read = "import sys; from muzerox.commands import make_parser; make_parser(); print({'flax', 'jax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_measuring_and_predicting_give_the_same_keys(tmp_path: Path) -> None:
    measured = muzerox("measure", *OPTIONS, "--repeats", "2", "--json", cwd=tmp_path)
    assert measured.returncode == 0, measured.stderr
    predicted = muzerox("predict", *OPTIONS, "--json", cwd=tmp_path)
    assert predicted.returncode == 0, predicted.stderr
    one, other = json.loads(measured.stdout), json.loads(predicted.stdout)
    # Which only a prediction has.
    seen = {name: other.pop(name) for name in ("measured_seconds_per_env_step", "measured_times")}
    assert seen == {"measured_seconds_per_env_step": one["seconds_per_env_step"], "measured_times": 1}
    assert list(one) == [name for name in other if name not in ("interval", "shares", "training_seconds")]
    assert other["training_seconds"] == pytest.approx(2000 * other["seconds_per_env_step"])
    assert one["outcome"] == other["outcome"] == "ok"
    assert 0.5 < other["seconds_per_env_step"] / one["seconds_per_env_step"] < 2.0  # it has just seen it
    assert list(tmp_path.iterdir()) == []  # neither writes anything here


def test_a_training_whose_searches_deepen_is_predicted_to_its_end(tmp_path: Path) -> None:
    deepening = [*OPTIONS, "--set", "search.final_simulations=8"]
    said = muzerox("predict", *deepening, "--json", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    told = json.loads(said.stdout)
    at = {int(count): seconds for count, seconds in told["seconds_per_env_step_by_simulations"].items()}
    assert list(at) == [2, 4, 8]
    assert told["seconds_per_env_step"] == at[2] < at[4] < at[8]
    assert told["training_seconds"] == pytest.approx(667 * at[2] + 667 * at[4] + 666 * at[8])
    alike = json.loads(muzerox("predict", *OPTIONS, "--set", "search.num_simulations=8", "--json", cwd=tmp_path).stdout)
    assert at[8] == pytest.approx(alike["seconds_per_env_step"])
    assert told["peak_bytes"] == pytest.approx(alike["peak_bytes"])


def test_info_shows_the_measured_machine(tmp_path: Path) -> None:
    done = muzerox("info", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rates = json.loads(done.stdout)["measured rates"]
    assert {"float32 products", "bfloat16 products", "copies", "dispatch", "cores", "memory"} <= set(rates)
    kept = fingerprint()
    assert isinstance(kept, Hardware)
    assert rates["cores"] == kept.cores == len(os.sched_getaffinity(0))
    assert 1e8 < kept.one_core_flops < 1e14
    assert 1e8 < kept.copy_bytes_per_second < 1e13
    assert 1e-7 < kept.dispatch_seconds < 1e-1
    assert 0.0 <= kept.narrowing_seconds < 1e-8


def test_another_accelerator_is_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept of a host is not taken for the same host with a GPU more, or once JAX can use it."""
    for number, name in enumerate(("NVIDIA H100", "NVIDIA H100")):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 1{number}\n")
    found = _accelerators(tmp_path)
    assert [line for line in found if "H100" in line] == ["Model: \t\t NVIDIA H100"] * 2
    assert not any("IRQ" in line for line in found)
    keys = {_cheap_key()}
    for accelerators in (found, found[:-1], ["cuda12 0.10.2"]):
        monkeypatch.setattr("tuner.measuring.fingerprint._accelerators", lambda there=accelerators: there)
        keys.add(_cheap_key())
    assert len(keys) == 4


BAD: list[tuple[list[str], str]] = [
    (["tune", "--budget", "soon"], "--budget = 'soon'"),
    (["tune", "--budget", "1s"], "--budget = '1s'"),
    (["tune", "--budget", "-4m"], "budget"),
    (["tune", "--trials", "0"], "--trials = 0: must be at least 1"),
    (["tune", "--trials", "few"], "trials"),
    (["tune", "--knobs", "all"], "knobs"),
    (["tune", "--staleness-price", "-1"], "--staleness-price = -1.0"),
    (["tune", "--staleness-price", "11"], "must be from 0 to 10"),
    (["tune", "--env", "gymnax:CartPole-v9"], "CartPole-v1"),
    (["tune", "--set", "runtime.num_enws=8"], "runtime.num_envs"),
    (["tune", "--set", "allocation.cores=4096"], "allocation.cores = 4096"),
    (["tune", "--set", "allocation.cores=0"], "allocation.cores = 0"),
    (["tune", "--set", "allocation.memory_gib=900000"], "allocation.memory_gib"),
    (["tune", "--set", "allocation.memory_gib=1", "--set", "replay.capacity=40000000"], "replay.capacity = 40000000: takes"),
    (["measure", "--set", "allocation.memory_gib=1", "--set", "replay.capacity=40000000"], "replay.capacity = 40000000: takes"),
    (["predict", "--set", "allocation.memory_gib=1", "--set", "replay.capacity=40000000"], "replay.capacity = 40000000: takes"),
    (["tune", "--set", "allocation.devices=64"], "allocation.devices = 64"),
    (["tune", "--set", "search.split=3"], "search.split = 3"),
    (["tune", "--objective", "speed"], "--objective = 'speed'"),
    (["tune", "--objective", "time=0,cost=0"], "needs a weight above 0"),
    (["tune", "--objective", "cost=-1"], "--objective = 'cost=-1'"),
    (["tune", "--objective", "cost", "--prices", "core=0,gib=0,device=0"], "one must be above 0"),
    (["tune", "--budget", "nan"], "nearest valid: 5m"),
    (["tune", "--budget", "\u0663m"], "must be a time such as"),
    (["tune", "--objective", "time=0.5,time=0.5"], "each once"),
    (["tune", "--objective", "time=1e308,cost=1e308"], "from 1e-06 to 1e+06"),
    (["tune", "--prices", "core=1e39"], "from 1e-06 to 1e+06"),
    (["measure", "--timeout", "nan"], "nearest valid: 180"),
    (["tune", "--out", "lost"], "holds trials of a tuning, but no start.toml"),
    (["tune", "--prices", "gpu=3"], "core, gib, device"),
    (["tune", "--max-cores", "0"], "--max-cores = 0"),
    (["tune", "--max-memory", "nan"], "--max-memory = nan"),
    (["tune", "--out", "taken"], "taken"),
    (["tune", "--out", ""], "--out = ''"),
    (["tune", "--out", "x" * 300], "cannot be written: File name too long"),
    (["train", "--tune", "10s", "--out", "x" * 252], "cannot be written: File name too long"),  # that of the tuning beside it
    (["tune", "--config", "absent.toml"], "absent.toml"),
    (["tune", "--config", "broken.toml"], "broken.toml"),
    (["measure", "--repeats", "0"], "--repeats = 0"),
    (["measure", "--timeout", "0"], "--timeout = 0"),
    (["measure", "--set", "allocation.cores=4096"], "allocation.cores"),
    (["measure", "--set", "allocation.device_memory=2"], "allocation.device_memory"),
    (["measure", "--env", "pgx:chess_960"], "env = 'pgx:chess_960'"),
    (["predict", "--set", "allocation.memory_gib=0"], "allocation.memory_gib"),
    (["predict", "--set", "network.kind=resnet"], "network.kind"),
    (["train", "--tune", "later"], "--tune = 'later'"),
    (["train", "--tune", "2m", "--resume", "run"], "--tune"),
    (["train", "--tune", "2m", "--out", "taken"], "taken"),
]


GENERIC = (
    "processor\t: {}\nvendor_id\t: AuthenticAMD\ncpu family\t: {}\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nflags\t\t: fpu vme\n"
)
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\nprocessor\t: 1\n"


def test_machines_of_a_generic_name_are_told_apart() -> None:
    old, new = (cpu_name("\n".join(GENERIC.format(core, family) for core in range(2))) for family in (25, 26))
    assert [old, new] == ["AMD EPYC, cpu family 25, model 2", "AMD EPYC, cpu family 26, model 2"]
    assert cpu_name(ARM) == "cpu implementer 0x41, cpu part 0xd0c"
    assert cpu_name("") == ""


@pytest.mark.parametrize(("arguments", "named"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_input_gets_one_line_and_exit_code_2(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the machine is measured: its home stays empty."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("something")
    (tmp_path / "broken.toml").write_text("a = [")
    (tmp_path / "lost" / "trials").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("MUZEROX_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    env = [] if "--env" in arguments or "--config" in arguments else ["--env", "gymnax:CartPole-v1"]
    try:
        code = main([*arguments[:1], *env, *arguments[1:]])
    except SystemExit as error:  # argparse's way
        code = int(error.code or 0)
    said = capsys.readouterr()
    assert code == 2, said.err
    assert len(said.err.strip().splitlines()) == 1, said.err
    assert named in said.err
    assert said.out == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("damage", ["not json\n", '{"a": 1}\n'], ids=["torn in the middle", "of another kind"])
def test_a_damaged_store_is_named_in_one_line(damage: str, tmp_path: Path) -> None:
    home, measured = tmp_path / "home", fingerprint()
    shutil.copytree(Path(os.environ["MUZEROX_HOME"]) / "hardware", home / "hardware")
    folder = home / "measurements" / measured.id
    folder.mkdir(parents=True)
    (folder / "writer.jsonl").write_text(damage + damage)
    done = muzerox("predict", *OPTIONS, cwd=tmp_path, home=home)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert str(folder) in done.stderr


@pytest.mark.slow(90)
def test_training_tuned_does_it_all(tmp_path: Path) -> None:
    done = muzerox("train", *OPTIONS, "--tune", "60s", "--out", "runs/tuned", "--json", cwd=tmp_path, seconds=900.0)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # exactly one object
    assert told["env_steps"] >= 2000
    assert told["tuning"]["finished"]
    assert told["balance_factor"] > 0
    run = tmp_path / "runs" / "tuned"
    assert (run / "return_curve.png").exists()
    tuning = tmp_path / "runs" / "tuned-tuning"
    assert (tuning / "tuning.png").exists()
    assert (tuning / "report.html").exists()
    assert (run / "config.toml").read_text() == (tuning / "tuned.toml").read_text()
    assert muzerox("evaluate", "runs/tuned", "--episodes", "2", cwd=tmp_path).returncode == 0


@pytest.mark.slow(400)
def test_killed_twenty_times_a_tuning_loses_and_repeats_no_trial(tmp_path: Path) -> None:
    """``kill -9`` at random moments; what was reported as measured stays, and nothing is measured again."""
    command = [sys.executable, "-m", "muzerox", "tune", *OPTIONS, "--budget", "40m", "--out", "t"]
    rng = random.Random(0)
    reported: dict[str, Any] = {}
    folder = TuneDir(tmp_path / "t")
    for kill in range(20):
        log = (tmp_path / "log").open("w+")
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 600.0
        if kill % 4 == 0:  # soon after a trial has ended, however slow the machine
            while " trial " not in (tmp_path / "log").read_text() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 4.0))
        else:  # while it starts, resumes or measures
            time.sleep(rng.uniform(2.0, 9.0))
        assert process.poll() is None, (tmp_path / "log").read_text()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        said = [line.split("trial")[1].split()[0] for line in log if " trial " in line and "steps/s (" in line]
        log.close()
        trials = folder.trials() if (tmp_path / "t" / "start.toml").exists() else []
        kept = {trial.id: trial for trial in trials}
        assert reported.items() <= kept.items()
        assert {int(number) for number in said} <= {trial.number for trial in trials}
        points = [tuple(sorted(trial.changes.items())) for trial in trials]
        assert len(set(points)) == len(points)
        assert [trial.number for trial in trials] == list(range(len(trials)))
        reported = kept
    command += ["--trials", str(len(reported) + 2)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    final = {trial.id: trial for trial in folder.trials()}
    assert reported.items() <= final.items()
    assert len(reported) >= 5
    assert (tmp_path / "t" / "tuned.toml").exists()


@pytest.fixture
def _heeded_ctrl_c() -> Iterator[None]:
    """Processes started meanwhile heed SIGINT, also where these tests run in the background and were told to ignore it.

    An ignored signal stays ignored in children, a handled one falls back to its default.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("_heeded_ctrl_c")
@pytest.mark.parametrize(
    "how", [["tune", "--budget", "10m", "--out", "t"], ["train", "--tune", "10m", "--out", "run"]], ids=" ".join
)
def test_ctrl_c_keeps_the_best_so_far(how: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "muzerox", *how, *OPTIONS, "--json"]
    folder = tmp_path / ("t" if how[0] == "tune" else "run-tuning")
    environment = os.environ | {"MUZEROX_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 600.0
    while time.monotonic() < deadline and process.poll() is None and not list((folder / "trials").glob("*.jsonl")):
        time.sleep(0.5)
    time.sleep(8.0)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=180)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert json.loads(printed)["finished"] is False  # exactly one object
    assert f"the same command with --out {how[-1]} continues" in said
    assert (folder / "tuned.toml").exists()
    assert "stopped before the comparison" in (folder / "report.html").read_text("utf-8")
    (measurements,) = (tmp_path / "home" / "measurements").iterdir()  # a folder for each kind of machine
    assert Store(measurements).rows() != []


# What is passed on -----------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What a tuning and a training that follows it are asked for, instead of either; the training is stopped as it starts."""
    found: dict[str, Any] = {}

    def tune(config: Config, **options: Any) -> TuneResult:
        found.update(options)
        hardware = fingerprint()
        predicted = RuntimePredictor().predict(describe(concrete(config, "cpu")), hardware).to_dict()
        unknown = dict.fromkeys(("speedup", "start_measurement", "measurement", "balance", "verdict"))
        config = config.replace({"allocation.cores": 1, "allocation.memory_gib": 1.0})
        given = {"start": config, "config": config, "predicted": predicted, "seconds": 1.0, "hardware": hardware, "history": ()}
        return TuneResult(out=str(tmp_path / "t"), finished=True, **given, **unknown)

    def train(*_: Any, **options: Any) -> Trained:
        found.update(options)
        return Trained(code=130, said="", cores_busy=1.0, switches=())

    monkeypatch.setattr("tuner.loop.tune", tune)
    monkeypatch.setattr("tuner.following.retune.train_in_phases", train)
    return found


@pytest.mark.parametrize(("options", "phased"), [([], True), (["--phases"], True), (["--no-phases"], False)])
def test_a_tuned_training_is_followed_unless_told_otherwise(
    options: list[str], phased: bool, asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *OPTIONS, "--tune", "2m", "--out", str(tmp_path / "run"), "--json", *options]) == 130
    assert (asked["phased"], asked["budget"]) == (phased, "2m")
    said = capsys.readouterr()
    assert json.loads(said.out)["tuning"]["finished"], "one object, although the training could not say anything"
    assert f"muzerox train --config {tmp_path / 't' / 'tuned.toml'}" in said.err


def test_what_may_move_and_what_age_costs_are_passed_on(asked: dict[str, Any]) -> None:
    assert main(["tune", *OPTIONS, "--json", "--knobs", "learning", "--staleness-price", "0.5"]) == 0
    assert (asked["effect"], asked["staleness_price"]) == ("learning", 0.5)
    assert main(["tune", *OPTIONS, "--json"]) == 0
    assert (asked["effect"], asked["staleness_price"]) == ("neutral", STALENESS_PRICE)


def test_a_run_is_gone_on_with_in_phases(tmp_path: Path) -> None:
    trained = muzerox("train", *OPTIONS, "--out", "run", "--json", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    longer = ["--set", "train.max_env_steps=4000", "--set", "allocation.cores=1"]
    done = muzerox("train", "--resume", "run", "--phases", *longer, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["env_steps"] >= 4000
    assert "resumed at update" in done.stderr
    config = load_config(tmp_path / "run" / "config.toml")
    assert (config.train.max_env_steps, config.allocation.cores) == (4000, 1)
    assert not (tmp_path / "run" / "switches.jsonl").exists(), "it is too short for one"
