"""Prompts that begin otherwise than the model expects are said."""

import json
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from grpo_replay.lab.dry_run.dry_run_report import dry_run
from grpo_replay.recipe import load_recipe
from grpo_replay.tiny import BASE_DIR


def test_numbers_are_as_yaml_1_2_has_them():
    assert load_recipe("tiny", ["run.steps=0250"]).run.steps == 250


def rows(tmp_path: Path) -> list[str]:
    problems = [{"problem": f"{n}+1", "answer": str(n + 1)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in problems))
    return [f"prompts.source={tmp_path}/rows.jsonl", "prompts.id_field=null", "engine.device=cpu",
            "eval.benchmarks=[]", "reward.workers=1", "reward.function=minerva",
            "prompts.system_prompt=null"]  # fmt: skip


def tokenizer_with_bos(folder: Path, template: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(BASE_DIR)
    tokenizer.add_special_tokens({"bos_token": "<unk>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


MESSAGES = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "user", "said"),
    [
        (MESSAGES, "{problem}=", "prompts begin without <unk>, which"),
        ("{{ bos_token }}" + MESSAGES, "{problem}=", None),
        ("plain", "<unk>{problem}=", "prompts begin with <unk> twice"),
        ("plain", "{problem}=", None),
    ],
)
def test_a_bos_that_is_left_out_or_written_twice(tmp_path, template, user, said):
    folder = tokenizer_with_bos(tmp_path / "tokenizer", template)
    kind = "plain" if template == "plain" else "chat"
    keys = [f"model.tokenizer={folder}", f"prompts.template={kind}",
            f"prompts.user_template='{user}'"]  # fmt: skip
    report = dry_run(load_recipe("tiny", [*rows(tmp_path), *keys])).to_json()
    assert report["problems"] == []
    found = [each["text"] for each in report["notices"] if "prompts begin" in each["text"]]
    assert [each[: len(said or "")] for each in found] == ([said] if said else [])
