"""The reward functions of docs/rewards.md are recognised and give what the page says, and the judge
of docs/judge_reward.py does against a server."""

import asyncio
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from grpo_replay.recipe import RewardSection
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.rewards.trial import Sample, try_rewards
from grpo_replay.types import Prompt

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
CASES = {
    "my_rewards.py:score": [1.0, -1.0, 1.0],
    "verl_score.py:compute_score": [1.0, 0.0, 0.0],
    "trl_reward.py:ends_well": [0.0, 0.0, 1.0],
    "relative.py:shorter_is_better": [1.0, -1.0, 1 / 5],
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
                scorer.submit(key, text, "4", {}, truncated=key == 2, prompt="2+2=", step=1,
                              group="1.0", of=3)  # fmt: skip
            found = [verdict.reward for verdict in scorer.results().values()]
        assert found == expected, function


@pytest.fixture
def judge():
    """An endpoint: its URL and what it was asked. The first request fails; it says yes to a
    solution with the reference answer, something else to "mumble", and nothing to "late"."""
    loop, ready, asked = asyncio.new_event_loop(), threading.Event(), []

    async def answer(request):
        text = (await request.json())["messages"][0]["content"]
        asked.append(text)
        if len(asked) == 1:
            return web.Response(status=503)
        if "late" in text or "fail" in text:
            await asyncio.sleep(60 if "late" in text else 0)
            return web.Response(status=500)
        reply = (
            "hm"
            if "mumble" in text
            else "Yes."
            if re.search(r"judge:\n(4|.*boxed.4)", text)
            else "<think>yes</think> No"
        )
        return web.json_response({"choices": [{"message": {"content": reply}}]})

    async def serve():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        served.append(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        ready.set()

    served: list[str] = []
    loop.create_task(serve())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    assert ready.wait(30)
    yield served[0], asked
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.mark.slow
def test_the_judge_gives_rewards_or_none_and_tries_again(judge, tmp_path, monkeypatch):
    url, asked = judge
    monkeypatch.setenv("JUDGE_URL", url)
    code = (PAGE.parent / "judge_reward.py").read_text()
    assert len(code.splitlines()) <= 80
    for name, value in (("TIMEOUT_SECONDS = 20.0", "1.0"), ("ATTEMPTS = 3", "2")):
        assert name in code
        code = code.replace(name, f"{name.partition('=')[0]}= {value}")
    (tmp_path / "judge_reward.py").write_text(code)
    section = RewardSection(function=f"{tmp_path}/judge_reward.py:judged", workers=1)
    expected = {"4": 1.0, "5": -1.0, "mumble": None, "late": None, "fail": None, "cut": -1.0}
    messages = [{"role": "user", "content": "2+2"}]
    prompt = Prompt("p", "2+2=", np.array([1]), "4", {}, messages)
    with RewardScorer.open(section) as scorer:
        assert try_rewards(section, scorer, Sample([prompt], 1, "prompts.source")) == []
        assert "boxed{4}" in asked[1]
        for text in expected:
            scorer.submit(text, text, "4", {}, messages=messages, truncated=text == "cut",
                          group="0.0", of=len(expected))  # fmt: skip
        found = {text: verdict.reward for text, verdict in scorer.results().items()}
        assert "no answer of http://127.0.0.1" in scorer.first_error
        assert "in 2 attempts: " in scorer.first_error
    assert found == expected
    assert len(asked) >= 8 and "2+2" in asked[0], "two attempts where the first fails"
