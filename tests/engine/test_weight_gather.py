"""Gathering the weights under ZeRO-3 while parameters of a log-prob pass are still in flight."""

from core_engine import SCALED, make_rows, open_engine, parameters


def test_weights_are_gathered_after_a_log_prob_pass_without_an_update_in_between(processes):
    """More parameters than DeepSpeed keeps gathered: without emptying its cache the second gather
    fails with "Cannot partition a param in flight"."""
    rows = make_rows(7)
    with open_engine(processes, engine=SCALED) as engine:
        for _ in range(2):
            engine.update(rows)
            engine.logprobs(rows)
            before = parameters(engine)
            engine.logprobs(rows)
            assert parameters(engine).equal(before)
