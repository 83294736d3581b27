"""The recipe: layers, presets, and what is refused."""

import pytest
import yaml

from grpo_replay import api
from grpo_replay.errors import RecipeError
from grpo_replay.evaluation.session import find_model, resolve_evaluation
from grpo_replay.recipe import (
    BUILTIN_VERIFIERS,
    REPLAY_PRESETS,
    load_recipe,
    parse_overrides,
    recipe_to_yaml,
    resolve_recipe,
    shipped_recipes_folder,
)
from grpo_replay.tiny import BASE_DIR

SHIPPED = sorted(path.stem for path in shipped_recipes_folder().glob("*.yaml"))


def test_later_layers_win():
    recipe = resolve_recipe([{"run": {"steps": 50, "seed": 1}}, {"run": {"steps": 70}}])
    assert (recipe.run.steps, recipe.run.seed) == (70, 1)


def test_a_preset_overrides_what_earlier_layers_said():
    recipe = resolve_recipe(
        [{"replay": {"unit": "rollout", "ratio": 0.25}}, {"replay": {"preset": "uniform"}}]
    )
    assert (recipe.replay.unit, recipe.replay.composition) == ("query", "pool")
    assert recipe.replay.ratio == 0.25  # a number is not the preset's business


def test_the_same_layer_may_override_its_preset():
    recipe = resolve_recipe([{"replay": {"preset": "uniform", "composition": "fresh_anchored"}}])
    assert (recipe.replay.unit, recipe.replay.composition) == ("query", "fresh_anchored")


def test_a_preset_decides_replacement_and_filter_against_earlier_layers_only():
    paper_b = {"with_replacement": True, "drop_zero_variance": False}
    assert replay_of({"preset": "fifo"}) == paper_b
    assert replay_of({"with_replacement": False}, {"preset": "fifo"}) == paper_b
    later = replay_of({"preset": "fifo"}, {"with_replacement": False})
    assert later == {"with_replacement": False, "drop_zero_variance": False}
    same = replay_of({"preset": "fifo", "drop_zero_variance": True})
    assert same == {"with_replacement": True, "drop_zero_variance": True}
    for preset in ("ours", "uniform", "group_std"):
        back = replay_of({"preset": "fifo"}, {"preset": preset})
        assert back == {"with_replacement": False, "drop_zero_variance": True}
    # The baseline without replay keeps or drops groups as the recipe it is set in.
    assert replay_of({"preset": "fifo"}, {"preset": "grpo"})["drop_zero_variance"] is False
    assert replay_of({"preset": "ours"}, {"preset": "grpo"})["drop_zero_variance"] is True


def test_a_preset_takes_back_what_another_one_had_set():
    def limits(*sections):
        replay = resolve_recipe([{"replay": section} for section in sections]).replay
        return replay.max_age_steps, replay.warmup_steps

    fifo = {"preset": "fifo"}
    assert limits(fifo) == (None, 0)
    assert limits(fifo, {"preset": "ours"}) == limits({}) == (10, 20)
    # What someone wrote stays, in whichever layer.
    assert limits({**fifo, "max_age_steps": 7}, {"preset": "uniform"}) == (7, 20)
    assert limits(fifo, {"max_age_steps": 7}, {"preset": "ours"}) == (7, 20)
    assert limits(fifo, {"preset": "ours", "warmup_steps": 3}) == (10, 3)
    # The baseline keeps the recipe that it is set in.
    assert limits(fifo, {"preset": "grpo"}) == (None, 0)
    assert limits(fifo, {"preset": "grpo"}, {"preset": "ours"}) == (10, 20)


def replay_of(*sections):
    replay = resolve_recipe([{"replay": section} for section in sections]).replay
    return {name: getattr(replay, name) for name in ("with_replacement", "drop_zero_variance")}


def test_the_default_recipe_replays():
    recipe = resolve_recipe([{}])
    assert recipe.replays
    assert recipe.replay.preset == "ours"
    assert recipe.replay.warmup_steps < recipe.run.steps


@pytest.mark.parametrize("preset", REPLAY_PRESETS)
def test_a_resolved_recipe_read_again_is_the_same(preset):
    recipe = resolve_recipe([{"replay": {"preset": preset, "ratio": 0.25}}])
    assert resolve_recipe([yaml.safe_load(recipe_to_yaml(recipe))]) == recipe


def test_every_shipped_recipe_loads_and_names_itself():
    assert {"tiny", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"} <= set(SHIPPED)
    for name in SHIPPED:
        assert load_recipe(name).name == name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("0.5", 0.5),
        ("3", 3),
        ("null", None),
        ("true", True),
        ("ours", "ours"),
        ("[a, b]", ["a", "b"]),
        ("'x y'", "x y"),
    ],
)
def test_override_values_are_yaml_with_exponents(text, value):
    assert parse_overrides([f"a.b={text}"]) == {"a": {"b": value}}


ASYNCHRONOUS = [
    "run.mode=async", "loss.behavior_logprobs=sampler", "sampling.backend=vllm_server",
    "sampling.servers.launch=1",
]  # fmt: skip

REFUSED = {
    "unknown key": (["replay.rato=1"], "replay.rato.*did you mean 'ratio'"),
    "unknown section": (["repla.ratio=1"], "unknown key 'repla'.*did you mean 'replay'"),
    "no equals sign": (["replay.ratio"], "expected key=value"),
    "a section set to a value": (["replay=3"], "replay is a section"),
    "below the range": (["replay.ratio=-1"], "replay.ratio: .*greater than or equal to 0.*-1"),
    "above the range": (["checkpoint.keep=1"], "checkpoint.keep: .*greater than or equal to 2"),
    "wrong type": (["run.steps=many"], "run.steps: .*integer.*'many'"),
    "not one of the words": (["replay.unit=row"], "replay.unit: .*'rollout' or 'query'.*'row'"),
    "capacity below one step": (["replay.capacity_rollouts=100"], "capacity_rollouts 100.*128"),
    "warm-up as long as the run": (["run.steps=20"], "warmup_steps 20.*run.steps 20"),
    "|A| of a query": (["replay.unit=query"], "abs_advantage.*query"),
    "fifo that trains on nothing": (["replay.preset=fifo", "replay.ratio=0"], "train on nothing"),
    "fifo with a warm-up": (
        ["replay.preset=fifo", "replay.warmup_steps=5"],
        "draws from the first step",
    ),
    "positive bias of queries": (
        ["replay.preset=uniform", "replay.positive_fraction=0.2"],
        "positive_fraction.*query",
    ),
    "used before the unused": (
        ["replay.preset=fifo", "replay.unused_first=true"],
        "unused_first.*with_replacement false",
    ),
    "rewards upside down": (["reward.correct=-2"], "reward.correct -2.*greater"),
    "a budget below one rollout": (
        ["batch.max_tokens_per_microbatch=10"],
        "max_tokens_per_microbatch 10.*36",
    ),
    "no problem in the template": (["prompts.user_template=x"], "must contain {problem}"),
    "a problem in double braces": (
        ["prompts.user_template=Solve {{problem}}"],
        "user_template: .*must contain {problem}.*found 'Solve",
    ),
    "another placeholder": (["prompts.user_template={problem} {x}"], "only placeholder"),
    "a placeholder without a name": (["prompts.user_template={problem} {}"], "only placeholder"),
    "an attribute of the problem": (["prompts.user_template={problem.x}"], "only placeholder"),
    "an open brace": (["prompts.user_template={problem} {"], "only placeholder"),
    "LaTeX braces": (["prompts.user_template={problem} \\boxed{}"], "only placeholder"),
    "an infinite ratio": (["replay.ratio=.inf"], "replay.ratio: .*finite"),
    "an infinite learning rate": (["optimizer.learning_rate=1e999"], "learning_rate: .*finite"),
    "a reward that is no number": (["reward.correct=.nan"], "reward.correct: .*finite"),
    "chunks of nothing": (
        ["engine.logprob_chunk_tokens=0"],
        "engine.logprob_chunk_tokens.*greater than or equal to 1.*found 0",
    ),
    "offload without its stage": (
        ["engine.offload=everything", "engine.zero_stage=2"],
        "zero_stage 3, not 2",
    ),
    "no server": (["sampling.backend=vllm_server"], "servers.urls or"),
    "a server without a scheme": (
        ["sampling.backend=vllm_server", "sampling.servers.urls=[http://a:1, localhost:8000]"],
        "servers.urls: 'localhost:8000' is not a URL such as http://",
    ),
    "a server with a word for a port": (
        ["sampling.backend=vllm_server", "sampling.servers.urls=[http://a:port]"],
        "servers.urls: 'http://a:port' is not a URL",
    ),
    "a temperature that is too low": (
        ["sampling.temperature=0.005"],
        "sampling.temperature: Input should be greater than or equal to 0.01, found 0.005",
    ),
    "an evaluation of a temperature that is too low": (
        ["eval.temperature=0.001"],
        "eval.temperature: 0 for greedy decoding, or 0.01 and more, found 0.001",
    ),
    "a sequence ratio over tokens": (
        ["loss.kind=gspo"],
        "loss.kind 'gspo'.*set loss.aggregation sequence_mean",
    ),
    "sampler weights of asymre": (
        ["loss.kind=asymre", "loss.sampler_ratio_cap=2"],
        "no importance weights",
    ),
    "the sampler's ratio twice": (
        ["loss.behavior_logprobs=sampler", "loss.sampler_ratio_cap=2"],
        "would count twice",
    ),
    "a cap per token of a ratio per rollout": (
        ["loss.kind=gspo", "loss.aggregation=sequence_mean", "loss.sampler_ratio_cap=2"],
        "cap is of a ratio per token",
    ),
    "a warm-up of the learning rate as long as the run": (
        ["run.steps=30", "optimizer.warmup_steps=30"],
        "warmup_steps 30 is not less.*steps 30",
    ),
    "refills without dropped groups": (
        ["replay.preset=fifo", "replay.warmup_steps=0", "sampling.max_refills=2"],
        "no group is dropped",
    ),
    "asynchronous, log-probs recomputed": (["run.mode=async"], "would switch the clip off"),
    "asynchronous, no server": (ASYNCHRONOUS[:2], "set sampling.backend vllm_server"),
    "asynchronous over NCCL": (
        [*ASYNCHRONOUS, "sampling.servers.weight_transfer=nccl"],
        "set it to folder",
    ),
    "asynchronous pool": ([*ASYNCHRONOUS, "replay.preset=uniform"], "'pool' is not available"),
    "newest first with a buffer": (
        [*ASYNCHRONOUS, "sampling.collection.order=newest_first"],
        "set replay.preset grpo",
    ),
    "asynchronous masks": ([*ASYNCHRONOUS, "reward.mask_truncated=true"], "is not available"),
    "asynchronous refills": ([*ASYNCHRONOUS, "sampling.max_refills=2"], "nothing to refill"),
    "asynchronous weights that are always too old": (
        [*ASYNCHRONOUS, "run.sync_every_steps=4", "replay.max_age_steps=2"],
        "up to 3 steps ago.*set replay.max_age_steps to 3 or more",
    ),
    "a replayed run that evaluates": (
        [*ASYNCHRONOUS, "sampling.collection.replay_journal=runs/x"],
        "has no sampler",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_values_are_refused_with_place_value_and_remedy(case):
    overrides, message = REFUSED[case]
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        load_recipe("tiny", overrides)


@pytest.mark.parametrize("overrides", [
    ["eval.temperature=0"], ["eval.temperature=0.01", "sampling.temperature=0.01"]
])  # fmt: skip
def test_a_temperature_that_every_sampler_can_have_is_allowed(overrides):
    load_recipe("tiny", overrides)


@pytest.mark.parametrize("word", ["12e4567", "1234567", "1e3", "0123", "on", "2026-11-20"])
def test_text_settings_are_not_parsed_as_yaml(word):
    recipe = load_recipe("tiny", [f"model.revision={word}", f"prompts.id_field={word}"])
    assert recipe.model.revision == recipe.prompts.id_field == word
    assert load_recipe("tiny", ["model.revision=null"]).model.revision is None
    assert load_recipe("tiny", ["prompts.answer_field='on'"]).prompts.answer_field == "on"


LITERAL = [
    "####", "### Answer:", "---", "|", "exp #3", "#1", "!important do", "&a", "*", "- a", "a: b",
    "{answer}", "[x]", "'a' or 'b'", '"open', "'a' # b", "%", "@", "`", "> x", "!!str", "true",
]  # fmt: skip


@pytest.mark.parametrize("word", LITERAL)
def test_all_of_the_word_after_set_is_the_text(word):
    recipe = load_recipe("tiny", [f"prompts.system_prompt={word}", f"prompts.id_field= {word} "])
    assert recipe.prompts.system_prompt == recipe.prompts.id_field == word


@pytest.mark.parametrize(
    "word, text",
    [
        ("", None),
        ("null", None),
        ("~", None),
        ("'null'", "null"),
        ('"a\\n#"', "a\n#"),
        ("' #'", " #"),
    ],
)
def test_quotes_and_null_mean_in_text_after_set_what_they_mean_in_yaml(word, text):
    assert load_recipe("tiny", [f"prompts.id_field={word}"]).prompts.id_field == text


@pytest.mark.parametrize(
    "line, problem",
    [
        (
            "answer_field: ####",
            "prompts.answer_field: .*valid string: put it in quotes, found None",
        ),
        ("answer_field: on", "prompts.answer_field: .*valid string: put it in quotes, found True"),
        ("id_field: 1e3", "prompts.id_field: .*valid string: put it in quotes, found 1000.0"),
        ("system_prompt: [a]", r"system_prompt: Input should be a valid string, found \['a'\]"),
        ("system_prompt: !important do", "mine.yaml:2: not valid YAML: .* the tag '!important'"),
    ],
)
def test_text_that_yaml_reads_as_something_else_is_refused_in_a_file(tmp_path, line, problem):
    path = tmp_path / "mine.yaml"
    path.write_text(f"prompts:\n  {line}\n")
    with pytest.raises(RecipeError, match=problem):
        load_recipe(str(path))


@pytest.mark.parametrize("word", ["12e4567", "1e3", "0123", "on", "2026-11-20", "####"])
def test_the_recipe_of_a_run_has_the_text_after_set(tmp_path, word):
    recipe = load_recipe("tiny", [f"model.revision={word}", f"sampling.stop_tokens=['{word}']"])
    path = tmp_path / "tiny.yaml"
    path.write_text(recipe_to_yaml(recipe))
    assert load_recipe(str(path)) == recipe


def test_comments_beside_text_stay_comments_in_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "prompts:\n  answer_field: '####'  # of GSM8K\n  system_prompt: null  # none\n"
        "  user_template:  # on the next line\n    Solve {problem}\n  id_field:\n"
        "  # no stop tokens\nsampling: {stop_tokens: null}  # all\n"
    )
    prompts = load_recipe(str(path)).prompts
    assert (prompts.answer_field, prompts.system_prompt) == ("####", None)
    assert (prompts.user_template, prompts.id_field) == ("Solve {problem}", None)


def test_a_sampler_of_ones_own_is_not_taken_for_vllm():
    sampling = {"backend": "mine.py:Sampler"}
    recipe = resolve_recipe([{"sampling": sampling | {"vllm": {"tensor_parallel_size": 4}}}])
    assert not (recipe.sampling.vllm_in_ranks or recipe.sampling.over_http)


SAME = {
    "optimizer.learning_rate": ("1e-4", 1e-4),
    "loss.beta": ("1.5e-7", 1.5e-7),
    "run.steps": ("1e3", 1000),
    "run.seed": ("1_000", 1000),
    "prompts.id_field": ("null", None),
    "eval.greedy": ("off", False),
    "sampling.stop_tokens": ("[<|endoftext|>, '1e3']", ["<|endoftext|>", "1e3"]),
}


@pytest.mark.parametrize("key", SAME)
def test_a_value_means_the_same_in_a_file_and_after_set(key, tmp_path):
    text, expected = SAME[key]
    section, name = key.split(".")
    path = tmp_path / "mine.yaml"
    path.write_text(f"{section}:\n  {name}: {text}\n")
    for recipe in (load_recipe(str(path)), load_recipe("tiny", [f"{key}={text}"])):
        found = getattr(getattr(recipe, section), name)
        assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("key", ["run.steps", "loss.beta", "replay.max_age_steps",
                                 "engine.zero_stage", "engine.logprob_chunk_tokens"])  # fmt: skip
@pytest.mark.parametrize("word", ["yes", "on", "true", "no"])
def test_true_and_false_are_not_numbers(key, word):
    with pytest.raises(RecipeError, match=f"{key}: expected a number, found (true|false)"):
        load_recipe("tiny", [f"{key}={word}"])


def test_an_error_names_the_layer_that_it_comes_from(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("run: {steps: 0}\nreplay: {ratio: 0.25}\n")
    with pytest.raises(RecipeError, match=r"^\S*mine\.yaml: run\.steps: "):
        load_recipe(str(path), ["replay.ratio=0.5"])
    path.write_text("run: {steps: 50}\n")
    with pytest.raises(RecipeError, match=r"^--set: run\.steps: .*found 0$"):
        load_recipe(str(path), ["run.steps=0"])
    with pytest.raises(RecipeError, match=r"^\S*mine\.yaml with --set: contradiction: "):
        load_recipe(str(path), ["replay.capacity_rollouts=1"])
    path.write_text("replay: {capacity_rollouts: 1}\n")
    with pytest.raises(RecipeError, match=r"^\S*mine\.yaml: contradiction: "):
        load_recipe(str(path))


@pytest.mark.parametrize("name", ["../../evil", "a/b", "..", "", "a\\\\b", "x" * 101])
def test_a_name_cannot_leave_the_folder_of_runs(name):
    with pytest.raises(RecipeError, match=r"name: .*part of a run directory's name"):
        resolve_recipe([{"name": name}])
    assert resolve_recipe([{"name": "exp[bold] 1"}]).name == "exp[bold] 1"


def test_a_disabled_buffer_is_not_checked_for_contradictions():
    recipe = load_recipe("tiny", ["replay.preset=grpo", "run.steps=5", "replay.warmup_steps=20"])
    assert not recipe.replays


def test_an_unknown_recipe_lists_the_shipped_ones():
    with pytest.raises(RecipeError, match=r"did you mean 'tiny'.*shipped: .*qwen3-4b"):
        load_recipe("tinny")


def test_broken_yaml_names_file_and_line(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("run:\n  steps: 5\n bad: [\n")
    with pytest.raises(RecipeError, match=r"broken.yaml:\d+: not valid YAML"):
        load_recipe(str(path))


def test_a_recipe_that_is_a_list_is_refused(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(RecipeError, match="mapping of sections, found a list"):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ([], 0.01),
        (["model.dtype=bfloat16"], 0.1),
        (["sampling.vllm.dtype=bfloat16"], 0.1),
        (["sampling.logprob_gap_limit=0.5"], 0.5),
    ],
)
def test_the_gap_limit_follows_the_precision(overrides, limit):
    assert load_recipe("tiny", overrides).logprob_gap_limit == limit


@pytest.mark.parametrize(
    "ranks, overrides, stage",
    [
        (1, [], 0),
        (2, [], 3),
        (1, ["model.dtype=bfloat16"], 2),
        (1, ["engine.offload=optimizer"], 2),
        (1, ["engine.offload=everything"], 3),
        (1, ["engine.zero_stage=3"], 3),
        (8, ["engine.zero_stage=1"], 1),
    ],
)
def test_the_automatic_zero_stage_shards_only_over_several_ranks(ranks, overrides, stage):
    assert load_recipe("tiny", overrides).zero_stage(ranks) == stage


@pytest.mark.parametrize("attention, packs", [
    ("sdpa", False), ("eager", False), ("flash_attention_2", True), ("flash_attention_3", True),
    ("flex_attention", True),
])  # fmt: skip
def test_rows_are_packed_by_default_where_attention_takes_packs(attention, packs):
    overrides = [f"model.attn_implementation={attention}"]
    recipe = load_recipe("tiny", overrides)
    assert (recipe.packs(on_cuda=True), recipe.packs(on_cuda=False)) == (packs, False)
    for word in (True, False):
        chosen = load_recipe("tiny", [*overrides, f"batch.packing={word}"])
        assert (chosen.packs(on_cuda=True), chosen.packs(on_cuda=False)) == (word, word)


@pytest.mark.parametrize(
    "vocabulary, overrides, tokens",
    [
        (24, [], 1024),
        (40_960, [], 1024),  # 4 · 40,960 · 1,024 bytes are 160 MiB
        (40_961, [], 960),
        (151_936, [], 256),  # 148 MiB
        (262_144, [], 128),
        (10**7, [], 64),
        (24, ["engine.logprob_chunk_tokens=300"], 300),
        (151_936, ["engine.logprob_chunk_tokens=1024"], 1024),
    ],
)
def test_the_default_chunk_of_the_head_keeps_its_logits_within_160_mib(
    vocabulary, overrides, tokens
):
    assert load_recipe("tiny", overrides).logprob_chunk_tokens(vocabulary) == tokens


def test_relative_paths_of_a_file_start_at_its_folder_and_of_set_at_the_working_directory(
    tmp_path, monkeypatch
):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "own.yaml").write_text(
        "model: {path: ./model, tokenizer: owner/name}\n"
        "prompts: {source: data/train.jsonl}\n"
        "reward: {function: ['rewards/math.py:score', {function: 'up.py:f'}]}\n"
        "eval: {benchmarks: [math500, ../test.parquet], data_folder: data, reward: 'e.py:f'}\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("configs/own.yaml")
    assert recipe.prompts.source == f"{folder}/data/train.jsonl"
    assert recipe.reward.main_function == f"{folder}/rewards/math.py:score"
    assert recipe.reward.functions[1].function == f"{folder}/up.py:f"
    assert recipe.eval.benchmarks == ["math500", f"{tmp_path}/test.parquet"]
    assert (recipe.eval.data_folder, recipe.eval.reward) == (f"{folder}/data", f"{folder}/e.py:f")
    assert (recipe.model.path, recipe.model.tokenizer) == (f"{folder}/model", "owner/name")
    given = load_recipe("configs/own.yaml", ["prompts.source=data/mine.jsonl"])
    assert given.prompts.source == f"{tmp_path}/data/mine.jsonl"
    words = ["reward.function=up.py:f"]
    assert api.load_recipe(recipe, words).reward.main_function == f"{tmp_path}/up.py:f"
    measured = resolve_evaluation(find_model(str(BASE_DIR)), recipe, ["eval.reward=up.py:f"])
    assert measured.eval.reward == f"{tmp_path}/up.py:f"
    saved = folder.parent / "recipe.yaml"
    saved.write_text(recipe_to_yaml(recipe))
    assert load_recipe(str(saved)).model_dump() == recipe.model_dump()


def test_a_folder_of_data_beside_a_recipe_is_made_absolute(tmp_path, monkeypatch):
    """A hub id with the name of such a folder means the folder, and names of benchmarks stay."""
    for name in ("data/test", "tiny"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "own.yaml").write_text(
        "prompts: {source: [data, {source: data/test}, openai/gsm8k]}\n"
        "eval: {benchmarks: [tiny, data/test, ./data]}\n"
    )
    recipe = load_recipe(str(tmp_path / "own.yaml"))
    assert recipe.prompts.source_names == (
        *(f"{tmp_path}/data", f"{tmp_path}/data/test"),
        "openai/gsm8k",
    )
    assert recipe.eval.benchmarks == ["tiny", f"{tmp_path}/data/test", f"{tmp_path}/data"]
    monkeypatch.chdir(tmp_path)
    assert load_recipe("own.yaml", ["prompts.source=data"]).prompts.source == f"{tmp_path}/data"


@pytest.mark.parametrize("source", ["owner/name", "builtin:tiny", "/data/x.jsonl", "~/x.jsonl"])
def test_hub_ids_and_absolute_paths_are_left_as_they_are(tmp_path, source):
    (tmp_path / "own.yaml").write_text(f"prompts: {{source: '{source}'}}\nname: own\n")
    assert load_recipe(str(tmp_path / "own.yaml")).prompts.source == source


@pytest.mark.parametrize("reward", ["mathverify", "a:", ":f", "my-file:f", "a.py:"])
def test_a_verifier_of_evaluations_has_the_form_of_one(reward):
    with pytest.raises(
        RecipeError, match=r"eval\.reward: .*use math_verify_boxed, .*file\.py:func"
    ):
        load_recipe("tiny", [f"eval.reward={reward}"])


def test_functions_of_the_user_read_rows_and_the_shipped_ones_do_not():
    shipped = [{"function": name} for name in BUILTIN_VERIFIERS]
    for function, reads in ((shipped, False), ([*shipped, {"function": "own.py:score"}], True)):
        assert resolve_recipe([{"reward": {"function": function}}]).reward.reads_rows == reads


def test_a_file_of_data_is_no_recipe_and_lr_is_the_learning_rate(tmp_path):
    path = tmp_path / "additions.csv"
    path.write_text("problem,answer\n1+1,2\n")
    with pytest.raises(RecipeError, match=r"this is data: .*prompts\.source: additions\.csv"):
        load_recipe(str(path))
    with pytest.raises(RecipeError, match=r"optimizer\.lr is optimizer\.learning_rate here"):
        load_recipe("tiny", ["optimizer.lr=1e-5"])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["optimizer.adamw.betas=[0.9]"], "betas: List should have at least 2 items"),
        (["optimizer.adamw.betas=[0.9,high]"], "betas.1: Input should be a valid number"),
        (
            ["model.lora.r=4", "model.lora.target_modules=q_proj"],
            "model.lora.target_modules: Input should be a valid list.*, found 'q_proj'",
        ),
        (["model.lora={r: 4, target_modules: 3}"], "target_modules: Input should be a valid list"),
        (["model.lora.r=true"], "model.lora.r: expected a number, found true"),
        (["sampling.vllm.gpu_memory_utilization=1.5"], "should be less than or equal to 1, found"),
    ],
)
def test_what_cannot_be_is_refused_when_the_recipe_is_read(overrides, told):
    with pytest.raises(RecipeError, match=told):
        load_recipe("tiny", overrides)


@pytest.mark.parametrize(
    "word", ["optimizer.adamw.lr=1", "optimizer.adamw.params=[]", "engine.zero.stage=3"]
)
def test_a_setting_of_a_library_that_another_key_decides_is_refused(word):
    with pytest.raises(RecipeError, match=f"{word.split('.')[2].split('=')[0]} is set by other"):
        load_recipe("tiny", [word])


def test_reward_functions_that_all_weigh_nothing_are_refused():
    one, other = ({"function": "minerva", "weight": weight, "name": "n"} for weight in (0, 1))
    nothing = {"reward": {"function": [one, {**one, "name": "m"}]}}
    with pytest.raises(RecipeError, match="every weight is 0"):
        resolve_recipe([nothing])
    resolve_recipe([{"reward": {"function": [one, {**other, "name": "m"}]}}])
