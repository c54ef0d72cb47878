"""The documents: code runs, commands parse, messages are the real ones, links lead somewhere."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rl_lab.cli import COMMANDS, Parser, main

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
GUIDE = ROOT / "docs" / "new_algorithm.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
FENCE = re.compile(r"^```(\w*)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Every class, file, configuration group, key and command of the five documents that came before the package.
NAMES = """
scripts/train.py Orchestrator PhaseScheduler WorldModelWorkflow CollectResult WorkflowContext WorldModelComponents
ControllerManager PhaseDefinition PhaseConfig CheckpointManager orchestration/orchestrator.py phase_scheduler.py
utils/base.py utils/context.py utils/controllers.py dreamer.py tdmpc.py og_wm.py diffusion_policy_workflow.py
DreamerWorkflow TDMPCWorkflow OriginalWorldModelsWorkflow DiffusionPolicyWorkflow DreamerActorController
DreamerCriticController mpc_planner.py cma_es.py random_policy.py deterministic_mlp.py mdn_rnn.py rssm.py identity.py
conv_vae.py discounted.py n_step.py td_lambda.py BaseEnvironment gym_wrapper.py atari_wrapper.py carracing_wrapper.py
dmc_wrapper.py minigrid_wrapper.py BaseBuffer world_model_sequence.py disk_buffer.py offline.py utils/checkpoint.py
utils/config.py utils/logger.py configs/config.yaml configs/experiment/ configs/workflow/ configs/components/
configs/controller/ configs/buffer/ configs/environment/ representation_learner dynamics_model og_wm_carracing
dreamer_cartpole initialize update_world_model collect_step update_controller imagine get_state set_state
_bind_context _reset_episode_tracking _update_episode_stats _snapshot_episode_tracking _restore_episode_tracking
_reset_rollout_state train_environment eval_environment components buffers optimizers controller_manager
checkpoint_manager experiment_logger initial_observation initial_dones global_step device current_phase next_action
advance steps episodes metrics trajectory extras total_timesteps training.phases duration_steps duration_updates
duration_cycles workflow_hooks collect evaluate online offline eval_only experiment.name experiment.seed
experiment.device _dims algorithm.learning_rate optimizers.world_model _partial_ _target_ instantiate
training.resume_path +experiment= --cfg --package pytest tensorboard version workflow_name phase_state controllers
workflow_custom collect/ train/ controller/ eval/ workflow/ observe observe_sequence decode reset_state imagine_step
experiments/ datasets/ your_algorithm.py your_encoder your_controller W&B TensorBoard RLModule ReplayBuffer Trainer
Batch observations actions rewards dones next_observations infos merge select log_probs train_step eval_step seed_all
module_state trainer_state replay_meta rng_state created_at run_id ts registry pydantic distributed MettaTrainer
RolloutCollector PPOOptimizer PolicyEvaluator TrainingCheckpointer StatsLogger TrainingConfig AgentConfig
TrainerConfig small_fast_config functional_training_loop functional_trainer.py train_config.py step_fn custom_losses
custom_loss_fns curiosity_loss diversity_loss create_training_components default_training_step state.agent_steps
from_dict compute_ppo_loss policy_loss value_loss entropy_loss total_loss approx_kl clipfrac PPOConfig save_policy
save_trainer_state load_trainer_state load_policy policy_store curriculum wandb_run sim_config stats_client vecenv
experience direct_training_with_components.py functional_training_example.py structured_config_training.py EnvFactory
Policy Dynamics Value Planner planner.act trainer.update RolloutBatch TransitionBatch StepBatch RolloutBuffer
model_dump Packer Batcher DataSource StreamSource ReplaySource last_obs components/policy.py components/dynamics.py
components/value.py components/planner.py components/trainer.py algos/dqn.py algos/ppo.py algos/mpc.py algos/mbmpc.py
envs.py replay_buffer.py utils.py MBMPCConfig PolicyConfig DynamicsConfig ValueConfig PlannerConfig EnvConfig CEM MCTS
TrajectoryModel diffusion.sample rollout_reward diffusion_planner.act guidance_fn build_mlp tdmpc2.py TDMPC2
core/agent.py core/training.py core/inference.py core/utils.py _load_state_dict_compat store_transition act_batch
act_with_stats model_encoder.py model_policy.py model_q_function.py model_q_ensemble.py model_reward.py
model_termination.py model_dynamics_simple.py model_dynamics_opponent.py model_opponent_cloning.py model_init.py
dynamics_wrapper.py DynamicsWithOpponentWrapper td_targets.py policy_update.py value_update.py model_update.py
optimizer_manager.py _compute_td_targets _update_policy mppi_planner_simple.py rollout.py rollout_dynamics_multi_step
opponent_manager.py cloning_trainer.py agent_loader.py _initialize_opponent_simulation _train_opponent_cloning
_load_opponent_agent persistence/checkpoint.py model_io.py utils/util.py utils/logging.py RunningScale soft_ce
log_architecture tdmpc2_original.py tdmpc2_training.py tdmpc2_inference.py tdmpc2_opponent.py tdmpc2_persistence.py
TDMPC2ReplayBuffer sample_sequences winner buffer_device OpponentCloningBuffer opponent_cloning_buffers
opponent_cloning_networks collect_opponent_demonstrations store_opponent_action set_current_opponent
opponent_simulation.opponent_agents SAC TD3 DECOYPOLICY OpponentConfig create_opponent sample_opponent self_play
weighted_mixture basic_weak basic_strong train_run.py train_single_run.py create_agent agent_factory Agent
"""


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Return (title, text) of the fenced blocks of one language."""
    return [(title, text) for found, title, text in FENCE.findall(page.read_text()) if found == language]


def commands(page: Path) -> list[str]:
    texts = [text.replace("\\\n", " ") for _, text in blocks(page, "bash")]  # a backslash joins lines, as in a shell
    lines = [line.split("  #")[0].strip() for text in texts for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def run(command: str) -> int:
    program, *words = shlex.split(command)
    assert program == "rl-lab"
    return main(words)


@pytest.fixture
def guide(tmp_path, monkeypatch):
    """A folder with the files of the guide, as a user would have it."""
    for language in ("python", "yaml"):
        for title, text in blocks(GUIDE, language):
            if title:
                path = tmp_path / title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_the_guide_has_all_its_files(guide):
    found = {str(path.relative_to(guide)) for path in guide.rglob("*") if path.is_file()}
    assert {"reinforce.py", "my_parts.py", "configs/workflow/reinforce.yaml"} <= found
    assert {"configs/experiment/reinforce_cartpole.yaml", "configs/components/q_network/normed.yaml"} <= found
    assert len((guide / "reinforce.py").read_text().splitlines()) <= 60


def test_the_commands_of_the_guide_run_and_its_algorithm_learns(guide, capsys):
    for command in commands(GUIDE):
        before = set(guide.glob("experiments/*/*"))
        assert run(command) == 0, (command, capsys.readouterr())
        for folder in set(guide.glob("experiments/*/*")) - before:
            summary = json.loads((folder / "summary.json").read_text())
            target = 0.9 if "probe/" in command else 150.0
            assert summary["finished"]
            assert summary["best_evaluation"]["return_mean"] >= target, command
    assert len(list(guide.glob("experiments/*/*"))) == 2


@pytest.mark.parametrize("block", [text for _, text in blocks(GUIDE, "console")], ids=lambda text: text.split("\n")[0])
def test_the_messages_of_the_guide_are_the_real_ones(block, guide, capsys):
    command, _, expected = block.partition("\n")
    assert run(command.removeprefix("$ ")) == 2
    said = capsys.readouterr()
    assert lasting(said.err) == lasting(expected)
    assert valid_names(expected) <= valid_names(said.err)
    assert not (guide / "experiments").exists()


def lasting(message: str) -> list[str]:
    """Return a message without what changes when the package grows: numbers of lines, lists of valid names."""
    lines = re.sub(r"line \d+", "line N", message).strip().splitlines()
    return [line for line in lines if not line.startswith("  valid:")]


def valid_names(message: str) -> set[str]:
    found = re.search(r"^  valid: +(.*)$", message, re.MULTILINE)
    return set(found.group(1).split(", ")) if found else set()


def parse(words: list[str]) -> None:
    """Give a command line to the parser of its command."""
    name, *rest = words
    if name in ("--help", "--version"):
        return
    assert name in COMMANDS, f"rl-lab has no command '{name}'"
    command = importlib.import_module(f"rl_lab.cli.{name.replace('-', '_')}")
    parser = Parser(prog=name, allow_abbrev=False)
    command.add_arguments(parser)
    if rest != ["--help"]:
        parser.parse(rest)


def as_rl_lab(command: str) -> list[str] | None:
    """Return the words after `rl-lab`, whichever way it is called; None for other programs."""
    words = shlex.split(command.split(" > ")[0])
    for prefix in (["rl-lab"], ["python", "-m", "rl_lab"]):
        if words[: len(prefix)] == prefix:
            return words[len(prefix) :]
    if words[0] == "python" and words[1].endswith("scripts/train.py"):
        return ["train", *words[2:]]
    return None


@pytest.mark.parametrize("page", [page for page in PAGES if page != GUIDE], ids=named)
def test_commands_in_blocks_work(page, monkeypatch, capsys):
    folder = ROOT
    for command in commands(page):
        if command.startswith("cd "):
            folder = (folder / command.removeprefix("cd ")).resolve()
            assert folder.is_dir(), command
            continue
        words = as_rl_lab(command)
        if words is None:
            check_other(command, folder)
            continue
        parse(words)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", list(sys.path))
        if words[0] == "train" and not any("RUN" in word for word in words):
            code, said = main(words if "--cfg" in words else cheap(words)), capsys.readouterr()
            missing_extra = code == 2 and 'pip install "rl-lab[' in said.err  # the page says that it is needed
            assert code == 0 or missing_extra, (command, said)
        elif words[0] in ("list", "--help", "--version", "check-env"):
            assert main(words) == 0, (command, capsys.readouterr())


def cheap(words: list[str]) -> list[str]:
    """Return a training command that builds everything and takes no step."""
    few = [] if any("total_timesteps" in word for word in words) else ["training.total_timesteps=2000"]
    return [*dict.fromkeys([*words, "--dry-run"]), *few]


def check_other(command: str, folder: Path) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        assert words, command
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words) <= set(targets), command
    elif program == "python":
        script = folder / words[0]
        assert script.is_file(), command
        for flag in (word for word in words[1:] if word.startswith("--")):
            assert f'"{flag}"' in script.read_text(), command
    else:
        assert program in ("pytest", "tensorboard", "pip", "python3", "git"), f"no check for: {command}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_in_sentences_work(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = FENCE.sub("", page.read_text())
    for command in dict.fromkeys(re.findall(r"`(rl-lab [^`]+)`", text)):
        words = shlex.split(command)[1:]
        has_placeholder = re.search(r"\b[A-Z]{2,}\b|\.\.\.", command)
        if words[0] == "COMMAND":
            continue
        if len(words) == 1:  # the mention of a command
            assert words[0] in (*COMMANDS, "--help", "--version")
            continue
        parse(words)
        if words[0] == "train" and not has_placeholder:
            assert main(cheap(words)) == 0, (command, capsys.readouterr())


@pytest.mark.parametrize("text", [text for _, text in blocks(ROOT / "README.md", "python")])
def test_the_code_of_the_readme_runs(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_an_exported_agent_plays_as_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = ["training.total_timesteps=110", "evaluation.episodes=1", "buffer.batch_size=8"]
    assert main(["train", "sac_pendulum", "environment.id=Pendulum-v1", *few, "--run-dir", "run", "--quiet"]) == 0
    assert main(["export", "run", "my_agent"]) == 0
    capsys.readouterr()
    (_, text) = next(block for block in blocks(ROOT / "docs" / "looking_into_a_run.md", "python"))
    exec(compile(text, "play.py", "exec"), {})
    assert re.fullmatch(r"episode 0: -[\d.]+\nepisode 1: -[\d.]+\n", capsys.readouterr().out)


def test_the_phases_of_dreamer_run(tmp_path, monkeypatch, capsys):
    (title, text) = next(iter(blocks(ROOT / "docs" / "algorithms" / "dreamer.md", "yaml")))
    (tmp_path / title).parent.mkdir(parents=True)
    (tmp_path / title).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "dreamer_in_phases", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert [line.split(":")[0].strip() for line in said.out.splitlines()[1:5]] == [
        *("random_data", "model", "controller", "joint"),
    ]
    assert said.out.splitlines()[-1].startswith("in all 20,032 agent steps, 2,400 updates")
    assert said.err == ""
    durations = [f"training.phases[{i}].duration_{what}" for i, what in enumerate(("steps", "updates", "updates"))]
    few = ["training.total_timesteps=192", *(f"{key}={n}" for key, n in zip(durations, (128, 2, 2), strict=True))]
    sizes = ["buffer.min_size=64", "buffer.window=5", "buffer.batch_size=4", "evaluation.episodes=1"]
    assert main(["train", "dreamer_in_phases", *few, *sizes, "--run-dir", "run", "--quiet"]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates"] == 2 + 2 + 6


def slug(heading: str) -> str:
    words = re.sub(r"[^\w\- ]", "", re.sub(r"`", "", heading).strip().lower())
    return words.replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{named(page)} links to {target}"
        if anchor:
            headings = [slug(line.lstrip("#")) for line in linked.read_text().splitlines() if line.startswith("#")]
            assert anchor in headings, f"{named(page)} links to {target}"


def test_the_overview_leads_to_every_algorithm():
    folder = ROOT / "docs" / "algorithms"
    overview = (folder / "README.md").read_text()
    own = {path.stem for path in (ROOT / "src" / "rl_lab" / "workflows").glob("[a-z]*.py")}
    assert not {name for name in own if f"({name}.md)" not in overview}


def files_named(page: Path) -> set[str]:
    return set(
        re.findall(
            r"`((?:src/rl_lab|docs|examples|scripts|tests|benchmarks)/[\w./]*)`", FENCE.sub("", page.read_text())
        )
    )


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_pages_name_exist(page):
    missing = [path for path in sorted(files_named(page)) if not (ROOT / path).exists()]
    assert not missing, f"{named(page)} names what is not there"


def modules_of_the_package() -> set[str]:
    """Return what is committed, so that work in progress need not be documented yet; without git, what is there."""
    said = subprocess.run(["git", "ls-files", "src/rl_lab"], cwd=ROOT, capture_output=True, text=True)
    found = said.stdout.split() or [str(path.relative_to(ROOT)) for path in (ROOT / "src" / "rl_lab").rglob("*.py")]
    return {path for path in found if path.endswith(".py") and not path.endswith("/__init__.py")}


def test_the_architecture_lists_every_module():
    listed = {path for path in files_named(ARCHITECTURE) if path.startswith("src/") and path.endswith(".py")}
    assert not modules_of_the_package() - listed, "add them to the file reference"


def test_the_architecture_says_where_every_name_of_the_documents_went():
    section = ARCHITECTURE.read_text().partition("## If you know it as")[2]
    spans = " ".join(re.findall(r"`([^`]+)`", section))
    missing = [
        name for name in NAMES.split() if name not in spans and not re.search(rf"\b{re.escape(name)}\b", section)
    ]
    assert not missing


@pytest.mark.parametrize("path", [*PAGES, *(ROOT / "examples").rglob("*.py"), *(ROOT / "examples").rglob("*.yaml")])
def test_no_place_of_a_machine_and_no_open_end(path):
    text = path.read_text()
    assert not re.search(r"(?<![\w.])/(?:work|tmp|home|root|Users|mnt)/", text)
    assert not re.search(r"\b(?:TODO|FIXME|TBD|XXX)\b", text)
