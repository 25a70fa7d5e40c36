"""The table of environment variables, and what of an environment is taken, passed over and refused."""

from pathlib import Path

import pytest

from benchmarks.throughput.settings import _parser
from distca.errors import LaunchError
from distca.train.config.cli import known_settings
from distca.train.config.environment import help_text, near_misses, read, refuse_twice, settings
from distca.train.config.variable import Launcher, Variable
from distca.train.config.variables import VARIABLES

ROOT = Path(__file__).parents[3]
CASES = [(launcher, variable) for launcher in Launcher for variable in VARIABLES]
TAKEN = [(launcher, variable) for launcher, variable in CASES if variable.sets(launcher) is not None]


def a_value(variable: Variable) -> str:
    """One that it may have."""
    words = ("1", "0.5", "tiny", "mix", "prolong", "mlp", "packed", "keep")
    launcher = Launcher.RUN_4D if variable.training is None else Launcher.TRAINING
    for word in words:
        try:
            read(launcher, {variable.name: word})
        except LaunchError:
            continue
        return word
    raise AssertionError(f"no value for {variable.name}")


@pytest.mark.parametrize("launcher,variable", TAKEN, ids=str)
def test_what_is_taken_is_returned_and_in_the_help(launcher: Launcher, variable: Variable) -> None:
    value = a_value(variable)
    assert read(launcher, {variable.name: value, "HOME": "/"}) == {variable.name: value}
    assert read(launcher, {variable.name: ""}) == {}
    assert f"\n  {variable.name} " in help_text(launcher)


@pytest.mark.parametrize("launcher,variable", [case for case in CASES if case not in TAKEN], ids=str)
def test_what_is_not_taken_is_refused_with_what_to_do_instead(launcher: Launcher, variable: Variable) -> None:
    with pytest.raises(LaunchError, match=f"^{variable.name} is not a variable of ") as refused:
        read(launcher, {variable.name: a_value(variable)})
    assert refused.value.next_step.endswith(f", or unset {variable.name}.")
    assert "{" not in refused.value.next_step
    assert f"\n  {variable.name} " not in help_text(launcher)


@pytest.mark.parametrize("name", ["STEPZ", "STEP", "STEPPS", "STPES", "XSTEPS"])
def test_a_name_one_letter_away_is_warned_of_unless_the_right_one_is_given(name: str) -> None:
    said = f"{name} is '3', which no script of DistCA reads. If you mean STEPS, rename it."
    assert near_misses(Launcher.TRAINING, {name: "3", "HOME": "/"}) == [said]
    assert near_misses(Launcher.TRAINING, {name: "3", "STEPS": "4"}) == near_misses(Launcher.TRAINING, {name: ""}) == []


@pytest.mark.parametrize("launcher", Launcher)
def test_names_that_are_not_near_ours_are_not_warned_of(launcher: Launcher) -> None:
    others = "HOME PATH USER TERM LANG SHLVL HOSTNAME LOGNAME RANK WORLD_SIZE LOCAL_RANK STEPZZ TSPES CADS MIXT NODE"
    tools = "SLURM_NNODES SLURM_STEP_ID NCCL_DEBUG CUDA_VISIBLE_DEVICES TORCHELASTIC_RUN_ID OMP_NUM_THREADS PET_RANK"
    ours = [variable.name for variable in VARIABLES]
    assert near_misses(launcher, dict.fromkeys([*others.split(), *tools.split(), *ours], "1")) == []
    assert near_misses(launcher, dict.fromkeys([*others.split(), *tools.split()], "1")) == []


def test_a_variable_that_the_launcher_does_not_take_is_not_suggested() -> None:
    given = {"BATCHEZ": "3", "STEPZ": "3"}
    meant = {launcher: [said.split()[-3] for said in near_misses(launcher, given)] for launcher in Launcher}
    assert meant == {
        Launcher.TRAINING: ["STEPS,"],
        Launcher.RUN_3D: ["BATCHES,"],
        Launcher.RUN_4D: ["BATCHES,"],
    }


def test_what_a_variable_sets_exists() -> None:
    options = {option for action in _parser()._actions for option in action.option_strings}
    known = {*known_settings(), *options, "--config"}
    assert [name for variable in VARIABLES for name in variable.training or () if name not in known] == []
    assert [name for variable in VARIABLES for name in variable.benchmarks or () if name not in known] == []


def test_what_a_variable_does_not_set_is_read_by_the_launcher() -> None:
    folders = {True: "distca/train/launch", False: "benchmarks/throughput"}
    launchers = "".join(path.read_text() for path in (ROOT / folders[True]).glob("*.py"))
    for launcher, variable in TAKEN:
        made = [name for name in variable.sets(launcher) or ("",) if not name or name.startswith("--")]
        if launcher is not Launcher.TRAINING and made:
            launchers += (ROOT / folders[False] / "launch.py").read_text()
        assert not made or f'"{variable.name}"' in launchers, variable.name


@pytest.mark.parametrize("launcher,variable", TAKEN, ids=str)
def test_a_variable_and_its_setting_are_not_both_taken(launcher: Launcher, variable: Variable) -> None:
    values = {variable.name: a_value(variable)}
    for name in variable.sets(launcher) or ():
        option = f"--{name.removeprefix('--')}"
        for arguments in ([option, "x"], [f"{option}=x"]):
            with pytest.raises(LaunchError, match=f"^{variable.name} and {option} are both given"):
                refuse_twice(launcher, values, arguments)
        refuse_twice(launcher, values, [f"{option}_too", "x"])


def test_switches_are_written_as_settings_have_them() -> None:
    assert settings(Launcher.TRAINING, {"CAD": "0", "SEED": "0"}) == [
        *("--cad.enabled", "false"),
        *("--train.seed", "0", "--data.seed", "0"),
    ]


@pytest.mark.parametrize(
    "written,meant",
    [
        ("TPSIZE", "TP_SIZE"),
        ("TP", "TP_SIZE"),
        ("TP_DEGREE", "TP_SIZE"),
        ("PIPELINE_PARALLEL_SIZE", "PP_SIZE"),
        ("N_NODES", "NNODES"),
        ("NODE_COUNT", "NNODES"),
        ("N_GPUS", "GPUS_PER_NODE"),
        ("NUM_GPUS_PER_NODE", "GPUS_PER_NODE"),
        ("GPU_PER_NODE", "GPUS_PER_NODE"),
        ("MASTER_ADDRESS", "MASTER_ADDR"),
        ("MAX_STEPS", "STEPS"),
        ("TRAIN_STEPS", "STEPS"),
        ("STEP", "STEPS"),
        ("SEQ_LEN", "CONTEXT_LENGTH"),
        ("CONTEXT", "CONTEXT_LENGTH"),
        ("CONTEXT_LENGHT", "CONTEXT_LENGTH"),
        ("NUM_MICRO_BATCHES", "MICRO_BATCHES"),
        ("MICRO_BATCH_SIZE", "MICRO_BATCHES"),
        ("MODEL_SIZE", "MODEL"),
        ("CONFIG_FILE", "CONFIG"),
        ("RUN_NAME", "NAME"),
        ("USE_CAD", "CAD"),
        ("DATA_DIR", "DATA_PATH"),
        ("NSYS", "ENABLE_NSYS"),
        ("DRYRUN", "DRY_RUN"),
        ("EXPERIMENT_LOG_MEMORY", "EXPERIMENT_LOG_MEMORY_USAGE"),
    ],
)
def test_another_way_to_write_a_variable_is_named(written: str, meant: str) -> None:
    with pytest.raises(LaunchError, match=f"^There is no variable {written}; did you mean {meant}\\?$"):
        read(Launcher.TRAINING, {written: "1"})


@pytest.mark.parametrize(
    "name",
    [
        *("PET_MASTER_ADDR", "PET_NNODES", "PET_NODE_RANK", "NODE_NAME", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"),
        *("SLURM_GPUS_PER_NODE", "SLURM_NNODES", "SLURM_JOB_NAME", "PBS_NODENUM", "CUDA_HOME", "NCCL_DEBUG"),
        *("LOGNAME", "HOSTNAME", "USERNAME", "PATH", "LD_LIBRARY_PATH", "XDG_DATA_DIRS", "EDITOR", "LANG", "TERM"),
        *("DATA", "MODEL_PATH", "MODELS_DIR", "NODE", "NODE_ENV", "NODE_PATH", "CI", "DEBUG", "NAMESPACE", "_", "S"),
        *("lower", "tp", "PIP_CONFIG_FILE", "OMP_NUM_THREADS", "MAIL", "SHELL", "SHLVL", "TMUX", "TMP", "CARD"),
    ],
)
def test_what_is_somebody_elses_is_passed_over(name: str) -> None:
    for launcher in Launcher:
        assert read(launcher, {name: "1"}) == {}


@pytest.mark.parametrize(("name", "instead"), [("LR", "--optimizer.lr 3"), ("SAVE_EVERY", "--checkpoint.save_every 3")])
def test_what_other_scripts_take_is_not_passed_over(name: str, instead: str) -> None:
    with pytest.raises(LaunchError, match=f"^There is no variable {name}") as refused:
        read(Launcher.TRAINING, {name: "3"})
    assert instead in refused.value.next_step
    assert read(Launcher.RUN_3D, {name: "3"}) == {}


def test_a_value_that_a_switch_does_not_have_is_a_sentence_where_the_switch_is_not_taken() -> None:
    for value, written in (("1", "true"), ("01", "01")):
        with pytest.raises(LaunchError, match=r"^PING_PONG is not a variable of run3d\.sh") as caught:
            read(Launcher.RUN_3D, {"PING_PONG": value})
        assert caught.value.next_step == f"append --cad.ping_pong {written}, or unset PING_PONG."
