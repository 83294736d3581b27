"""The reward functions of docs/rewards.md are recognised and give what the page says."""

import re
from pathlib import Path

from grpo_replay.recipe import RewardSection
from grpo_replay.rewards.scorer import RewardScorer

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
CASES = {
    "my_rewards.py:score": [1.0, -1.0, 1.0],
    "verl_score.py:compute_score": [1.0, 0.0, 0.0],
    "trl_reward.py:ends_well": [0.0, 0.0, 1.0],
    "judge.py:judged": [1.0, -1.0, None],
}
"""Rewards of "4", "5" and "so 4." (cut off) where the answer is 4."""


def test_every_example_grades_as_the_page_says(tmp_path):
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    assert {name for name, _ in blocks} == {case.partition(":")[0] for case in CASES}
    for function, expected in CASES.items():
        with RewardScorer.open(
            RewardSection(function=f"{tmp_path}/{function}", workers=1)
        ) as scorer:
            for key, text in enumerate(("4", "5", "so 4.")):
                scorer.submit(key, text, "4", {}, truncated=key == 2, prompt="2+2=", step=1)
            found = [verdict.reward for verdict in scorer.results().values()]
        assert found == expected, function
