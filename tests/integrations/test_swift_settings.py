"""Settings of replay in ms-swift, the plugin that brings them in, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("swift.rl_core", reason="ms-swift 4.6 is not installed: .ci/check_swift")

from outside_ranks import environment
from swift.rlhf_trainers import GRPOTrainer
from swift_runs import BASE, OURS, TURNS, in_this_process, write_problems

from grpo_replay import ReplayConfig
from grpo_replay.errors import RecipeError, UsageError
from grpo_replay.integrations.swift import ReplayGRPOTrainer, ReplayMixin, settings_from

# Settings


def test_the_plugin_is_in_a_folder_of_its_own_and_hides_nothing(tmp_path):
    said = subprocess.run(
        [sys.executable, "-m", "grpo_replay.integrations.swift_plugin"],
        capture_output=True, text=True, check=True, env=environment(),
    )  # fmt: skip
    plugin = Path(said.stdout.strip())
    asks = f"""
import sys
from swift.utils import import_external_file
import_external_file({str(plugin)!r})
import trl, swift
from swift.trainers import TrainerFactory
import grpo_replay.integrations.swift as ours
from types import SimpleNamespace
kind = TrainerFactory.get_trainer_cls(SimpleNamespace(rlhf_type="grpo"))
assert sys.path[0] == {str(plugin.parent)!r}
print(trl.__file__, swift.__file__, kind is ours.ReplayGRPOTrainer, len(kind.__mro__))
"""
    said = subprocess.run(
        [sys.executable, "-c", asks],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=tmp_path,
    )
    assert said.returncode == 0, said.stderr[-2000:]
    trl_file, swift_file, is_ours, _ = said.stdout.split()[-4:]
    assert is_ours == "True"
    for name, file in (("trl", trl_file), ("swift", swift_file)):
        assert "grpo_replay" not in file and file.endswith(f"site-packages/{name}/__init__.py")
    names = {file.stem for file in plugin.parent.glob("*.py")}
    assert names == {"__init__", "__main__", plugin.stem}


def test_the_plugin_refuses_megatron_and_a_trainer_of_another_plugin(tmp_path):
    for before, named in (
        ("sys.modules['swift.megatron'] = sys", "Megatron"),
        ("TrainerFactory.TRAINER_MAPPING['grpo'] = 'mine.Trainer'", "mine.Trainer.*ReplayMixin"),
    ):
        asks = f"""
import sys
from swift.trainers import TrainerFactory
{before}
import grpo_replay.integrations.swift_plugin.grpo_replay_for_ms_swift
"""
        said = subprocess.run(
            [sys.executable, "-c", asks], capture_output=True, text=True, env=environment()
        )
        assert said.returncode != 0
        with pytest.raises(AssertionError, match=f"UsageError.*{named}"):
            raise AssertionError(said.stderr.splitlines()[-1])


def test_settings_are_a_file_or_the_mapping_itself(tmp_path, monkeypatch):
    wanted = ReplayConfig.of("uniform", ratio=0.25)
    (tmp_path / "replay.yaml").write_text("preset: uniform\nratio: 0.25\n")
    (tmp_path / "replay.json").write_text('{"preset": "uniform", "ratio": 0.25}')
    monkeypatch.chdir(tmp_path)
    for text in ("replay.yaml", str(tmp_path / "replay.json"), "{preset: uniform, ratio: 0.25}",
                 '{"preset": "uniform", "ratio": 0.25}'):  # fmt: skip
        assert settings_from(text) == wanted
    assert settings_from(None) == settings_from("") == settings_from("{}") == ReplayConfig()


def test_the_function_of_a_priority_is_looked_up_beside_the_file_of_the_settings(tmp_path):
    (tmp_path / "mine.py").write_text("def priority(entry):\n    return 1.0\n")
    (tmp_path / "replay.yaml").write_text("priority: mine.py:priority\n")
    assert settings_from(str(tmp_path / "replay.yaml")).priority == f"{tmp_path}/mine.py:priority"


@pytest.mark.parametrize(
    "text, named",
    [
        ("{ratoi: 1}", r"^GRPO_REPLAY: unknown key 'replay.ratoi' \(did you mean 'ratio'\?\)"),
        ("{ratio: -1}", "^GRPO_REPLAY: replay.ratio: .*greater than or equal to 0, found -1"),
        ("{ratio: 1", "^GRPO_REPLAY: neither YAML nor JSON"),
        ("ratio: 1", "^ratio: 1: cannot be read.*No such file"),
        ("replay.yaml", "replay.yaml: cannot be read"),
    ],
)
def test_settings_that_are_wrong_are_named(text, named):
    with pytest.raises(RecipeError, match=named):
        settings_from(text)


def test_a_file_that_is_no_mapping_is_named(tmp_path):
    (tmp_path / "replay.yaml").write_text("- ratio\n")
    with pytest.raises(RecipeError, match=r"replay.yaml: expected keys of replay"):
        settings_from(str(tmp_path / "replay.yaml"))


# Refused


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"num_iterations": 2}, "num_iterations 2 .*raise ratio"),
        ({"scale_rewards": "batch"}, "scale_rewards batch .*set group or none"),
        ({"scale_rewards": "gdpo"}, "scale_rewards gdpo"),
        ({"advantage_estimator": "rloo"}, "advantage_estimator rloo .*set grpo"),
        ({"kl_in_reward": "true", "beta": 0.1}, "kl_in_reward"),
        ({"loss_type": "real"}, "loss_type real"),
        ({"teacher_model": str(BASE), "teacher_model_type": "qwen3"}, "a teacher .*per token"),
        ({"advantage_reweight": "rlsd"}, "a teacher .*advantage_reweight"),
        ({"sdar_loss_coef": 0.1}, "a teacher .*sdar_loss_coef"),
        ({"beta": 0.1, "sync_ref_model": "true"}, "sync_ref_model .*beta 0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(map(str, value)),
)
def test_settings_under_which_replay_would_be_wrong_are_refused(changes, named, tmp_path):
    with pytest.raises(UsageError, match=f"^replay in ms-swift: .*{named}"):
        in_this_process(tmp_path / "run", OURS, **changes)
    assert not (tmp_path / "run" / "rollouts").exists()


@pytest.mark.parametrize(
    "place, name, value, named",
    [
        ("", "use_liger_loss", True, "use_liger_kernel hides the log-probs"),
        ("", "is_multimodal", True, "multimodal.*no images"),
        ("", "chord_sft_iterator", iter(()), "chord_sft_dataset"),
        ("", "dynamic_num_samples", True, "dynamic_num_samples.*whole episode"),
        ("template", "sequence_parallel_size", 2, "sequence_parallel_size.*set 1"),
        ("args", "async_generate", True, "async_generate.*set false"),
    ],
)
def test_what_cannot_run_here_is_refused_by_the_attribute_that_ms_swift_has(
    place, name, value, named, tmp_path
):
    """liger-kernel, image models, vLLM servers, SFT data and several GPUs are not there."""

    class Changed(GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            changed = getattr(self, place) if place else self
            before = {None: None, False: False, 1: 1}[getattr(changed, name)]
            assert before != value
            setattr(changed, name, value)

    class Ours(ReplayMixin, Changed):
        pass

    with pytest.raises(UsageError, match=named):
        in_this_process(tmp_path / "run", OURS, Ours)


def test_several_samples_of_a_request_are_refused_when_they_come(tmp_path):
    class Several(ReplayGRPOTrainer):
        def _score_completions(self, samples):
            self.dynamic_num_samples = True
            return super()._score_completions(samples)

    with pytest.raises(UsageError, match=r"dynamic_num_samples.*whole episode"):
        in_this_process(tmp_path / "run", OURS, Several)


def test_a_teachers_prompt_in_the_data_is_refused(tmp_path):
    data = write_problems(tmp_path / "problems.jsonl")
    rows = [json.loads(line) | {"teacher_prompt": "1+1"} for line in data.read_text().splitlines()]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(UsageError, match="the column teacher_prompt"):
        in_this_process(tmp_path / "run", OURS)


def test_a_first_turn_that_does_not_train_is_refused(tmp_path):
    class Masked(ReplayGRPOTrainer):
        def _generate_completions(self, samples):
            samples = super()._generate_completions(samples)
            for sample in samples:
                first, *later = sample.response_loss_mask
                sample.response_loss_mask = [[0] * len(first), *later]
            return samples

    with pytest.raises(UsageError, match=r"different prompts: .*its first response does not train"):
        in_this_process(tmp_path / "run", OURS, Masked, **TURNS)
