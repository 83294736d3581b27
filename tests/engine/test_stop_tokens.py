"""Which tokens end a completion: chosen by the recipe, the same for training and evaluation."""

import pytest

from grpo_replay.engine.models import byte_tokenizer, load_tokenizer
from grpo_replay.errors import RecipeError
from grpo_replay.lab.dry_run.dry_run_report import dry_run
from grpo_replay.recipe import ModelSection, load_recipe, resolve_recipe
from grpo_replay.sampling.sampler_protocol import find_stop_tokens

QWEN = ModelSection(path="builtin:qwen3-0.6b", tokenizer="builtin:bytes", random_init=True)


@pytest.fixture(scope="module")
def qwen_tokenizer():
    """As in a Qwen base model: the EOS is <|endoftext|>, and <|im_end|> is another token."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"eos_token": "<|endoftext|>", "additional_special_tokens": ["<|im_end|>", "<|im_start|>"]}
    )
    return tokenizer


@pytest.mark.parametrize(
    ("stop_tokens", "texts"),
    [
        (None, {"<|endoftext|>", "<|im_end|>"}),
        (["<|endoftext|>"], {"<|endoftext|>"}),
        (["<|im_end|>"], {"<|im_end|>"}),
        (["<|im_end|>", "<|endoftext|>", "<|im_end|>"], {"<|endoftext|>", "<|im_end|>"}),
    ],
)
def test_the_recipe_chooses_and_by_default_both_end_a_qwen_completion(
    qwen_tokenizer, stop_tokens, texts
):
    recipe = resolve_recipe([{"sampling": {"stop_tokens": stop_tokens}}])
    ids = find_stop_tokens(recipe.sampling.stop_tokens, QWEN, qwen_tokenizer)
    assert list(ids) == sorted(qwen_tokenizer.convert_tokens_to_ids(list(texts)))


def test_a_stop_text_that_is_not_a_token_is_refused_before_the_run():
    recipe = load_recipe("tiny", ["sampling.stop_tokens=[<eo>]", "reward.function=minerva"])
    with pytest.raises(RecipeError, match=r"sampling.stop_tokens: '<eo>' .*'<eos>'"):
        find_stop_tokens(recipe.sampling.stop_tokens, recipe.model, load_tokenizer(recipe.model))
    report = dry_run(recipe).to_json()
    assert any("'<eo>' is not a token" in problem for problem in report["problems"])
    assert (report["fits"], report["exit_code"]) == (False, 2)
    with pytest.raises(RecipeError, match=r"sampling\.stop_tokens"):
        load_recipe("tiny", ["sampling.stop_tokens=[]"])


def test_a_text_that_encodes_to_one_token_is_that_token(qwen_tokenizer):
    """A byte-level tokenizer calls the newline Ċ; both names are right."""
    for text in ("\n", "Ċ"):
        recipe = resolve_recipe([{"sampling": {"stop_tokens": [text]}}])
        assert find_stop_tokens(recipe.sampling.stop_tokens, QWEN, qwen_tokenizer) == (ord("\n"),)
    two = resolve_recipe([{"sampling": {"stop_tokens": ["\n\n"]}}])
    with pytest.raises(RecipeError, match=r"'\\n\\n' is not a token of the tokenizer"):
        find_stop_tokens(two.sampling.stop_tokens, QWEN, qwen_tokenizer)
