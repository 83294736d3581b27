"""The recipe: layers, presets, and what is refused."""

import pytest
import yaml

from grpo_replay import api
from grpo_replay.errors import RecipeError
from grpo_replay.evaluation.session import find_model, resolve_evaluation
from grpo_replay.recipe import (
    BUILTIN_VERIFIERS,
    REPLAY_PRESETS,
    Recipe,
    load_recipe,
    parse_overrides,
    recipe_to_yaml,
    resolve_recipe,
)
from grpo_replay.recipe.base import Passthrough, Section
from grpo_replay.recipe.recipe import GpuSizes
from grpo_replay.recipe.yaml_text import parse_yaml, to_yaml
from grpo_replay.tiny import BASE_DIR


def test_later_layers_win():
    recipe = resolve_recipe([{"run": {"steps": 50, "seed": 1}}, {"run": {"steps": 70}}])
    assert (recipe.run.steps, recipe.run.seed) == (70, 1)


def test_a_preset_overrides_earlier_layers_and_its_own_layer_overrides_it():
    recipe = resolve_recipe(
        [{"replay": {"unit": "rollout", "ratio": 0.25}}, {"replay": {"preset": "uniform"}}]
    )
    assert (recipe.replay.unit, recipe.replay.composition) == ("query", "pool")
    assert recipe.replay.ratio == 0.25  # a number is not the preset's business
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


def leaves(section: type[Section], path: str = "") -> list[str]:
    """Dotted keys. A passthrough mapping is one key."""
    if issubclass(section, Passthrough):
        return [path]
    found = []
    for name, field in section.model_fields.items():
        kind, place = field.annotation, f"{path}.{name}".lstrip(".")
        inner = isinstance(kind, type) and issubclass(kind, Section)
        found += leaves(kind, place) if inner else [place]
    return found


def test_a_recipe_has_few_keys():
    keys = leaves(Recipe)
    assert len(keys) == len(set(keys)) <= 125


YAML = {
    "1e-4": 1e-4, "1.5": 1.5, ".inf": float("inf"), "3": 3, "010": 10, "0x1F": 31, "0o17": 15,
    "null": None, "": None, "true": True, "[a, b]": ["a", "b"],
    **{word: word for word in ("ours", "on", "yes", "1:30", "2026-11-20", "1_000")},
}  # fmt: skip


@pytest.mark.parametrize("text", YAML)
def test_values_are_those_of_yaml_1_2_and_are_read_again_as_they_were_written(text):
    assert parse_overrides([f"a.b={text}"]) == {"a": {"b": YAML[text]}}
    for value in (text, YAML[text]):
        assert parse_yaml(to_yaml({"a": value})) == yaml.safe_load(to_yaml({"a": value}))
        assert parse_yaml(to_yaml({"a": value})) == {"a": value}


ASYNCHRONOUS = [
    "run.mode=async", "loss.behavior_logprobs=sampler", "sampling.backend=vllm_server",
    "sampling.servers.launch=1",
]  # fmt: skip

REFUSED = {
    "unknown key": (["replay.rato=1"], "replay.rato.*'ratio'"),
    "unknown section": (["repla.ratio=1"], "'repla'.*'replay'"),
    "no equals sign": (["replay.ratio"], "replay.ratio"),
    "a section set to a value": (["replay=3"], "replay: .*3"),
    "below the range": (["replay.ratio=-1"], "replay.ratio: .*0.*-1"),
    "an age limit of 0": (["replay.max_age_steps=0"], "replay.max_age_steps: .*0"),
    "wrong type": (["run.steps=many"], "run.steps: .*'many'"),
    "not one of the words": (["replay.unit=row"], "replay.unit: .*'rollout' or 'query'.*'row'"),
    "an infinite ratio": (["replay.ratio=.inf"], "replay.ratio: "),
    "a list that is too short": (["optimizer.adamw.betas=[0.9]"], "betas: .*2"),
    "a setting that another key decides": (["engine.zero.stage=3"], "stage is set by"),
    "a passed on setting of another type": (["engine.zero.sub_group_size=many"], "sub_group_size"),
    "a third moment of Adam": (["optimizer.adamw.amsgrad=true"], "optimizer.adamw: amsgrad"),
    "a journal without arrivals": (
        ["sampling.collection.replay_journal=run", "eval.benchmarks=[]"],
        "run.mode async",
    ),
    "capacity below one step": (["replay.capacity_rollouts=100"], "capacity_rollouts 100.*128"),
    "warm-up as long as the run": (["run.steps=20"], "warmup_steps 20.*run.steps 20"),
    "|A| of a query": (["replay.unit=query"], "abs_advantage.*query"),
    "fifo that trains on nothing": (["replay.preset=fifo", "replay.ratio=0"], "replay.ratio"),
    "fifo with a warm-up": (["replay.preset=fifo", "replay.warmup_steps=5"], "warmup_steps"),
    "positive bias of queries": (
        ["replay.preset=uniform", "replay.positive_fraction=0.2"],
        "positive_fraction.*query",
    ),
    "used before the unused": (
        ["replay.preset=fifo", "replay.unused_first=true"],
        "unused_first.*with_replacement false",
    ),
    "rewards upside down": (["reward.correct=-2"], "reward.correct -2"),
    "a budget below one rollout": (
        ["batch.max_tokens_per_microbatch=10"],
        "max_tokens_per_microbatch 10.*36",
    ),
    "no problem in the template": (["prompts.user_template=x"], "user_template.*{problem}"),
    "a problem in double braces": (
        ["prompts.user_template=Solve {{problem}}"],
        "user_template.*'Solve",
    ),
    "another placeholder": (["prompts.user_template={problem} {x}"], "user_template"),
    "LaTeX braces": (["prompts.user_template={problem} \\boxed{}"], "user_template"),
    "half an emoji": (
        ['prompts.user_template="\\ud83d {problem}"'],
        "user_template: has half a char",
    ),
    "half an emoji for the chat template": (
        ['prompts.template={persona: ["\\ud83d"]}'],
        "prompts.template: has half a char",
    ),
    "offload without its stage": (
        ["engine.offload=everything", "engine.zero_stage=2"],
        "zero_stage 3, not 2",
    ),
    "no server": (["sampling.backend=vllm_server"], "servers.urls"),
    "a server without a scheme": (
        ["sampling.backend=vllm_server", "sampling.servers.urls=[http://a:1, localhost:8000]"],
        "servers.urls: 'localhost:8000'",
    ),
    "an IPv6 address of servers without brackets": (
        ["sampling.servers.address=::1:8300"],
        r"servers.address: expected an IPv6 address in brackets, such as \[::1\]:8300",
    ),
    "a server's URL with a query": (
        ["sampling.backend=vllm_server", "sampling.servers.urls=['http://a:1/?key=x']"],
        r"servers.urls: 'http://a:1/\?key=x': the address .* ends before",
    ),
    "a temperature that is too low": (["sampling.temperature=0.005"], "temperature: .*0.01.*0.005"),
    "an evaluation of a temperature that is too low": (
        ["eval.temperature=0.001"],
        "eval.temperature: .*0.01.*0.001",
    ),
    "a key of a section without it": (["steps=4"], "'steps' .did you mean 'run.steps'"),
    "a benchmark that is no list": (["eval.benchmarks=tiny"], r"eval\.benchmarks: .*\[NAME\]"),
    "an unknown key in a list": (
        ["reward.function=[{function: math, wieght: 2}]"],
        "^--set: unknown key 'reward.function.0.wieght'$",
    ),
    "a verifier without a function": (["eval.reward=a.py:"], r"eval\.reward: .*a\.py:'"),
    "a sequence ratio over tokens": (["loss.kind=gspo"], "'gspo'.*loss.aggregation sequence_mean"),
    "sampler weights of asymre": (["loss.kind=asymre", "loss.sampler_ratio={high: 2}"], "asymre"),
    "the sampler's ratio twice": (
        ["loss.behavior_logprobs=sampler", "loss.sampler_ratio={high: 2}"],
        "sampler_ratio",
    ),
    "a cap per token of a ratio per rollout": (
        ["loss.kind=gspo", "loss.aggregation=sequence_mean", "loss.sampler_ratio={high: 2}"],
        "sampler_ratio",
    ),
    "a warm-up of the learning rate as long as the run": (
        ["run.steps=30", "optimizer.warmup_steps=30"],
        "warmup_steps 30 .*steps 30",
    ),
    "refills without dropped groups": (
        ["replay.preset=fifo", "replay.warmup_steps=0", "sampling.max_refills=2"],
        "max_refills",
    ),
    "refills of a batch that is drawn from the buffer": (
        [
            "replay.preset=fifo",
            "replay.warmup_steps=0",
            "replay.drop_zero_variance=true",
            "sampling.max_refills=2",
        ],
        "max_refills 2 .*buffer_only",
    ),
    "asynchronous, log-probs recomputed": (["run.mode=async"], "behavior_logprobs"),
    "asynchronous, no server": (ASYNCHRONOUS[:2], "sampling.backend vllm_server"),
    "a server twice": (
        ["sampling.backend=vllm_server", "sampling.servers.urls=[http://a:1, http://a:1/]"],
        "more than once",
    ),
    "weights by another way": (
        ["sampling.servers.weight_transfer=nccl"],
        "weight_transfer.*folder",
    ),
    "asynchronous pool": ([*ASYNCHRONOUS, "replay.preset=uniform"], "'pool'"),
    "newest first with a buffer": (
        [*ASYNCHRONOUS, "sampling.collection.order=newest_first"],
        "newest_first.*replay.preset grpo",
    ),
    "asynchronous masks": ([*ASYNCHRONOUS, "reward.mask_truncated=true"], "mask_truncated"),
    "asynchronous refills": ([*ASYNCHRONOUS, "sampling.max_refills=2"], "max_refills"),
    "asynchronous weights that are always too old": (
        [*ASYNCHRONOUS, "run.sync_every_steps=4", "replay.max_age_steps=2"],
        "replay.max_age_steps .*3",
    ),
    "a replayed run that evaluates": (
        [*ASYNCHRONOUS, "sampling.collection.replay_journal=runs/x"],
        "eval",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_values_are_refused_with_key_and_value(case):
    overrides, message = REFUSED[case]
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        load_recipe("tiny", overrides)


LITERAL = ["12e4567", "0123", "on", "2026-11-20", "####", "exp #3", "!important do", "- a", "a: b",
           "{answer}", "'a' or 'b'", '"open']  # fmt: skip


@pytest.mark.parametrize("word", LITERAL)
def test_all_of_the_word_after_set_is_the_text_of_a_text_setting(tmp_path, word):
    recipe = load_recipe("tiny", [f"prompts.system_prompt={word}", f"prompts.id_field= {word} "])
    assert recipe.prompts.system_prompt == recipe.prompts.id_field == word
    path = tmp_path / "tiny.yaml"  # as a run saves it
    path.write_text(recipe_to_yaml(recipe))
    assert load_recipe(str(path)) == recipe


@pytest.mark.parametrize(
    "word, text", [("", None), ("null", None), ("'null'", "null"), ('"a\\n#"', "a\n#")]
)
def test_quotes_and_null_mean_in_text_after_set_what_they_mean_in_yaml(word, text):
    assert load_recipe("tiny", [f"prompts.id_field={word}"]).prompts.id_field == text


@pytest.mark.parametrize(
    "line, place",
    [
        ("answer_field: ####", "prompts.answer_field: .*None"),
        ("answer_field: true", "prompts.answer_field: .*valid string.*True"),
        ("id_field: 1e3", "prompts.id_field: .*1000.0"),
        ("system_prompt: !important do", "mine.yaml:2: "),
    ],
)
def test_text_that_yaml_reads_as_something_else_is_refused_in_a_file(tmp_path, line, place):
    path = tmp_path / "mine.yaml"
    path.write_text(f"prompts:\n  {line}\n")
    with pytest.raises(RecipeError, match=place):
        load_recipe(str(path))


SAME = {
    "optimizer.learning_rate": ("1e-4", 1e-4),
    "run.steps": ("1e3", 1000),
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


@pytest.mark.parametrize("name", ["../../evil", "..", "", "x" * 101])
def test_a_name_cannot_leave_the_folder_of_runs(name):
    with pytest.raises(RecipeError, match="name: "):
        resolve_recipe([{"name": name}])
    assert resolve_recipe([{"name": "exp[bold] 1"}]).name == "exp[bold] 1"


def test_refills_in_shadow_are_those_of_grpo_whatever_would_be_drawn():
    """Nothing drawn is trained on, so a batch of the buffer alone is not what refills fill."""
    words = REFUSED["refills of a batch that is drawn from the buffer"][0]
    assert load_recipe("tiny", [*words, "replay.shadow=true"]).sampling.max_refills == 2


def test_a_disabled_buffer_is_not_checked_for_contradictions():
    recipe = load_recipe("tiny", ["replay.preset=grpo", "run.steps=5", "replay.warmup_steps=20"])
    assert not recipe.replays


def test_what_is_no_recipe_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"'tinny'.*'tiny'.*qwen3-4b"):
        load_recipe("tinny")
    for name, text, place in (
        ("broken.yaml", "run:\n  steps: 5\n bad: [\n", r"broken.yaml:\d+: "),
        ("twice.yaml", "run: {steps: 5}\nrun: {seed: 1}\n", r"twice.yaml:2: .*'run'"),
        ("list.yaml", "- 1\n", "list.yaml"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(RecipeError, match=place):
            load_recipe(str(tmp_path / name))


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


@pytest.mark.parametrize(
    "gpus, trained, overrides, stage",
    [
        (1, 1000, [], 2),
        (4, 1000, [], 2),  # 2 * 1000 + 20 * 1000 / 4 = 7,000 of 14,000 bytes
        (3, 1000, [], 3),
        (3, 100, [], 2),  # adapters
        (4, 1000, ["engine.offload=everything"], 3),
        (4, 1000, ["model.dtype=float32"], 3),  # 4 * 1000 + 24 * 1000 / 4
        (2, 1000, ["engine.zero_stage=1"], 1),
    ],
)
def test_the_automatic_zero_stage_of_gpus_is_2_while_the_state_takes_half_of_one(
    gpus, trained, overrides, stage
):
    recipe = load_recipe("tiny", ["model.dtype=bfloat16", *overrides])
    assert recipe.zero_stage(gpus, GpuSizes(14_000, 1000, trained)) == stage


@pytest.mark.parametrize("attention, packs", [("sdpa", False), ("flash_attention_2", True)])
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
        (10**7, [], 64),
        (151_936, ["engine.logprob_chunk_tokens=1024"], 1024),
    ],
)
def test_the_default_chunk_of_the_head_keeps_its_logits_within_160_mib_or_640_on_a_gpu(
    vocabulary, overrides, tokens
):
    recipe = load_recipe("tiny", overrides)
    assert recipe.logprob_chunk_tokens(vocabulary) == tokens
    assert recipe.logprob_chunk_tokens(4 * vocabulary, on_cuda=True) == tokens


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


def test_functions_of_the_user_read_rows_and_the_shipped_ones_do_not():
    shipped = [{"function": name} for name in BUILTIN_VERIFIERS]
    for function, reads in ((shipped, False), ([*shipped, {"function": "own.py:score"}], True)):
        assert resolve_recipe([{"reward": {"function": function}}]).reward.reads_rows == reads


def test_reward_functions_that_all_weigh_nothing_are_refused():
    one, other = ({"function": "minerva", "weight": weight, "name": "n"} for weight in (0, 1))
    nothing = {"reward": {"function": [one, {**one, "name": "m"}]}}
    with pytest.raises(RecipeError, match="every weight is 0"):
        resolve_recipe([nothing])
    resolve_recipe([{"reward": {"function": [one, {**other, "name": "m"}]}}])


def test_bounds_of_ratios_are_read_again_as_they_were_written():
    for given in ("{low: 0.5}", "{high: 5}"):
        recipe = load_recipe("tiny", [f"loss.ratio_mask={given}", f"loss.sampler_ratio={given}"])
        assert resolve_recipe([recipe.model_dump(mode="json")]) == recipe
