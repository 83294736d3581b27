"""math-verify's published test cases, run through our verifier pool.

    pip download --no-deps --no-binary :all: math-verify==0.9.0 && tar xzf math_verify-0.9.0.tar.gz
    python benchmarks/math_verify_cases.py math_verify-0.9.0

Takes every parametrised case that names a gold answer, a prediction and the expected verdict under
default settings, and prints where our verdict is not the expected one, with what math-verify says
when it is called directly with its default extractor, with and without the math environment that
`reward.function: math_verify` puts around bare text. Exit code 1 if any of our verdicts is not that
of the direct call.
"""

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import math_verify

from grpo_replay.recipe import RewardSection
from grpo_replay.rewards.math_verify import in_environment
from grpo_replay.rewards.scorer import RewardScorer

DEFAULTS = {"precision": 6, "strict": True, "allow_set_relation_comp": False}


def published_cases(sources: Path) -> Iterator[tuple[str, str, str, bool]]:
    """(test, gold, prediction, expected) of every case under default settings."""
    sys.path.insert(0, str(sources))
    for file in sorted((sources / "tests").glob("test_*.py")):
        module = importlib.import_module(f"tests.{file.stem}")
        for name, function in vars(module).items():
            for mark in getattr(function, "pytestmark", []):
                if mark.name == "parametrize" and name.startswith("test_"):
                    yield from _cases(f"{file.stem}.{name}", *mark.args[:2])


def _cases(test: str, names: str, rows: list) -> Iterator[tuple[str, str, str, bool]]:
    keys = [name.strip().replace("result", "expected") for name in names.split(",")]
    for row in rows:
        case = dict(zip(keys, row, strict=True))
        others = case.keys() - {"gold", "pred", "expected"}
        if not {"gold", "pred", "expected"} <= case.keys() or not others <= DEFAULTS.keys():
            continue
        if all(case[key] == DEFAULTS[key] for key in others):
            yield test, case["gold"], case["pred"], bool(case["expected"])


def direct(gold: str, prediction: str) -> bool:
    return math_verify.verify(math_verify.parse(gold), math_verify.parse(prediction))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path)
    cases = list(published_cases(parser.parse_args().sources))
    with RewardScorer.open(RewardSection(function="math_verify")) as scorer:
        verdicts = scorer.score([(pred, gold, None) for _, gold, pred, _ in cases])
    ours = [verdict.status == "correct" for verdict in verdicts]
    wrapped = [direct(in_environment(gold), in_environment(pred)) for _, gold, pred, _ in cases]
    as_given = [direct(gold, pred) for _, gold, pred, _ in cases]
    for case, mine, with_env, without in zip(cases, ours, wrapped, as_given, strict=True):
        test, gold, pred, expected = case
        if mine != expected:
            print(
                f"{test}: expected {expected}, ours {mine}, direct {with_env} (as given "
                f"{without})\n  gold {gold[:100]!r}\n  pred {pred[:100]!r}"
            )
    different = sum(a != b for a, b in zip(ours, wrapped, strict=True))
    print(
        f"{len(cases)} cases: {sum(m == c[3] for m, c in zip(ours, cases, strict=True))} as "
        f"published; math-verify itself, default extractor, text as given: "
        f"{sum(m == c[3] for m, c in zip(as_given, cases, strict=True))}; "
        f"{different} differ from the direct call"
    )
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
