"""When the loop lets the sampler drop its weights, and when it must keep them."""

import pytest
from small_runs.trained import train_small_run

from grpo_replay.sampling.hf import HfSampler


@pytest.mark.slow
def test_weights_are_dropped_where_a_push_comes_next_and_kept_after_an_evaluation(
    tmp_path, monkeypatch
):
    seen = []

    def recorded(name):
        honest = getattr(HfSampler, name)

        def call(self, *arguments, **options):
            seen.append((name, options.get("keep_weights")) if name == "sleep" else name)
            return honest(self, *arguments, **options)

        return call

    for name in ("generate", "sleep", "load_weights"):
        monkeypatch.setattr(HfSampler, name, recorded(name))
    train_small_run(
        tmp_path / "run",
        run={"steps": 2},
        replay={"preset": "grpo"},
        eval={"benchmarks": ["tiny"], "max_problems": 2, "samples": 1, "every_steps": 2},
    )
    evaluation = ["generate", ("sleep", None)]
    step = ["generate", ("sleep", False), "load_weights"]
    assert seen == [*evaluation, *step, *step, *evaluation]
